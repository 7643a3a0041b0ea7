#include "kernels/task_products.h"

#include <algorithm>

namespace torch_mesh {
namespace {

void prepare_row(const KernelTable& table, const PackedMatrix& matrix, const OperandShape& shape,
                 const std::byte* x, ScalarType type, std::byte* row) {
  const int32_t step = operand_columns(matrix);
  alignas(64) float values[kMaxGroup];
  for (int32_t k = 0; k < matrix.depth_padded; k += step) {
    const int32_t count = std::clamp(matrix.depth - k, 0, step);
    table.to_floats(x + k * scalar_bytes(type), type, count, values);
    std::fill(values + count, values + step, 0.0f);
    table.store_operands(values, k, step, shape, row);
  }
}

}  // namespace

int32_t operand_columns(const PackedMatrix& matrix) {
  return has_float_products(matrix.format) ? kBlockColumns
                                           : std::max(kBlockColumns, matrix.group_size);
}

OperandShape operand_shape(const PackedMatrix& matrix) {
  const int64_t bytes = has_float_products(matrix.format)
                            ? int64_t{2} * matrix.depth_padded
                            : matrix.depth_padded + int64_t{8} * matrix.groups();
  return {matrix.format, matrix.group_size, matrix.depth_padded, round_up(bytes, 64),
          matrix.block_bytes};
}

void prepare_rows(const KernelTable& table, const PackedMatrix& matrix, const void* x,
                  ScalarType type, int64_t row_stride, int32_t begin, int32_t end,
                  std::byte* prepared) {
  const OperandShape shape = operand_shape(matrix);
  for (int32_t row = begin; row < end; ++row) {
    const std::byte* from =
        static_cast<const std::byte*>(x) + row * row_stride * scalar_bytes(type);
    prepare_row(table, matrix, shape, from, type, prepared + row * shape.row_bytes);
  }
}

TaskProducts::TaskProducts(const KernelTable& table, const Runtime& runtime,
                           const PackedMatrix& matrix, int32_t rows) {
  const FormatKernels& kernels = table.of(matrix.format);
  product_ = kernels.products;
  panels_ = kernels.panels;
  const bool alone = runtime.few_rows && has_float_products(matrix.format);
  const bool many = !alone && kernels.tiles != nullptr && rows >= kernels.tile_rows;
  pair_ = many ? nullptr : kernels.pair;
  panel_rows_ = panels_ != nullptr && !many ? table.panel_rows : kNoRows;
  if (!many) return;
  tiles_ = &table.tiles;
  product_ = kernels.tiles;
  if (tiles_->begin != nullptr) tiles_->begin(operand_shape(matrix));
}

TaskProducts::~TaskProducts() {
  if (tiles_ != nullptr && tiles_->end != nullptr) tiles_->end();
}

}  // namespace torch_mesh
