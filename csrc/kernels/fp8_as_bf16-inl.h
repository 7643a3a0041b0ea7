// Expands fp8 to bf16, which holds every number of E4M3, and multiplies many rows so. For AVX512.
#pragma once

#include "kernels/products-inl.h"

namespace torch_mesh {
namespace {

// Expands fp8 to words of bf16. kScaled: also scales by `step`'s powers of two, which is exact
// unless the result is subnormal or infinite.
template <bool kScaled>
inline void expand_fp8_to_bf16(const std::byte* pairs, int32_t words, const Fp8Step* step,
                               std::byte* to) {
  for (int32_t c = 0; c < kBlockColumns; c += 2 * kLanes) {
    Floats scales[2] = {broadcast(1), broadcast(1)};
    for (int v = 0; kScaled && v < 2; ++v) scales[v] = step->scales_of(c + v * kLanes);
    for (int32_t i = c; i < words * kBlockColumns; i += kBlockColumns) {
      if (i * 2 % kLineBytes == 0) __builtin_prefetch(pairs + i * 2 + 4096);
      for (int v = 0; v < 2; ++v) {
        Words pairs_of_bf16 = E4m3::to_bf16(pairs + (i + v * kLanes) * 2);
        if constexpr (kScaled) {
          const auto values = ExpandedBf16Dot::expand(pairs_of_bf16);
          const Words high = as_words(values.high * scales[v]);
          pairs_of_bf16 = shift_right<16>(as_words(values.low * scales[v])) |
                          (high & broadcast_word(0xffff0000));
        }
        store_words(to + (i + v * kLanes) * 4, pairs_of_bf16);
      }
    }
  }
}

// A step of a block as words of bf16, already scaled if scales are powers of two.
struct ExpandedFp8 {
  static constexpr int32_t kMaxDepth = 128;

  int32_t depth;
  bool is_scaled;
  alignas(64) std::byte words[kMaxDepth * kBlockColumns * 2];

  ExpandedFp8(const BlockProducts& products, int32_t k) {
    const OperandShape& shape = products.shape;
    const int32_t left = shape.depth_padded - k;
    depth = left < kMaxDepth ? left : kMaxDepth;
    is_scaled = shape.group_size == 32;
    const std::byte* from = fp8_pairs(products) + int64_t{k} * kBlockColumns;
    if (!is_scaled) expand_fp8_to_bf16<false>(from, depth / 2, nullptr, words);
    for (int32_t i = 0; is_scaled && i < depth; i += 32) {
      const Fp8Step own(products.block, shape.group_size, k + i, 1);
      expand_fp8_to_bf16<true>(from + i * kBlockColumns, 16, &own, words + i * kBlockColumns * 2);
    }
  }
};

// Multiplies many rows with fp8 by the Dot of bf16, where that is faster than fp8's own. Sums have
// other bits than those of fp8's own Dot.
template <typename Dot>
inline void fp8_as_bf16(const BlockProducts& products) {
  const OperandShape& shape = products.shape;
  for (int32_t k = 0; k < shape.depth_padded; k += ExpandedFp8::kMaxDepth) {
    const ExpandedFp8 expanded(products, k);
    const int32_t words = expanded.depth / 2;
    const int64_t next = int64_t{k} + expanded.depth;
    const LinesAhead ahead{fp8_pairs(products) + next * kBlockColumns,
                           int64_t{expanded.depth} * kBlockColumns};
    if (expanded.is_scaled) {
      float_step<Dot>(products, k, words, expanded.words, Unscaled{}, ahead);
    } else {
      const Fp8Step step(products.block, shape.group_size, k, 1);
      float_step<Dot>(products, k, words, expanded.words, step, ahead);
    }
  }
}

}  // namespace
}  // namespace torch_mesh
