// Loads weights of up to 64 columns of any view in the order that packing needs.
#pragma once

#include <cstdint>

#include "kernels/kernel_table.h"
#include "kernels/matrix_view.h"

namespace torch_mesh {

// Loads `count` elements of a view's row or column, at most kMaxGroup, from (row, column) on.
void load_row(const KernelTable& table, const MatrixView& view, int32_t row, int32_t column,
              int32_t count, float* floats);
void load_column(const KernelTable& table, const MatrixView& view, int32_t row, int32_t column,
                 int32_t count, float* floats);

// Loads rows [row, row + rows) of the view, at most kBlockColumns, and its columns [column, column
// + columns), transposed to panel[depth][kBlockColumns] and zero-padded; depth at most kMaxGroup.
void load_panel(const KernelTable& table, const MatrixView& view, int32_t row, int32_t rows,
                int32_t column, int32_t columns, int32_t depth, float* panel);

// Whether load_pairs can load the view's rows from `row` on: bf16, contiguous and aligned to pairs.
bool has_pairs(const MatrixView& view, int32_t row);

// Loads columns [column, column + depth) of kBlockColumns rows from `row` on as pairs, transposed
// to words[depth / 2][kBlockColumns] of two bf16; depth is a multiple of 32. Prefetches the columns
// after those.
void load_pairs(const KernelTable& table, const MatrixView& view, int32_t row, int32_t column,
                int32_t depth, std::byte* words);

}  // namespace torch_mesh
