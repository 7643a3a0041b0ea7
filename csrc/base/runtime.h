// What the engine takes from its embedder. The bindings hand in torch's thread pool, its
// brgemm and Python's signal check; the engine's own tests hand in std::thread and nothing else.
#pragma once

#include <cstdint>

namespace torch_mesh {

// That compute one call. A team that the system has no threads for ends the process: OpenMP knows
// no error.
inline constexpr int32_t kMaxThreads = 1024;

// body(context, begin, end) is called on disjoint ranges that cover [0, count), from any thread.
using ParallelBody = void (*)(void* context, int64_t begin, int64_t end);

struct Runtime {
  // Runs body over [0, count) on `threads` threads at most and returns when all of it is done.
  void (*parallel_for)(int64_t count, int32_t threads, ParallelBody body, void* context) = nullptr;

  // Calls wait(context) on this thread, and lets the others of a team of so many sleep until it has
  // returned, where they would spin for work of parallel_for. nullptr: they sleep anyhow.
  void (*wait_asleep)(int32_t threads, void (*wait)(void* context), void* context) = nullptr;

  // C[m][n] (ldc) = A[m][k] (lda) · B, B in 64-column panels as packed (VNNI order, ldb = 64).
  // nullptr where the machine or the build has none; then the engine's own many-row kernels run.
  void (*gemm_bf16)(int64_t m, int64_t n, int64_t k, int64_t lda, int64_t ldb, int64_t ldc,
                    const uint16_t* a, const uint16_t* b, float* c) = nullptr;
  void (*gemm_u8s8)(int64_t m, int64_t n, int64_t k, int64_t lda, int64_t ldb, int64_t ldc,
                    const uint8_t* a, const int8_t* b, int32_t* c) = nullptr;
  // Ends a thread's run of gemm calls (AMX tile state).
  void (*gemm_release)() = nullptr;

  // Of the rows of a decode step: each is to have the bits that it has alone. So products of floats
  // go neither to gemm nor to tiles, which add up in another order than those of one row, or a
  // token that is verified would have other bits than one that is not. (Sums of integers are
  // exact.)
  bool few_rows = false;

  // True when the caller should stop waiting (a pending Ctrl-C). Called about ten times a second
  // by a thread that waits, never by an I/O thread, and never with a lock held (base/interrupts.h).
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
