// Integer Dots of VNNI, in terms of add_byte_products (vpdpbusd), which the target's simd header
// has.
#pragma once

#include "kernels/dots-inl.h"

namespace torch_mesh {
namespace {

// The weights are the unsigned side of all of them; int8 takes one XOR to become value + 128.
struct VnniInt8Dot {
  using Sum = Sums;
  struct Weights {
    Words bytes;
  };
  using Row = Weights;
  static constexpr int kRowWords = 1;

  static Weights expand(Words bytes) { return {bytes ^ broadcast_word(0x80808080)}; }
  static Weights weights(const std::byte* words) { return expand(load_words(words)); }
  static Row row(const std::byte* word) { return {broadcast_word(word_at(word))}; }
  static Sum add(Sum sum, const Row& row, const Weights& weights) {
    return add_byte_products(sum, weights.bytes, row.bytes);
  }
  static Words zeros(const std::byte*) { return broadcast_word(128); }
  static Sum start(Words zeros, int32_t row_sum) { return as_sums(times_row_sum(zeros, -row_sum)); }
};

template <typename Nibbles>
struct VnniNibbleDot : NibbleDot<Nibbles> {
  static Sums add(Sums sum, const NibbleOperands& row, const NibbleOperands& weights) {
    sum = add_byte_products(sum, weights.low, row.low);
    return add_byte_products(sum, weights.high, row.high);
  }
};

template <typename Levels>
struct VnniLevelDot : OfBytes<VnniNibbleDot<Levels>> {
  static constexpr int kChains = 2;  // sums of one row, so that they do not wait for each other
};

template <typename Nibbles>
using PrefetchingVnniNibbles = Prefetching<VnniNibbleDot<Nibbles>>;

}  // namespace
}  // namespace torch_mesh
