// The test program's operator new (allocations.cpp) counts calls and fails those a test selects.
#pragma once

#include <atomic>
#include <cstdint>

namespace torch_mesh::testing {

extern thread_local int64_t allocations;  // of this thread
extern std::atomic<bool> io_starves;      // allocations on I/O threads fail

// From construction on the process's `number`-th allocation, on any thread, throws std::bad_alloc.
// With `all` every later one throws too.
class FailingAllocation {
 public:
  explicit FailingAllocation(int64_t number, bool all = false);
  ~FailingAllocation();
  FailingAllocation(const FailingAllocation&) = delete;
  FailingAllocation& operator=(const FailingAllocation&) = delete;

  bool reached() const;
};

// Calls attempt() with each of its allocations failing in turn; returns how many there were.
// attempt() must catch its own exceptions.
template <typename Attempt>
int64_t with_each_allocation_failing(const Attempt& attempt, bool all = false) {
  for (int64_t number = 0;; ++number) {
    const FailingAllocation failing(number, all);
    attempt();
    if (!failing.reached()) return number;
  }
}

}  // namespace torch_mesh::testing
