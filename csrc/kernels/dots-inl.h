// Dots that need nothing but the simd header. See products-inl.h for what a Dot is.
#pragma once

#include "kernels/kernel_table.h"
#include "kernels/rounding-inl.h"
#include "store/trellis.h"

namespace torch_mesh {
namespace {

// Dots that prefetch weights. A core's own prefetchers stop at the end of a 4 KiB page, and one
// row's products are too short to hide the reads that follow. Distances have been measured
// (docs/decisions/0012-kernels-without-vnni.md).
constexpr int32_t kPrefetchBytes = 2048;

// For Intel's cores; these read two blocks at once.
template <typename Dot>
struct Prefetching : Dot {
  static constexpr int32_t kPrefetchBytes = torch_mesh::kPrefetchBytes;
  static constexpr bool kReadsPairs = true;
};

// For AMD's cores with AVX512, which read one block at full speed. Tiles of many rows of bf16, of
// int8 in large groups and of expanded nibbles prefetch the next weights while they go over some in
// the cache (LinesAhead).
template <typename Dot>
struct PrefetchingFar : Dot {
  static constexpr int32_t kPrefetchBytes = 8192;
  static constexpr bool kPrefetchesLines = true;
};

// For Zen 4, whose own prefetchers keep up with few rows. Many rows of bf16, int8 and nibbles
// prefetch by LinesAhead.
template <typename Dot>
struct PrefetchingLines : Dot {
  static constexpr bool kPrefetchesLines = true;
};

// For AMD's cores with AVX2. One row's products also prefetch by StreamsAhead, which leaves out the
// beginning of the first block that a thread reads. Tiles of several rows of expanded nibbles
// prefetch by LinesAhead; many rows of bf16 go through panels.
template <typename Dot>
struct PrefetchingStreams : Dot {
  static constexpr int32_t kPrefetchBytes = torch_mesh::kPrefetchBytes;
  static constexpr bool kPrefetchesStreams = true;
  static constexpr bool kPrefetchesLines = true;
};

// For two blocks at once: prefetches as much ahead in all as for one.
template <typename Dot>
struct HalfAsFar : Dot {
  static constexpr int32_t kPrefetchBytes = Dot::kPrefetchBytes / 2;
};

// For weights that are in the first-level cache.
template <typename Dot>
struct WithoutPrefetching {
  using Type = Dot;
};
template <typename Dot>
struct WithoutPrefetching<Prefetching<Dot>> {
  using Type = Dot;
};
template <typename Dot>
struct WithoutPrefetching<PrefetchingFar<Dot>> {
  using Type = Dot;
};
template <typename Dot>
struct WithoutPrefetching<PrefetchingStreams<Dot>> {
  using Type = Dot;
};

// A Dot of nibbles that takes them already expanded to two words of bytes.
template <typename Dot>
struct OfBytes : Dot {
  static constexpr int32_t kWordsAtOnce = 2;
  static typename Dot::Weights weights(const std::byte* words) {
    return {load_words(words), load_words(words + kBlockColumns * 4)};
  }
  static typename Dot::Weights of(Words low, Words high) { return {low, high}; }
};

// The same for signed bytes, by a Dot of int8's words.
template <typename Int8>
struct OfSignedBytes {
  using Sum = Sums;
  struct Weights {
    typename Int8::Weights low, high;
  };
  struct Row {
    typename Int8::Row low, high;
  };
  static constexpr int kRowWords = 2;
  static constexpr int32_t kWordsAtOnce = 2;
  static constexpr int kChains = 2;

  static Weights of(Words low, Words high) { return {Int8::expand(low), Int8::expand(high)}; }
  static Weights weights(const std::byte* words) {
    return of(load_words(words), load_words(words + kBlockColumns * 4));
  }
  static Row row(const std::byte* words) { return {Int8::row(words), Int8::row(words + 4)}; }
  static Sum add(Sum sum, const Row& row, const Weights& weights) {
    return Int8::add(Int8::add(sum, row.low, weights.low), row.high, weights.high);
  }
  static Words zeros(const std::byte* scales) { return Int8::zeros(scales); }
  static Sum start(Words zeros, int32_t row_sum) { return Int8::start(zeros, row_sum); }
};

// How many times four products of an unsigned byte up to `max_byte` and a signed one fit into 16
// bits.
constexpr int fours_in_int16(int max_byte) { return INT16_MAX / (4 * max_byte * INT8_MAX); }

inline uint32_t word_at(const std::byte* from) {
  uint32_t word;
  __builtin_memcpy(&word, from, sizeof(word));
  return word;
}

inline Words low_nibbles(Words words) { return words & broadcast_word(0x0f0f0f0f); }

// The values of nibbles: operands() as unsigned bytes up to kMaxByte, and zeros(), the byte of a
// weight of zero.
struct EvenNibbles {
  static constexpr int kMaxByte = 15;
  static Words operands(Words nibbles) { return nibbles; }
  static Words zeros(const std::byte*) { return broadcast_word(8); }
};

struct Lut4Nibbles {
  static constexpr int kMaxByte = kLut4Levels[15];
  static Words operands(Words nibbles) { return look_up_bytes(kLut4Levels, nibbles); }
  static Words zeros(const std::byte* scales) {
    const Words chosen = load_uint16(scales) & broadcast_word(kLut4Zeros - 1);
    return subtract_words(broadcast_word(lut4_zero(0)), shift_left<1>(chosen));
  }
};

struct Fp4Nibbles {
  static constexpr int kMaxByte = kFp4Levels[7];
  static Words operands(Words nibbles) { return look_up_bytes(kFp4Levels, nibbles); }
  static Words zeros(const std::byte*) { return broadcast_word(kFp4Zero); }
};

// The levels of a trellis, which trellis-inl.h has expanded.
struct TrellisLevels {
  static constexpr int kMaxByte = 63;
  static Words zeros(const std::byte*) { return broadcast_word(kTrellisZero); }
};

// Operands of eight k-values: of the low nibbles of bytes, and of the high ones.
struct NibbleOperands {
  Words low, high;
};

// What the Dots of nibbles have in common, which is all but add().
template <typename Nibbles>
struct NibbleDot {
  using Sum = Sums;
  using Weights = NibbleOperands;
  using Row = NibbleOperands;
  static constexpr int kRowWords = 2;

  static Weights weights(const std::byte* words) {
    const Words word = load_once(words);
    return {Nibbles::operands(low_nibbles(word)),
            Nibbles::operands(low_nibbles(shift_right<4>(word)))};
  }
  static Row row(const std::byte* words) {
    return {broadcast_word(word_at(words)), broadcast_word(word_at(words + 4))};
  }
  static Words zeros(const std::byte* scales) { return Nibbles::zeros(scales); }
  static Sum start(Words zeros, int32_t row_sum) { return as_sums(times_row_sum(zeros, -row_sum)); }
};

// A group's scales, one after the other: kBytes each, loaded as floats in units of kUnit.
struct Bf16Scales {
  static constexpr int32_t kBytes = 2;
  static constexpr float kUnit = 1;
  static Floats load(const std::byte* from) { return load_bf16(from); }
};

struct HalfScales {
  static constexpr int32_t kBytes = 2;
  static constexpr float kUnit = 1;
  static Floats load(const std::byte* from) { return load_half(from); }
};

// Scales of E2M1, whose levels are twice its numbers.
struct E8m0Scales {
  static constexpr int32_t kBytes = 1;
  static constexpr float kUnit = 0.5f;
  static Floats load(const std::byte* from) { return as_floats(shift_left<23>(load_bytes(from))); }
};

// After its sign E4M3 has the bits of a half, but for the bias: the half is 1 / kE4m3HalfUnit of
// the number.
constexpr float kE4m3HalfUnit = 256;

// Scales of E2M1 too; the block's header has a factor for all of them.
struct E4m3Scales {
  static constexpr int32_t kBytes = 1;
  static constexpr float kUnit = 0.5f * kE4m3HalfUnit;
  static constexpr int32_t kHeaderBytes = block_header_bytes(Format::kNvfp4, 16, kBlockColumns);
  static Floats load(const std::byte* from) { return load_half_of_e4m3(from); }
};

// bf16 is the upper half of fp32: two values expand by a shift and a mask.
struct ExpandedBf16Dot {
  using Sum = Floats;
  struct Weights {
    Floats low, high;
  };
  using Row = Weights;
  static constexpr int kRowWords = 1;

  static Weights expand(Words words) {
    return {as_floats(shift_left<16>(words)), as_floats(words & broadcast_word(0xffff0000))};
  }
  static Weights weights(const std::byte* words) { return expand(load_words(words)); }
  static Row row(const std::byte* word) { return expand(broadcast_word(word_at(word))); }
  static Sum add(Sum sum, const Row& row, const Weights& weights) {
    return multiply_add(row.high, weights.high, multiply_add(row.low, weights.low, sum));
  }
};

// Weights are in units of E4m3::kUnit, sums in units of kUnit. E4m3 is one of the simd header's
// ways of expanding weights.
template <typename E4m3>
struct Fp8Dot : ExpandedBf16Dot {
  using Expanding = E4m3;
  static constexpr float kUnit = E4m3::kUnit / E4m3::kLift;
  static constexpr int32_t kColumnBytes = 2;
  static constexpr int kVectorsAtOnce = 2;

  static void weights(const std::byte* pairs, Weights (&both)[2]) {
    Floats low[2], high[2];
    E4m3::load_pairs(pairs, low, high);
    for (int i = 0; i < 2; ++i) both[i] = {low[i], high[i]};
  }
  static Row row(const std::byte* word) {
    const Row values = ExpandedBf16Dot::row(word);
    const Floats lift = broadcast(E4m3::kLift);
    return {values.low * lift, values.high * lift};
  }
};

using ExpandedFp8Dot = Fp8Dot<E4m3>;

}  // namespace
}  // namespace torch_mesh
