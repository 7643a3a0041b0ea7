// Products of unrounded fp32 rows with packed weights in fp32, for gradients. Weights are
// dequantized a square at a time, which stays in the cache; there is never a whole matrix of
// floats.
//
// A task computes 64 columns of the result. Its bits depend on the weights and each row alone,
// never on which thread runs it, or which other rows there are.
#pragma once

#include <cstddef>
#include <cstdint>

#include "kernels/expert_ffn.h"
#include "store/record.h"

namespace torch_mesh {

struct FloatRows {
  const float* data;
  int64_t stride;
  int32_t count;
};

class ExactProducts {
 public:
  // `blocks` holds `halves` matrices side by side, whose outputs follow one another: [gate | up].
  ExactProducts(const KernelTable& table, const PackedMatrix& matrix, int32_t halves,
                const std::byte* blocks)
      : table_(table), matrix_(matrix), halves_(halves), blocks_(blocks) {}

  // out[row][outputs] = row · W^T.
  int32_t output_tasks() const { return matrix_.blocks; }
  void outputs(int32_t task, const FloatRows& rows, float* out, int64_t out_stride) const;

  // out[row][inputs] = row · W.
  int32_t input_tasks() const { return matrix_.depth_padded / kBlockColumns; }
  void inputs(int32_t task, const FloatRows& rows, float* out, int64_t out_stride) const;

 private:
  const KernelTable& table_;
  const PackedMatrix& matrix_;
  int32_t halves_;
  const std::byte* blocks_;
};

}  // namespace torch_mesh
