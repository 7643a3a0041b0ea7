// Calls of the interrupt hook (base/runtime.h). The hook runs Python's signal handlers and, from
// Python 3.12 on, its garbage collector. That code may want any lock of the engine's, so a thread
// that calls the hook holds none.
#pragma once

#include <chrono>
#include <condition_variable>
#include <mutex>
#include <string>
#include <string_view>

#include "base/error.h"
#include "base/runtime.h"

namespace torch_mesh {

// The time between two checks for Ctrl-C during a wait.
inline constexpr std::chrono::milliseconds kInterruptSlice{100};

[[noreturn]] inline void throw_interrupted(std::string_view during) {
  throw Error(ErrorKind::kInterrupted, "interrupted while " + std::string(during));
}

// Throws Error(kInterrupted), "interrupted while " and `during`, when the hook says stop.
inline void check_interrupted(const Runtime& runtime, std::string_view during) {
  if (runtime.interrupted != nullptr && runtime.interrupted()) throw_interrupted(during);
}

// The same for a caller that holds `lock`. Releases it for the call of the hook, and holds it again
// on return and when it throws.
inline void check_interrupted(const Runtime& runtime, std::string_view during,
                              std::unique_lock<std::mutex>& lock) {
  if (runtime.interrupted == nullptr) return;
  lock.unlock();
  const bool interrupted = runtime.interrupted();
  lock.lock();
  if (interrupted) throw_interrupted(during);
}

// Waits on `changed` until holds() is true. Throws Error(kInterrupted), with the lock held.
template <typename Holds>
void wait_interruptibly(std::unique_lock<std::mutex>& lock, std::condition_variable& changed,
                        const Runtime& runtime, std::string_view during, const Holds& holds) {
  while (!changed.wait_for(lock, kInterruptSlice, holds)) {
    check_interrupted(runtime, during, lock);
  }
}

}  // namespace torch_mesh
