// Dots that need nothing but the simd header. See products-inl.h for what a Dot is.
#pragma once

#include "kernels/kernel_table.h"

namespace torch_mesh {
namespace {

inline uint32_t word_at(const std::byte* from) {
  uint32_t word;
  __builtin_memcpy(&word, from, sizeof(word));
  return word;
}

// Integer activations are stored as u8, value + 128; as s8 they are the value itself.
inline uint32_t signed_bytes(uint32_t word) { return word ^ 0x80808080u; }

inline Words low_nibbles(Words words) { return words & broadcast_word(0x0f0f0f0f); }

// bf16 is the upper half of fp32: two values unfold by a shift and a mask.
struct ExpandedBf16Dot {
  using Sum = Floats;
  struct Weights {
    Floats low, high;
  };
  using Row = Weights;
  static constexpr int kRowWords = 1;
  static constexpr int kPanelRows = torch_mesh::kPanelRows;

  static Weights unfold(Words words) {
    return {as_floats(shift_left<16>(words)), as_floats(words & broadcast_word(0xffff0000))};
  }
  static Weights weights(const std::byte* words) { return unfold(load_words(words)); }
  static Row row(const std::byte* word) { return unfold(broadcast_word(word_at(word))); }
  static Sum add(Sum sum, const Row& row, const Weights& weights) {
    return multiply_add(row.high, weights.high, multiply_add(row.low, weights.low, sum));
  }
};

}  // namespace
}  // namespace torch_mesh
