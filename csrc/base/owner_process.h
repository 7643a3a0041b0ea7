// Remembers which process opened an object, and deletes it there alone. Threads and locks do not
// survive fork().
#pragma once

#include <pthread.h>

#include <atomic>
#include <cstdint>
#include <memory>
#include <string>
#include <utility>

#include "base/error.h"

namespace torch_mesh {

// Loading the model in the forked child does not help: torch's OpenMP does not survive a fork
// either, and its first parallel product would hang.
inline constexpr const char* kSpawnInstead =
    "start the child with the spawn method, as multiprocessing.get_context('spawn') does, and load "
    "the model there";

[[noreturn]] inline void throw_forked(const char* what) {
  throw Error(ErrorKind::kForked,
              std::string(what) +
                  " belongs to the process that opened it and cannot be used in a forked child; " +
                  kSpawnInstead);
}

// forked() is called several times in every forward, so it compares a count of forks: getpid() is a
// system call, up to a microsecond each in a virtual machine.
class OwnerProcess {
 public:
  OwnerProcess() : forks_(forks()) {}
  bool forked() const { return forks() != forks_; }

  // Throws Error(kForked) in a child. Call it before taking any lock: one that another thread held
  // at the fork is never released in the child.
  void check(const char* what) const {
    if (forked()) throw_forked(what);
  }

 private:
  static uint32_t forks() {
    static const int registered = pthread_atfork(nullptr, nullptr, [] { ++count_; });
    static_cast<void>(registered);
    return count_.load(std::memory_order_relaxed);
  }

  static inline std::atomic<uint32_t> count_{0};  // forks between the first process and this one
  uint32_t forks_;
};

// Leaks the object in a forked child: its threads, which a destructor would join, exist in the
// parent alone, and another thread may have been changing it at the fork.
struct DeleteInOwner {
  OwnerProcess owner;
  template <typename T>
  void operator()(T* object) const {
    if (!owner.forked()) delete object;
  }
};

template <typename T>
using Owned = std::unique_ptr<T, DeleteInOwner>;

template <typename T, typename... Arguments>
Owned<T> make_owned(Arguments&&... arguments) {
  return Owned<T>(new T(std::forward<Arguments>(arguments)...));
}

}  // namespace torch_mesh
