// What a task needs to multiply rows with blocks of one matrix: how its activations are laid out,
// and which product runs.
#pragma once

#include <cstddef>
#include <cstdint>

#include "base/runtime.h"
#include "kernels/kernel_table.h"
#include "kernels/matrix_view.h"
#include "store/record.h"

namespace torch_mesh {

OperandShape operand_shape(const PackedMatrix& matrix);
// How many activations are brought into that form at a time: whole groups.
int32_t operand_columns(const PackedMatrix& matrix);

bool has_gemm(const Runtime& runtime, Format format);

// Rows [begin, end) of x in the operand form of products with `matrix`. Rows are independent.
void prepare_rows(const KernelTable& table, const PackedMatrix& matrix, const void* x,
                  ScalarType type, int64_t row_stride, int32_t begin, int32_t end,
                  std::byte* prepared);

// The rows of one task against blocks of one matrix. Whether gemm or tiles run depends on the
// number of rows and on Runtime::few_rows alone, so a product's bits do too.
class TaskProducts {
 public:
  TaskProducts(const KernelTable& table, const Runtime& runtime, const PackedMatrix& matrix,
               int32_t rows);
  ~TaskProducts();
  TaskProducts(const TaskProducts&) = delete;
  TaskProducts& operator=(const TaskProducts&) = delete;

  void operator()(const std::byte* block, const OperandShape& shape, const OperandRows& rows,
                  float* sums) const {
    const auto product = rows.count >= panel_rows_ ? panels_ : product_;
    product({block, shape, rows, use_gemm_ ? &runtime_ : nullptr, sums});
  }

 private:
  void (*product_)(const BlockProducts&);
  void (*panels_)(const BlockProducts&);
  int32_t panel_rows_;
  const Runtime& runtime_;
  const KernelTable::Tiles* tiles_ = nullptr;
  bool use_gemm_ = false;
};

using Tile = float[kTileRows * kBlockColumns];

}  // namespace torch_mesh
