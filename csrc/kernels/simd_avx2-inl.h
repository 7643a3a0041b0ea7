// Vectors of eight lanes: AVX2, FMA and F16C.
#pragma once

#include <immintrin.h>

#include <cstdint>

#include "kernels/tile_shape.h"

namespace torch_mesh {
namespace {

using Floats = __m256;
using Words = __m256i;
using Sums = __v8si;  // see simd_avx512-inl.h
using Shorts = __v16hi;
using Mask = __m256;

constexpr int32_t kLanes = 8;
constexpr bool kLooksUp32 = false;

// Of 16 registers, two rows by four vectors of sums leave eight for expanded weights and
// activations; four rows do not fit. One row needs few operands, so all eight vectors of a block's
// 64 columns are summed at once.
constexpr TileShape kTile = {
    .rows = 2, .vectors = 4, .single_row_vectors = 8, .single_row_blocks = 1};
// From this many rows on expanding nibbles once for all of them is faster than for each tile.
constexpr int32_t kExpandedRows = 4;
// For panels: 12 sums, 2 vectors of weights, one activation.
constexpr TileShape kPanelTile = {
    .rows = 6, .vectors = 2, .single_row_vectors = 4, .single_row_blocks = 1};

inline Floats load(const float* from) { return _mm256_loadu_ps(from); }
inline void store(float* to, Floats value) { _mm256_storeu_ps(to, value); }
inline Floats broadcast(float value) { return _mm256_set1_ps(value); }
inline Floats multiply_add(Floats a, Floats b, Floats c) { return _mm256_fmadd_ps(a, b, c); }
inline Floats minimum(Floats a, Floats b) { return _mm256_min_ps(a, b); }
inline Floats maximum(Floats a, Floats b) { return _mm256_max_ps(a, b); }
inline Mask is_number(Floats a) { return _mm256_cmp_ps(a, a, _CMP_ORD_Q); }
inline Mask less(Floats a, Floats b) { return _mm256_cmp_ps(a, b, _CMP_LT_OQ); }
inline Floats select(Mask mask, Floats yes, Floats no) { return _mm256_blendv_ps(no, yes, mask); }

inline Words load_words(const void* from) {
  return _mm256_loadu_si256(static_cast<const __m256i*>(from));
}
// See simd_avx512-inl.h.
inline Words load_once(const void* from) {
  Words words = load_words(from);
  asm("" : "+x"(words));
  return words;
}
inline void store_words(void* to, Words words) {
  _mm256_storeu_si256(static_cast<__m256i*>(to), words);
}
inline Words broadcast_word(uint32_t word) { return _mm256_set1_epi32(static_cast<int>(word)); }
inline Words add_words(Words a, Words b) { return _mm256_add_epi32(a, b); }
inline Words subtract_words(Words a, Words b) { return _mm256_sub_epi32(a, b); }
inline Words maximum_words(Words a, Words b) { return _mm256_max_epi32(a, b); }
template <int kBits>
inline Words shift_left(Words a) {
  return _mm256_slli_epi32(a, kBits);
}
template <int kBits>
inline Words shift_right(Words a) {
  return _mm256_srli_epi32(a, kBits);
}
inline Sums as_sums(Words a) { return reinterpret_cast<Sums>(a); }
inline Shorts as_shorts(Words a) { return reinterpret_cast<Shorts>(a); }
inline Words words_of(Shorts a) { return reinterpret_cast<Words>(a); }
inline Words words_of(Sums a) { return reinterpret_cast<Words>(a); }
inline Sums add_sums(Sums a, Sums b) { return as_sums(add_words(words_of(a), words_of(b))); }
inline Words as_words(Floats a) { return _mm256_castps_si256(a); }
inline Floats as_floats(Words a) { return _mm256_castsi256_ps(a); }
inline Floats words_to_floats(Words a) { return _mm256_cvtepi32_ps(a); }

inline uint32_t largest_lane(Words a) {
  __m128i max = _mm_max_epi32(_mm256_castsi256_si128(a), _mm256_extracti128_si256(a, 1));
  max = _mm_max_epi32(max, _mm_shuffle_epi32(max, 0x4e));
  max = _mm_max_epi32(max, _mm_shuffle_epi32(max, 0xb1));
  return static_cast<uint32_t>(_mm_cvtsi128_si32(max));
}
inline int32_t sum_of_lanes(Words a) {
  __m128i sum = _mm_add_epi32(_mm256_castsi256_si128(a), _mm256_extracti128_si256(a, 1));
  sum = _mm_add_epi32(sum, _mm_shuffle_epi32(sum, 0x4e));
  sum = _mm_add_epi32(sum, _mm_shuffle_epi32(sum, 0xb1));
  return _mm_cvtsi128_si32(sum);
}

inline __m128i load_eight_halves(const void* from) {
  return _mm_loadu_si128(static_cast<const __m128i*>(from));
}
inline Words load_uint16(const void* from) {
  return _mm256_cvtepu16_epi32(load_eight_halves(from));
}
inline Floats load_half(const void* from) { return _mm256_cvtph_ps(load_eight_halves(from)); }

inline Words load_bytes(const void* from) {
  return _mm256_cvtepu8_epi32(_mm_loadl_epi64(static_cast<const __m128i*>(from)));
}
inline Words load_signed_bytes(const void* from) {
  return _mm256_cvtepi8_epi32(_mm_loadl_epi64(static_cast<const __m128i*>(from)));
}
// For bytes without a sign; see kE4m3HalfUnit.
inline Floats load_half_of_e4m3(const void* from) {
  const __m128i bytes = _mm_loadl_epi64(static_cast<const __m128i*>(from));
  return _mm256_cvtph_ps(_mm_slli_epi16(_mm_cvtepu8_epi16(bytes), 7));
}

// Shifts each 16 bits by themselves, with copies of their sign.
template <int kBits>
inline Words shift_right_signed_halves(Words a) {
  return _mm256_srai_epi16(a, kBits);
}
// Interleaves lanes: lane j of both becomes lanes 2j and 2j + 1 of first and second, taken as one.
inline void alternate_lanes(Floats& first, Floats& second) {
  const Floats low = _mm256_unpacklo_ps(first, second);
  const Floats high = _mm256_unpackhi_ps(first, second);
  first = _mm256_permute2f128_ps(low, high, 0x20);
  second = _mm256_permute2f128_ps(low, high, 0x31);
}

// Swaps lane j of vector i with lane i of vector j.
inline void transpose_lanes(Floats (&vectors)[8]) {
  Floats two[8], four[8];  // vectors' values beside each other, in both halves
  for (int i = 0; i < 8; i += 2) {
    two[i] = _mm256_unpacklo_ps(vectors[i], vectors[i + 1]);
    two[i + 1] = _mm256_unpackhi_ps(vectors[i], vectors[i + 1]);
  }
  for (int i = 0; i < 8; i += 4) {
    for (int j = 0; j < 2; ++j) {
      const __m256d first = _mm256_castps_pd(two[i + j]);
      const __m256d second = _mm256_castps_pd(two[i + 2 + j]);
      four[i + 2 * j] = _mm256_castpd_ps(_mm256_unpacklo_pd(first, second));
      four[i + 2 * j + 1] = _mm256_castpd_ps(_mm256_unpackhi_pd(first, second));
    }
  }
  for (int i = 0; i < 4; ++i) {
    vectors[i] = _mm256_permute2f128_ps(four[i], four[4 + i], 0x20);
    vectors[4 + i] = _mm256_permute2f128_ps(four[i], four[4 + i], 0x31);
  }
}

// Words in [0, 65535].
inline __m128i narrow_to_uint16(Words words) {
  return _mm_packus_epi32(_mm256_castsi256_si128(words), _mm256_extracti128_si256(words, 1));
}
inline void store_uint16(void* to, Words words) {
  _mm_storeu_si128(static_cast<__m128i*>(to), narrow_to_uint16(words));
}
// Words in [0, 255].
inline void store_bytes(void* to, Words words) {
  const __m128i halves = narrow_to_uint16(words);
  _mm_storel_epi64(static_cast<__m128i*>(to), _mm_packus_epi16(halves, halves));
}

inline Words increment(Words a, Mask mask) {
  return _mm256_sub_epi32(a, _mm256_castps_si256(mask));
}
inline Floats look_up(const float (&table)[8], Words index) {
  return _mm256_permutevar8x32_ps(load(table), index);
}
inline Floats look_up(const float (&table)[16], Words index) {
  const Floats low = _mm256_permutevar8x32_ps(load(table), index);
  const Floats high = _mm256_permutevar8x32_ps(load(table + 8), index);
  return _mm256_blendv_ps(low, high, as_floats(shift_left<28>(index)));  // by the index's bit 3
}
// Looks up bytes below 128 by their lowest four bits.
inline Words look_up_bytes(const uint8_t (&table)[16], Words bytes) {
  const auto* from = reinterpret_cast<const __m128i*>(table);
  return _mm256_shuffle_epi8(_mm256_broadcastsi128_si256(_mm_load_si128(from)), bytes);
}
// Loads a table of 16 bytes that is known only at run time.
inline Words load_table(const void* from) {
  return _mm256_broadcastsi128_si256(_mm_loadu_si128(static_cast<const __m128i*>(from)));
}
inline Words look_up_bytes(Words table, Words bytes) { return _mm256_shuffle_epi8(table, bytes); }
// Interleaves bytes of both: `first` gets the lower eight of each 16, `second` the upper ones.
inline void interleave_bytes(Words& first, Words& second) {
  const Words lower = _mm256_unpacklo_epi8(first, second);
  second = _mm256_unpackhi_epi8(first, second);
  first = lower;
}
// Multiplies words below 2^15 with the sum of a row's group, which fits 16 bits.
inline Words times_row_sum(Words words, int32_t row_sum) {
  return _mm256_madd_epi16(words, _mm256_set1_epi32(row_sum));
}

// Bytes and 16-bit lanes, for pair_dots-inl.h and pack_trellis-inl.h.
using Signs = __m256i;
inline Signs signs_of_bytes(Words bytes) { return bytes; }
inline Words magnitudes_of_bytes(Words bytes) { return _mm256_abs_epi8(bytes); }
// Where the sign's byte is zero, so is the result.
inline Words negate_bytes(Words bytes, Signs where) { return _mm256_sign_epi8(bytes, where); }
inline Words add_int16(Words a, Words b) { return _mm256_add_epi16(a, b); }
inline Shorts add_int16(Shorts a, Words b) { return as_shorts(add_int16(words_of(a), b)); }
inline Words minimum_uint16(Words a, Words b) { return _mm256_min_epu16(a, b); }
inline Words multiply_int16_pairs(Words a, Words b) { return _mm256_madd_epi16(a, b); }
inline Words multiply_byte_pairs(Words unsigned_bytes, Words signed_bytes) {
  return _mm256_maddubs_epi16(unsigned_bytes, signed_bytes);
}

}  // namespace
}  // namespace torch_mesh

#include "kernels/bf12_words-inl.h"
#include "kernels/e4m3_as_floats-inl.h"

namespace torch_mesh {
namespace {
using E4m3 = E4m3AsFloats;
}  // namespace
}  // namespace torch_mesh
