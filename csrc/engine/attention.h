// Attention of decode steps: a few tokens over the keys and values of a cache. torch's own product
// for one query row takes each head by itself and repeats the keys of grouped heads in memory;
// here a key is read once for all rows that share it.
#pragma once

#include <cstdint>

#include "base/runtime.h"
#include "engine/workspace.h"
#include "kernels/matrix_view.h"

namespace torch_mesh {

// [batch][heads][rows][head_dim], the last contiguous; strides count elements.
struct HeadRows {
  const void* data = nullptr;
  ScalarType type = ScalarType::kBf16;
  int64_t batch_stride = 0;
  int64_t head_stride = 0;
  int64_t row_stride = 0;
};

// [batch][tokens][keys], the last contiguous, the same for all heads. Added to the scores, or, if
// boolean, true for the keys that count.
struct AttentionMask {
  const void* data = nullptr;  // nullptr: every token sees all keys
  bool boolean = false;
  ScalarType type = ScalarType::kFloat32;  // unless boolean
  int64_t batch_stride = 0;
  int64_t token_stride = 0;
};

struct AttentionCall {
  int32_t batch = 0;
  int32_t tokens = 0;
  int32_t heads = 0;
  int32_t key_value_heads = 0;  // a divisor of heads
  int32_t keys = 0;
  int32_t key_dim = 0;  // a multiple of kHeadDimStep, kMaxHeadDim at most; so is value_dim
  int32_t value_dim = 0;
  HeadRows query = {}, key = {}, value = {};
  AttentionMask mask = {};
  float scale = 1.0f;
  void* out = nullptr;  // [batch][tokens][heads][value_dim], contiguous
  ScalarType out_type = ScalarType::kBf16;
};

// out = softmax(scale * query · key^T + mask) · value, in fp32; zero where every key is masked. A
// token has the bits that it would have alone over keys that begin with the same one. They do not
// depend on `threads`. Throws Error(kMemory). Safe from several threads at once.
void decode_attention(const AttentionCall& call, const Runtime& runtime, int32_t threads,
                      WorkspacePool& workspaces);

}  // namespace torch_mesh
