#include "kernels/linear.h"

#include <algorithm>

#include "kernels/convert.h"
#include "kernels/task_products.h"

namespace torch_mesh {

void linear_blocks(const KernelTable& table, const Runtime& runtime, const PackedMatrix& matrix,
                   std::span<const LinearBlock> blocks, const std::byte* prepared, int32_t rows,
                   ScalarType type, int64_t out_stride) {
  const OperandShape shape = operand_shape(matrix);
  const TaskProducts products(table, runtime, matrix, rows);
  alignas(64) Tile sums[2];
  for (int32_t row = 0; row < rows; row += kTileRows) {
    const OperandRows tile{prepared + row * shape.row_bytes, nullptr,
                           std::min(rows - row, kTileRows)};
    products({blocks.front().data, blocks.back().data}, static_cast<int32_t>(blocks.size()), shape,
             tile, {sums[0], sums[1]});
    for (size_t i = 0; i < blocks.size(); ++i) {
      const LinearBlock& block = blocks[i];
      for (int32_t r = 0; r < tile.count; ++r) {
        float* from = sums[i] + r * kBlockColumns;
        if (block.bias != nullptr) table.finish(from, block.bias, 1.0f);
        store_row(from, block.columns, row_pointer(block.out, type, out_stride, row + r), type);
      }
    }
  }
}

}  // namespace torch_mesh
