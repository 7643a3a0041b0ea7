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

// What nibbles stand for: unsigned bytes, and which of their values is a weight of zero.
struct EvenNibbles {
  static Words operands(Words nibbles) { return nibbles; }
  static Words zeros(const std::byte*) { return broadcast_word(8); }
};

struct Lut4Nibbles {
  static Words operands(Words nibbles) { return look_up_bytes(kLut4Levels, nibbles); }
  static Words zeros(const std::byte* scales) {
    const Words chosen = load_uint16(scales) & broadcast_word(kLut4Zeros - 1);
    return subtract_words(broadcast_word(lut4_zero(0)), shift_left<1>(chosen));
  }
};

// bf16 is the upper half of fp32: two values unfold by a shift and a mask.
struct ExpandedBf16Dot {
  using Sum = Floats;
  struct Weights {
    Floats low, high;
  };
  using Row = Weights;
  static constexpr int kRowWords = 1;

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
