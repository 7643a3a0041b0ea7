// Integer Dots without VNNI: 16-bit products of pairs. Both are exact.
#pragma once

#include "kernels/dots-inl.h"

namespace torch_mesh {
namespace {

// s8 x s8. vpmaddubsw would saturate at two products of 127 * 255, so both sides are widened to 16
// bits first.
struct PairInt8Dot {
  using Sum = Words;
  struct Weights {
    Words even, odd;
  };
  using Row = Weights;
  static constexpr int kRowWords = 1;

  static Weights unfold(Words words) { return {even_bytes(words), odd_bytes(words)}; }
  static Weights weights(const std::byte* words) { return unfold(load_words(words)); }
  static Row row(const std::byte* word) {
    return unfold(broadcast_word(signed_bytes(word_at(word))));
  }
  static Words add(Words sum, const Row& row, const Weights& weights) {
    sum = add_words(sum, multiply_int16_pairs(row.even, weights.even));
    return add_words(sum, multiply_int16_pairs(row.odd, weights.odd));
  }
  static Words correct(Words sum, Words, int32_t) { return sum; }
};

// Nibbles x s8: two words give at most 2 * 2 * 15 * 127 = 7620 per 16-bit lane.
struct PairInt4Dot {
  using Sum = Words;
  struct Weights {
    Words low, high;
  };
  using Row = Weights;
  static constexpr int kRowWords = 2;

  static Weights weights(const std::byte* words) {
    const Words word = load_words(words);
    return {low_nibbles(word), low_nibbles(shift_right<4>(word))};
  }
  static Row row(const std::byte* words) {
    return {broadcast_word(signed_bytes(word_at(words))),
            broadcast_word(signed_bytes(word_at(words + 4)))};
  }
  static Words add(Words sum, const Row& row, const Weights& weights) {
    const Words pairs = add_int16(multiply_byte_pairs(weights.low, row.low),
                                  multiply_byte_pairs(weights.high, row.high));
    return add_words(sum, multiply_int16_pairs(pairs, broadcast_word(0x00010001)));
  }
  static Words correct(Words sum, Words, int32_t row_sum) {
    return subtract_words(sum, broadcast_word(8u * static_cast<uint32_t>(row_sum)));
  }
};

}  // namespace
}  // namespace torch_mesh
