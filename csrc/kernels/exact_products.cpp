#include "kernels/exact_products.h"

#include <algorithm>

#include "kernels/kernel_table.h"

namespace torch_mesh {
namespace {

constexpr int32_t kRowsAtOnce = 256;  // their sums, 64 KiB, stay in a second-level cache

// Runs add(first row, rows, sums) over all rows, a part of them at a time, and stores the sums.
template <typename Add>
void for_row_parts(const FloatRows& rows, float* out, int64_t out_stride, int32_t columns,
                   const Add& add) {
  alignas(64) float sums[kRowsAtOnce * kSquare];
  for (int32_t first = 0; first < rows.count; first += kRowsAtOnce) {
    const int32_t count = std::min(kRowsAtOnce, rows.count - first);
    std::fill(sums, sums + count * kSquare, 0.0f);
    add(first, count, sums);
    for (int32_t r = 0; r < count; ++r) {
      std::copy(sums + r * kSquare, sums + r * kSquare + columns, out + (first + r) * out_stride);
    }
  }
}

// The columns of the square that begins at column `first` of `all`.
int32_t columns_of(int32_t first, int32_t all) { return std::min(kSquare, all - first); }

}  // namespace

void ExactProducts::outputs(int32_t task, const FloatRows& rows, float* out,
                            int64_t out_stride) const {
  const int32_t column = task / halves_ * kSquare;
  const auto dequantize = table_.of(matrix_.format).dequantize;
  const std::byte* block = blocks_ + task * matrix_.block_bytes;
  alignas(64) float square[kSquare * kSquare];
  out += int64_t{task % halves_} * matrix_.columns + column;
  for_row_parts(rows, out, out_stride, columns_of(column, matrix_.columns),
                [&](int32_t first, int32_t count, float* sums) {
                  for (int32_t k = 0; k < matrix_.depth; k += kSquare) {
                    dequantize({block, matrix_.group_size, matrix_.depth_padded, k}, square);
                    const float* from = rows.data + first * rows.stride + k;
                    table_.multiply_square(
                        square, {from, rows.stride, columns_of(k, matrix_.depth), count}, sums);
                  }
                });
}

void ExactProducts::inputs(int32_t task, const FloatRows& rows, float* out,
                           int64_t out_stride) const {
  const int32_t k = task * kSquare;
  if (k >= matrix_.depth) return;  // padding
  const auto dequantize = table_.of(matrix_.format).dequantize;
  alignas(64) float square[kSquare * kSquare];
  alignas(64) float transposed[kSquare * kSquare];
  for_row_parts(
      rows, out + k, out_stride, columns_of(k, matrix_.depth),
      [&](int32_t first, int32_t count, float* sums) {
        for (int32_t b = 0; b < matrix_.blocks; ++b) {
          const int32_t column = b / halves_ * kSquare;
          dequantize(
              {blocks_ + b * matrix_.block_bytes, matrix_.group_size, matrix_.depth_padded, k},
              square);
          table_.transpose(square, kSquare, kSquare, transposed);
          const float* from =
              rows.data + first * rows.stride + int64_t{b % halves_} * matrix_.columns + column;
          table_.multiply_square(
              transposed, {from, rows.stride, columns_of(column, matrix_.columns), count}, sums);
        }
      });
}

}  // namespace torch_mesh
