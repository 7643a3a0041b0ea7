#include "kernels/linear.h"

#include <algorithm>

#include "kernels/convert.h"
#include "kernels/task_products.h"

namespace torch_mesh {

void linear_block(const KernelTable& table, const Runtime& runtime, const PackedMatrix& matrix,
                  const LinearBlock& block, const std::byte* prepared, int32_t rows, void* out,
                  ScalarType type, int64_t out_stride) {
  const OperandShape shape = operand_shape(matrix);
  const TaskProducts products(table, runtime, matrix, rows);
  alignas(64) Tile sums;
  for (int32_t row = 0; row < rows; row += kTileRows) {
    const OperandRows tile{prepared + row * shape.row_bytes, nullptr,
                           std::min(rows - row, kTileRows)};
    products(block.data, shape, tile, sums);
    for (int32_t r = 0; r < tile.count; ++r) {
      float* from = sums + r * kBlockColumns;
      if (block.bias != nullptr) table.finish(from, block.bias, 1.0f);
      store_row(from, block.columns, row_pointer(out, type, out_stride, row + r), type);
    }
  }
}

}  // namespace torch_mesh
