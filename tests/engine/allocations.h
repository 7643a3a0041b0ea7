// The test program's operator new (allocations.cpp), which counts, and fails where a test says so.
#pragma once

#include <atomic>
#include <cstdint>

namespace torch_mesh::testing {

extern thread_local int64_t allocations;  // of this thread
extern std::atomic<bool> io_starves;      // the I/O threads get nothing

// The `number`-th allocation of the process from here on throws std::bad_alloc, on whatever thread:
// that one, or with `all` those after it, too.
class FailingAllocation {
 public:
  explicit FailingAllocation(int64_t number, bool all = false);
  ~FailingAllocation();
  FailingAllocation(const FailingAllocation&) = delete;
  FailingAllocation& operator=(const FailingAllocation&) = delete;

  bool reached() const;
};

// Calls attempt() with each of its allocations failing in turn, until all have; returns how many.
// What attempt() throws has to be caught in it.
template <typename Attempt>
int64_t with_each_allocation_failing(const Attempt& attempt, bool all = false) {
  for (int64_t number = 0;; ++number) {
    const FailingAllocation failing(number, all);
    attempt();
    if (!failing.reached()) return number;
  }
}

}  // namespace torch_mesh::testing
