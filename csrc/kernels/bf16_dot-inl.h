// The Dot of AVX512-BF16.
#pragma once

#include "kernels/dots-inl.h"

namespace torch_mesh {
namespace {

// vdpbf16ps adds both products of a word, rounded on its own terms (subnormals count as zero).
struct NativeBf16Dot {
  using Sum = Floats;
  struct Weights {
    Words pairs;
  };
  using Row = Weights;
  static constexpr int kRowWords = 1;

  static Weights expand(Words words) { return {words}; }
  static Weights weights(const std::byte* words) { return expand(load_words(words)); }
  static Row row(const std::byte* word) { return {broadcast_word(word_at(word))}; }
  static Sum add(Sum sum, const Row& row, const Weights& weights) {
    return _mm512_dpbf16_ps(sum, (__m512bh)row.pairs, (__m512bh)weights.pairs);
  }
};

}  // namespace
}  // namespace torch_mesh
