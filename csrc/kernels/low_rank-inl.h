// Both halves of a low-rank product, on rows in fp32. Include after the target's simd header.
#pragma once

#include "kernels/kernel_table.h"

namespace torch_mesh {
namespace {

inline float sum_of_floats(Floats value) {
  alignas(64) float lanes[kLanes];
  store(lanes, value);
  for (int half = kLanes / 2; half > 0; half /= 2) {
    for (int i = 0; i < half; ++i) lanes[i] += lanes[i + half];
  }
  return lanes[0];
}

inline float dot_floats(const float* a, const float* b, int32_t count) {
  constexpr int kSums = 4;  // enough to hide the latency of a multiplication
  Floats sums[kSums];
  for (Floats& sum : sums) sum = broadcast(0.0f);
  int32_t i = 0;
  for (; i + kSums * kLanes <= count; i += kSums * kLanes) {
    for (int v = 0; v < kSums; ++v) {
      sums[v] = multiply_add(load(a + i + v * kLanes), load(b + i + v * kLanes), sums[v]);
    }
  }
  for (; i + kLanes <= count; i += kLanes) {
    sums[0] = multiply_add(load(a + i), load(b + i), sums[0]);
  }
  float total = sum_of_floats((sums[0] + sums[1]) + (sums[2] + sums[3]));
  for (; i < count; ++i) total = __builtin_fmaf(a[i], b[i], total);
  return total;
}

inline void low_rank_in(const float* values, int32_t count, const float* a, int64_t stride,
                        int32_t rank, float* sums) {
  for (int32_t j = 0; j < rank; ++j) sums[j] += dot_floats(values, a + j * stride, count);
}

inline void low_rank_out(const float* factors, int32_t rank, const float* b, int64_t stride,
                         int32_t columns, float* sums) {
  for (int32_t j = 0; j < rank; ++j) {
    const float* row = b + j * stride;
    const Floats factor = broadcast(factors[j]);
    int32_t c = 0;
    for (; c + kLanes <= columns; c += kLanes) {
      store(sums + c, multiply_add(factor, load(row + c), load(sums + c)));
    }
    for (; c < columns; ++c) sums[c] = __builtin_fmaf(factors[j], row[c], sums[c]);
  }
}

}  // namespace
}  // namespace torch_mesh
