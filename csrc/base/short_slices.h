// Asks the kernel for short time slices (Linux 6.12; no effect before). A thread that is woken
// takes a processor from one that computes only if its slice is shorter.
#pragma once

#include <sys/syscall.h>
#include <unistd.h>

#include <cstdint>

namespace torch_mesh {

// For the calling thread. Threads that it makes inherit it.
inline void ask_for_short_slices() {
  // The kernel's sched_attr in its first size; its header and that of glibc before 2.41 cannot both
  // be included.
  struct {
    uint32_t size, policy;
    uint64_t flags;
    int32_t nice;
    uint32_t priority;
    uint64_t runtime, deadline, period;
  } attributes{};
  constexpr uint64_t kSlice = 100'000;  // the shortest there is, in ns
  if (syscall(SYS_sched_getattr, 0, &attributes, sizeof attributes, 0) != 0) return;
  attributes.runtime = kSlice;
  static_cast<void>(syscall(SYS_sched_setattr, 0, &attributes, 0));
}

}  // namespace torch_mesh
