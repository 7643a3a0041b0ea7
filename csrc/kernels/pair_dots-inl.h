// Integer Dots without VNNI: vpmaddubsw multiplies unsigned by signed bytes and adds neighbours
// into 16 bits, where it saturates. Neither Dot reaches that, so both are exact.
#pragma once

#include "kernels/dots-inl.h"

namespace torch_mesh {
namespace {

inline Words add_pairs(Words sum, Words pairs) {
  return add_words(sum, multiply_int16_pairs(pairs, broadcast_word(0x00010001)));
}

// s8 x s8 as |activation| x (weight with the activation's sign): two products of at most 127 * 127
// fit into 16 bits. Packed weights are in [-127, 127], so that they can be negated.
struct PairInt8Dot {
  using Sum = Words;
  struct Weights {
    Words bytes;
  };
  struct Row {
    Words magnitudes;
    Signs signs;
  };
  static constexpr int kRowWords = 1;

  static Weights weights(const std::byte* words) { return {load_words(words)}; }
  static Row row(const std::byte* word) {
    const Words bytes = broadcast_word(signed_bytes(word_at(word)));
    return {magnitudes_of_bytes(bytes), signs_of_bytes(bytes)};
  }
  static Words add(Words sum, const Row& row, const Weights& weights) {
    return add_pairs(sum,
                     multiply_byte_pairs(row.magnitudes, negate_bytes(weights.bytes, row.signs)));
  }
  static Words zeros(const std::byte*) { return broadcast_word(0); }
  static Words correct(Words sum, Words, int32_t) { return sum; }
};

// Nibbles x s8: two words give at most 2 * 2 * 63 * 127 = 32004 per 16-bit lane. Of int4 alone four
// could be added there before they are widened; that was no faster.
template <typename Nibbles>
struct PairNibbleDot {
  using Sum = Words;
  struct Weights {
    Words low, high;
  };
  using Row = Weights;
  static constexpr int kRowWords = 2;

  static Weights weights(const std::byte* words) {
    const Words word = load_words(words);
    return {Nibbles::operands(low_nibbles(word)),
            Nibbles::operands(low_nibbles(shift_right<4>(word)))};
  }
  static Row row(const std::byte* words) {
    return {broadcast_word(signed_bytes(word_at(words))),
            broadcast_word(signed_bytes(word_at(words + 4)))};
  }
  static Words add(Words sum, const Row& row, const Weights& weights) {
    return add_pairs(sum, add_int16(multiply_byte_pairs(weights.low, row.low),
                                    multiply_byte_pairs(weights.high, row.high)));
  }
  static Words zeros(const std::byte* scales) { return Nibbles::zeros(scales); }
  static Words correct(Words sum, Words zeros, int32_t row_sum) {
    return subtract_words(sum, times_row_sum(zeros, row_sum));
  }
};
using PairInt4Dot = PairNibbleDot<EvenNibbles>;
using PairLut4Dot = PairNibbleDot<Lut4Nibbles>;

}  // namespace
}  // namespace torch_mesh
