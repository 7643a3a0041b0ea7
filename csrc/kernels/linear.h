// A linear layer on packed blocks, cut into one task per block.
#pragma once

#include <cstddef>
#include <cstdint>

#include "base/runtime.h"
#include "kernels/expert_ffn.h"
#include "kernels/matrix_view.h"
#include "store/record.h"

namespace torch_mesh {

struct LinearBlock {
  const std::byte* data;
  int32_t columns;    // without padding
  const float* bias;  // [kBlockColumns]; nullptr: none
};

// out[row][0 .. columns) = x[row] · block + bias, in `type`, for `rows` prepared rows (prepare_rows
// of task_products.h); rows of `out` are `out_stride` elements apart. Bits depend on the weights,
// the row and the number of rows alone.
void linear_block(const KernelTable& table, const Runtime& runtime, const PackedMatrix& matrix,
                  const LinearBlock& block, const std::byte* prepared, int32_t rows, void* out,
                  ScalarType type, int64_t out_stride);

}  // namespace torch_mesh
