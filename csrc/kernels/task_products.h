// Products of a task's rows with blocks of one matrix: the layout of the activations, and which
// kernel runs.
#pragma once

#include <cstddef>
#include <cstdint>

#include "base/runtime.h"
#include "kernels/kernel_table.h"
#include "kernels/matrix_view.h"
#include "store/record.h"

namespace torch_mesh {

OperandShape operand_shape(const PackedMatrix& matrix);
// How many activations are converted to that form at a time: whole groups.
int32_t operand_columns(const PackedMatrix& matrix);

// Rows [begin, end) of x in the operand form of products with `matrix`. Rows are independent.
void prepare_rows(const KernelTable& table, const PackedMatrix& matrix, const void* x,
                  ScalarType type, int64_t row_stride, int32_t begin, int32_t end,
                  std::byte* prepared);

// Blocks that a task may go through at once: one row reads two, and more rows gain nothing.
constexpr int32_t blocks_at_once(int32_t rows) { return rows == 1 ? 2 : 1; }

// The rows of one task against blocks of one matrix. Whether tiles run depends on the number of
// rows and on Runtime::few_rows alone, so a product's bits do too.
class TaskProducts {
 public:
  TaskProducts(const KernelTable& table, const Runtime& runtime, const PackedMatrix& matrix,
               int32_t rows);
  ~TaskProducts();
  TaskProducts(const TaskProducts&) = delete;
  TaskProducts& operator=(const TaskProducts&) = delete;

  // Multiplies with the first `count` blocks, one or two.
  void operator()(const std::byte* const (&blocks)[2], int32_t count, const OperandShape& shape,
                  const OperandRows& rows, float* const (&sums)[2]) const {
    if (count == 2 && rows.count == 1 && pair_ != nullptr) {
      return pair_({blocks[0], shape, rows, sums[0]}, {blocks[1], shape, rows, sums[1]});
    }
    const auto product = rows.count >= panel_rows_ ? panels_ : product_;
    for (int32_t i = 0; i < count; ++i) product({blocks[i], shape, rows, sums[i]});
  }

 private:
  void (*product_)(const BlockProducts&);
  void (*panels_)(const BlockProducts&);
  void (*pair_)(const BlockProducts&, const BlockProducts&);  // nullptr for many rows
  int32_t panel_rows_;
  const KernelTable::Tiles* tiles_ = nullptr;
};

using Tile = float[kTileRows * kBlockColumns];

}  // namespace torch_mesh
