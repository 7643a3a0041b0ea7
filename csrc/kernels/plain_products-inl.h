// Multiplies rows with bf16 weights of a tensor, which has a row for each output: for decode steps
// of layers that are not packed. Include after the target's simd header.
#pragma once

#include "kernels/dots-inl.h"
#include "kernels/kernel_table.h"
#include "kernels/low_rank-inl.h"

namespace torch_mesh {
namespace {

constexpr int32_t kPlainStep = 2 * kLanes;  // inputs of one vector of words

inline ExpandedBf16Dot::Row plain_row(const PlainProducts& products, int32_t row, int32_t input) {
  const float* even = products.rows + int64_t{row} * 2 * products.half + input / 2;
  return {load(even), load(even + products.half)};
}

template <int kRows, int kColumns>
inline void add_plain_step(const PlainProducts& products, int32_t row, int32_t input,
                           const std::byte* const (&words)[kColumns],
                           Floats (&sums)[kRows][kColumns]) {
  ExpandedBf16Dot::Weights weights[kColumns];
  for (int v = 0; v < kColumns; ++v) weights[v] = ExpandedBf16Dot::weights(words[v]);
  for (int r = 0; r < kRows; ++r) {
    const ExpandedBf16Dot::Row values = plain_row(products, row + r, input);
    for (int v = 0; v < kColumns; ++v) {
      sums[r][v] = ExpandedBf16Dot::add(sums[r][v], values, weights[v]);
    }
  }
}

// Reads kColumns columns at once: on most processors one stream leaves bandwidth unused.
template <int kRows, int kColumns>
inline void plain_tile(const PlainProducts& products, int32_t row, int32_t column) {
  const std::byte* weights[kColumns];
  for (int v = 0; v < kColumns; ++v) {
    weights[v] = products.weights + (column + v) * products.stride_bytes;
  }
  Floats sums[kRows][kColumns];
  for (int r = 0; r < kRows; ++r) {
    for (int v = 0; v < kColumns; ++v) sums[r][v] = broadcast(0.0f);
  }
  // The processor's own prefetchers stop at the end of a page, which a row often is.
  const int64_t ahead = kColumns * products.stride_bytes;
  const std::byte* at[kColumns];
  int32_t input = 0;
  for (; input + kPlainStep <= products.depth; input += kPlainStep) {
    for (int v = 0; v < kColumns; ++v) {
      at[v] = weights[v] + input * 2;
      __builtin_prefetch(at[v] + ahead);
    }
    add_plain_step<kRows, kColumns>(products, row, input, at, sums);
  }
  if (input < products.depth) {
    alignas(64) std::byte rest[kColumns][kPlainStep * 2] = {};
    for (int v = 0; v < kColumns; ++v) {
      __builtin_memcpy(rest[v], weights[v] + input * 2,
                       static_cast<size_t>(products.depth - input) * 2);
      at[v] = rest[v];
    }
    add_plain_step<kRows, kColumns>(products, row, input, at, sums);
  }
  for (int r = 0; r < kRows; ++r) {
    for (int v = 0; v < kColumns; ++v) {
      products.sums[(row + r) * kBlockColumns + column + v] = sum_of_floats(sums[r][v]);
    }
  }
}

template <int kColumns>
inline void plain_rows(const PlainProducts& products, int32_t column) {
  int32_t row = 0;
  for (; row + 4 <= products.count; row += 4) plain_tile<4, kColumns>(products, row, column);
  switch (products.count - row) {
    case 3:
      return plain_tile<3, kColumns>(products, row, column);
    case 2:
      return plain_tile<2, kColumns>(products, row, column);
    case 1:
      return plain_tile<1, kColumns>(products, row, column);
    default:
      return;
  }
}

// Goes on from a column, kColumns at a time, and returns the next one.
template <int kColumns>
inline int32_t plain_columns(const PlainProducts& products, int32_t column) {
  for (; column + kColumns <= products.columns; column += kColumns) {
    plain_rows<kColumns>(products, column);
  }
  return column;
}

// Reads kSingleRowColumns columns at once for a single row. Of four rows, sums of two columns fill
// the registers.
template <int kSingleRowColumns>
inline void plain_products(const PlainProducts& products) {
  int32_t column = 0;
  if (products.count == 1) column = plain_columns<kSingleRowColumns>(products, column);
  if (products.count == 2) column = plain_columns<4>(products, column);
  column = plain_columns<2>(products, column);
  plain_columns<1>(products, column);
}

}  // namespace
}  // namespace torch_mesh
