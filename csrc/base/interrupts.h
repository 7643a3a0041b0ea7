// Asking the interrupt hook (base/runtime.h). It runs Python's signal handlers and, from
// Python 3.12 on, its garbage collector: code that may want any lock of the engine's. A thread that
// asks holds none.
#pragma once

#include <chrono>
#include <condition_variable>
#include <mutex>
#include <string>
#include <string_view>

#include "base/error.h"
#include "base/runtime.h"

namespace torch_mesh {

// How long a wait goes on between two looks for Ctrl-C.
inline constexpr std::chrono::milliseconds kInterruptSlice{100};

[[noreturn]] inline void throw_interrupted(std::string_view during) {
  throw Error(ErrorKind::kInterrupted, "interrupted while " + std::string(during));
}

// Throws Error(kInterrupted) when the hook says stop: "interrupted while ", and `during`.
inline void check_interrupted(const Runtime& runtime, std::string_view during) {
  if (runtime.interrupted != nullptr && runtime.interrupted()) throw_interrupted(during);
}

// The same for a caller that holds `lock`, and holds it again afterwards, whatever comes of it.
inline void check_interrupted(const Runtime& runtime, std::string_view during,
                              std::unique_lock<std::mutex>& lock) {
  if (runtime.interrupted == nullptr) return;
  lock.unlock();
  const bool interrupted = runtime.interrupted();
  lock.lock();
  if (interrupted) throw_interrupted(during);
}

// Waits on `changed` until holds() is true. Throws Error(kInterrupted), with the lock.
template <typename Holds>
void wait_interruptibly(std::unique_lock<std::mutex>& lock, std::condition_variable& changed,
                        const Runtime& runtime, std::string_view during, const Holds& holds) {
  while (!changed.wait_for(lock, kInterruptSlice, holds)) {
    check_interrupted(runtime, during, lock);
  }
}

}  // namespace torch_mesh
