// Starts the engine's own threads.
#pragma once

#include <string>
#include <string_view>
#include <system_error>
#include <thread>
#include <utility>

#include "base/error.h"
#include "base/signals_blocked.h"

namespace torch_mesh {

// Runs `body` on a new thread, which leaves signals to the application's threads. Throws
// Error(kMemory), which names `which` thread, if the system has none left, and std::bad_alloc.
template <typename Body>
std::thread start_thread(std::string_view which, Body body) {
  const SignalsBlocked guard;
  try {
    return std::thread(std::move(body));
  } catch (const std::system_error& error) {
    throw Error(ErrorKind::kMemory,
                "cannot start " + std::string(which) + ": " + error.what() +
                    "; raise the limit of processes (ulimit -u, or pids.max of the cgroup)",
                {}, error.code().value());
  }
}

}  // namespace torch_mesh
