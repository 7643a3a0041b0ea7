// Integer Dots without VNNI: vpmaddubsw multiplies unsigned by signed bytes and adds neighbours
// into 16 bits, where it saturates. No Dot here reaches that, so all are exact.
#pragma once

#include "kernels/dots-inl.h"

namespace torch_mesh {
namespace {

inline Sums add_pairs(Sums sum, Words pairs) {
  return add_sums(sum, as_sums(multiply_int16_pairs(pairs, broadcast_word(0x00010001))));
}

// s8 x s8 as |weight| x (activation with the weight's sign): two products of at most 128 * 127 fit
// into 16 bits. Activations are in [-127, 127], so that they can be negated.
struct PairInt8Dot {
  using Sum = Sums;
  struct Weights {
    Words magnitudes;
    Signs signs;
  };
  struct Row {
    Words bytes;
  };
  static constexpr int kRowWords = 1;

  static Weights expand(Words bytes) { return {magnitudes_of_bytes(bytes), signs_of_bytes(bytes)}; }
  static Weights weights(const std::byte* words) { return expand(load_words(words)); }
  static Row row(const std::byte* word) { return {broadcast_word(word_at(word))}; }
  static Sum add(Sum sum, const Row& row, const Weights& weights) {
    return add_pairs(
        sum, multiply_byte_pairs(weights.magnitudes, negate_bytes(row.bytes, weights.signs)));
  }
  static Words zeros(const std::byte*) { return broadcast_word(0); }
  static Sum start(Words, int32_t) { return as_sums(broadcast_word(0)); }
};

// Nibbles x s8: two words give at most 2 * 2 * 63 * 127 = 32004 per 16-bit lane. A whole group of
// smaller bytes may fit, see NarrowSums.
template <typename Nibbles>
struct PairNibbleDot : NibbleDot<Nibbles> {
  // How many times eight k-values' products fit into 16 bits.
  static constexpr int kNarrowEights = fours_in_int16(Nibbles::kMaxByte);

  // Adds the products of eight k-values in 16 bits.
  static Words narrow(const NibbleOperands& row, const NibbleOperands& weights) {
    return add_int16(multiply_byte_pairs(weights.low, row.low),
                     multiply_byte_pairs(weights.high, row.high));
  }
  static Sums widen(Sums sum, Words narrow) { return add_pairs(sum, narrow); }
  static Sums widen(Sums sum, Shorts narrow) { return add_pairs(sum, words_of(narrow)); }
  static Sums add(Sums sum, const NibbleOperands& row, const NibbleOperands& weights) {
    return widen(sum, narrow(row, weights));
  }
};

template <typename Levels>
struct PairLevelDot : OfBytes<PairNibbleDot<Levels>> {
  static constexpr int kChains = 1;
};

// Of larger bytes, up to 128, only one word's products fit into 16 bits, so that each word is
// widened by itself.
template <typename Levels>
requires(fours_in_int16(Levels::kMaxByte) == 0) struct PairLevelDot<Levels>
    : OfBytes<NibbleDot<Levels>> {
  static_assert(2 * Levels::kMaxByte * INT8_MAX <= INT16_MAX);
  static constexpr int kChains = 2;  // since each word takes an addition of its own

  static Sums add(Sums sum, const NibbleOperands& row, const NibbleOperands& weights) {
    sum = add_pairs(sum, multiply_byte_pairs(weights.low, row.low));
    return add_pairs(sum, multiply_byte_pairs(weights.high, row.high));
  }
};

}  // namespace
}  // namespace torch_mesh
