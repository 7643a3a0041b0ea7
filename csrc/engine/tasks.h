// Work that any thread may take.
#pragma once

#include <algorithm>
#include <atomic>
#include <cstdint>

#include "base/runtime.h"

namespace torch_mesh {

// Tasks are taken one by one: experts have unequal numbers of rows, and a core may be busy
// elsewhere.
template <typename Body>
void run_tasks(const Runtime& runtime, int64_t tasks, int32_t threads, const Body& body) {
  std::atomic<int64_t> next{0};
  parallel_for(runtime, std::min<int64_t>(tasks, threads), threads, [&](int64_t, int64_t) {
    for (int64_t task; (task = next.fetch_add(1, std::memory_order_relaxed)) < tasks;) body(task);
  });
}

}  // namespace torch_mesh
