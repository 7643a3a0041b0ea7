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

bool has_gemm(const Runtime& runtime, Format format) {
  return has_float_products(format) ? runtime.gemm_bf16 != nullptr : runtime.gemm_u8s8 != nullptr;
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
                           const PackedMatrix& matrix, int32_t rows)
    : runtime_(runtime) {
  const FormatKernels& kernels = table.of(matrix.format);
  product_ = kernels.products;
  panels_ = kernels.panels;
  const bool alone = runtime.few_rows && has_float_products(matrix.format);
  const bool many = !alone && rows >= kernels.gemm_rows;
  pair_ = many ? nullptr : kernels.pair;
  if (many && kernels.tiles != nullptr) {
    tiles_ = &table.tiles;
    product_ = kernels.tiles;
    if (tiles_->begin != nullptr) tiles_->begin(operand_shape(matrix));
  } else {
    use_gemm_ = many && has_gemm(runtime, matrix.format);
  }
  panel_rows_ = panels_ != nullptr && !use_gemm_ && tiles_ == nullptr ? table.panel_rows : kNoRows;
}

TaskProducts::~TaskProducts() {
  if (tiles_ != nullptr && tiles_->end != nullptr) tiles_->end();
  if (!use_gemm_ || runtime_.gemm_release == nullptr) return;
  try {
    runtime_.gemm_release();
  } catch (...) {
    // It only frees this thread's tile state, which the next product sets anew.
  }
}

}  // namespace torch_mesh
