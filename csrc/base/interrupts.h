// Calls of the interrupt hook (base/runtime.h). The hook runs Python's signal handlers and, from
// Python 3.12 on, its garbage collector. That code may want any lock of the engine's, so a thread
// that calls the hook holds none.
#pragma once

#include <algorithm>
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

// Waits on `changed` until holds() is true. False if it is not by `deadline`. Calls the hook ten
// times a second, however often `changed` is notified. Throws Error(kInterrupted), with the lock
// held.
template <typename Holds>
bool wait_interruptibly(std::unique_lock<std::mutex>& lock, std::condition_variable& changed,
                        std::chrono::steady_clock::time_point deadline, const Runtime& runtime,
                        std::string_view during, const Holds& holds) {
  using Clock = std::chrono::steady_clock;
  while (!changed.wait_until(lock, std::min(deadline, Clock::now() + kInterruptSlice), holds)) {
    if (Clock::now() >= deadline) return false;
    check_interrupted(runtime, during, lock);
  }
  return true;
}

// The same without a deadline.
template <typename Holds>
void wait_interruptibly(std::unique_lock<std::mutex>& lock, std::condition_variable& changed,
                        const Runtime& runtime, std::string_view during, const Holds& holds) {
  wait_interruptibly(lock, changed, std::chrono::steady_clock::time_point::max(), runtime, during,
                     holds);
}

}  // namespace torch_mesh
