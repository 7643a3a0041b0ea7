// A linear layer on packed blocks, cut into tasks of blocks.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>

#include "base/runtime.h"
#include "kernels/expert_ffn.h"
#include "kernels/matrix_view.h"
#include "store/record.h"

namespace torch_mesh {

struct LinearBlock {
  const std::byte* data;
  int32_t columns;    // without padding
  const float* bias;  // [kBlockColumns]; nullptr: none
  void* out;
};

// out[row][0 .. columns) = x[row] · block + bias, in `type`, of one block or two, for `rows`
// prepared rows (prepare_rows of task_products.h); rows of `out` are `out_stride` elements apart.
// Bits depend on the weights, the row and the number of rows alone.
void linear_blocks(const KernelTable& table, const Runtime& runtime, const PackedMatrix& matrix,
                   std::span<const LinearBlock> blocks, const std::byte* prepared, int32_t rows,
                   ScalarType type, int64_t out_stride);

}  // namespace torch_mesh
