// Functions that the engine takes from its embedder: to compute on threads, to let them sleep, and
// to ask whether to stop. The bindings pass torch's threads, or a team of their own on a busy
// machine, and Python's signal check. Without them the engine computes on the calling thread.
#pragma once

#include <cstdint>

namespace torch_mesh {

// The most threads that compute one call. OpenMP terminates the process if the system has no
// threads left for a team.
inline constexpr int32_t kMaxThreads = 1024;

// body(context, begin, end) is called on disjoint ranges that cover [0, count), from any thread.
using ParallelBody = void (*)(void* context, int64_t begin, int64_t end);

struct Runtime {
  // Runs body over [0, count) on `threads` threads at most and returns when all of it is done.
  void (*parallel_for)(int64_t count, int32_t threads, ParallelBody body, void* context) = nullptr;

  // Calls wait(context) on this thread. Until it returns, the other threads of a team of `threads`
  // sleep instead of spinning for work of parallel_for. nullptr: they sleep anyway.
  void (*wait_asleep)(int32_t threads, void (*wait)(void* context), void* context) = nullptr;

  // True for the rows of a decode step: each gets the bits that it gets alone. So products of
  // floats use no tiles, whose sums are in another order than those of one row.
  // Otherwise a token that is verified would get other bits than one that is not. (Sums of integers
  // are exact.)
  bool few_rows = false;

  // True when the caller should stop waiting (a pending Ctrl-C). A waiting thread calls it about
  // ten times a second; an I/O thread never does. It is called without any lock held
  // (base/interrupts.h).
  bool (*interrupted)() = nullptr;
};

inline Runtime for_few_rows(Runtime runtime) {
  runtime.few_rows = true;
  return runtime;
}

// parallel_for for any callable `body(begin, end)`, without an allocation.
template <typename Body>
void parallel_for(const Runtime& runtime, int64_t count, int32_t threads, const Body& body) {
  if (count <= 0) return;
  if (runtime.parallel_for == nullptr || threads <= 1 || count == 1) {
    body(int64_t{0}, count);
    return;
  }
  runtime.parallel_for(
      count, threads,
      [](void* context, int64_t begin, int64_t end) {
        (*static_cast<const Body*>(context))(begin, end);
      },
      const_cast<void*>(static_cast<const void*>(&body)));
}

// wait_asleep for any callable.
template <typename Wait>
void wait_asleep(const Runtime& runtime, int32_t threads, const Wait& wait) {
  if (runtime.wait_asleep == nullptr || threads <= 1) {
    wait();
    return;
  }
  runtime.wait_asleep(
      threads, [](void* context) { (*static_cast<const Wait*>(context))(); },
      const_cast<void*>(static_cast<const void*>(&wait)));
}

}  // namespace torch_mesh
