#include "kernels/weight_panel.h"

#include <cstring>

namespace torch_mesh {
namespace {

const std::byte* element(const MatrixView& view, int64_t row, int64_t column) {
  const int64_t index = row * view.row_stride + column * view.column_stride;
  return static_cast<const std::byte*>(view.data) + index * scalar_bytes(view.type);
}

// Loads `count` elements that are `stride` apart, at most kMaxGroup.
void load_line(const KernelTable& table, const std::byte* from, ScalarType type, int64_t stride,
               int32_t count, float* floats) {
  if (stride == 1) return table.to_floats(from, type, count, floats);
  alignas(64) std::byte line[kMaxGroup * 4];
  const int64_t bytes = scalar_bytes(type);
  for (int32_t i = 0; i < count; ++i) {
    std::memcpy(line + i * bytes, from + i * stride * bytes, static_cast<size_t>(bytes));
  }
  table.to_floats(line, type, count, floats);
}

}  // namespace

void load_row(const KernelTable& table, const MatrixView& view, int32_t row, int32_t column,
              int32_t count, float* floats) {
  load_line(table, element(view, row, column), view.type, view.column_stride, count, floats);
}

void load_column(const KernelTable& table, const MatrixView& view, int32_t row, int32_t column,
                 int32_t count, float* floats) {
  load_line(table, element(view, row, column), view.type, view.row_stride, count, floats);
}

void load_panel(const KernelTable& table, const MatrixView& view, int32_t row, int32_t rows,
                int32_t column, int32_t columns, int32_t depth, float* panel) {
  const bool whole = rows == kBlockColumns && columns == depth;
  const size_t bytes = sizeof(float) * static_cast<size_t>(depth) * kBlockColumns;
  // Loads lines along the contiguous direction.
  if (view.row_stride == 1) {
    if (!whole) std::memset(panel, 0, bytes);
    for (int32_t c = 0; c < columns; ++c) {
      load_column(table, view, row, column + c, rows, panel + c * kBlockColumns);
    }
    return;
  }
  alignas(64) float lines[kBlockColumns * kMaxGroup];
  if (!whole) std::memset(lines, 0, bytes);
  for (int32_t r = 0; r < rows; ++r) {
    load_row(table, view, row + r, column, columns, lines + r * depth);
  }
  table.transpose(lines, depth, depth, panel);
}

bool has_pairs(const MatrixView& view, int32_t row) {
  const auto address = reinterpret_cast<uintptr_t>(element(view, row, 0));
  return view.type == ScalarType::kBf16 && view.column_stride == 1 && view.row_stride % 2 == 0 &&
         address % sizeof(float) == 0;
}

void load_pairs(const KernelTable& table, const MatrixView& view, int32_t row, int32_t column,
                int32_t depth, std::byte* words) {
  const std::byte* lines = element(view, row, column);
  const int64_t stride = view.row_stride * scalar_bytes(view.type);
  const int32_t bytes = depth * 2;
  for (int32_t r = 0; r < kBlockColumns; ++r) {
    for (int32_t i = bytes; i < 2 * bytes; i += 64) __builtin_prefetch(lines + r * stride + i);
  }
  table.transpose(reinterpret_cast<const float*>(lines), stride / 4, depth / 2,
                  reinterpret_cast<float*>(words));
}

}  // namespace torch_mesh
