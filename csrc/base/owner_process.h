// Threads and locks do not survive fork(): what has them remembers which process opened it.
#pragma once

#include <pthread.h>

#include <atomic>
#include <cstdint>

namespace torch_mesh {

// Asked several times in every forward, so it counts forks: getpid() is a system call, up to a
// microsecond each in a virtual machine.
class OwnerProcess {
 public:
  OwnerProcess() : forks_(forks()) {}
  bool forked() const { return forks() != forks_; }

 private:
  static uint32_t forks() {
    static const int registered = pthread_atfork(nullptr, nullptr, [] { ++count_; });
    static_cast<void>(registered);
    return count_.load(std::memory_order_relaxed);
  }

  static inline std::atomic<uint32_t> count_{0};  // by which this process is away from the first
  uint32_t forks_;
};

}  // namespace torch_mesh
