// Integer Dots of AVX512-VNNI: vpdpbusd adds four products of unsigned and signed bytes to each
// lane.
#pragma once

#include "kernels/dots-inl.h"

namespace torch_mesh {
namespace {

// The activations are the unsigned side, as they are stored: value + 128.
struct VnniInt8Dot {
  using Sum = Words;
  struct Weights {
    Words bytes;
  };
  using Row = Weights;
  static constexpr int kRowWords = 1;

  static Weights weights(const std::byte* words) { return {load_words(words)}; }
  static Row row(const std::byte* word) { return {broadcast_word(word_at(word))}; }
  static Words add(Words sum, const Row& row, const Weights& weights) {
    return _mm512_dpbusd_epi32(sum, row.bytes, weights.bytes);
  }
  static Words correct(Words sum, Words weight_sum, int32_t) {
    return subtract_words(sum, shift_left<7>(weight_sum));
  }
};

// The weights are the unsigned side.
template <typename Nibbles>
struct VnniNibbleDot {
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
    sum = _mm512_dpbusd_epi32(sum, weights.low, row.low);
    return _mm512_dpbusd_epi32(sum, weights.high, row.high);
  }
  static Words zeros(const std::byte* scales) { return Nibbles::zeros(scales); }
  static Words correct(Words sum, Words zeros, int32_t row_sum) {
    return subtract_words(sum, times_row_sum(zeros, row_sum));
  }
};
using VnniInt4Dot = VnniNibbleDot<EvenNibbles>;
using VnniLut4Dot = VnniNibbleDot<Lut4Nibbles>;

}  // namespace
}  // namespace torch_mesh
