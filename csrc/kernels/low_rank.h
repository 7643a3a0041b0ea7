// A low-rank addition to one projection of one expert: x · W^T + scaling * (x · a^T) · b, what an
// adapter adds to frozen weights (LoRA, arXiv 2106.09685). In fp32, whatever the weights are.
#pragma once

#include <cstdint>

namespace torch_mesh {

// A task keeps this many floats of one row on its stack.
inline constexpr int32_t kMaxRank = 1024;

struct LowRank {
  int32_t rank = 0;  // 0: there is none
  float scaling = 1.0f;
  const float* a = nullptr;  // [rank][in features]
  int64_t a_stride = 0;      // between its rows
  const float* b = nullptr;  // [rank][halves][out features of a half]
  int64_t b_stride = 0;      // between its rows
  int64_t half_stride = 0;   // between gate and up

  const float* b_of(int32_t half, int32_t column) const { return b + half * half_stride + column; }
};

}  // namespace torch_mesh
