// Vectors of sixteen lanes: AVX512 F, BW, DQ, VL.
#pragma once

// GCC 12's own headers leave operands undefined on purpose, and it warns about them (GCC bug
// 105593).
#if defined(__GNUC__) && !defined(__clang__)
#pragma GCC diagnostic push
#pragma GCC diagnostic ignored "-Wmaybe-uninitialized"
#pragma GCC diagnostic ignored "-Wuninitialized"
#endif
#include <immintrin.h>
#if defined(__GNUC__) && !defined(__clang__)
#pragma GCC diagnostic pop
#endif

#include <cstdint>

#include "kernels/tile_shape.h"

namespace torch_mesh {
namespace {

using Floats = __m512;
using Words = __m512i;
// Sums of products, with the type of their lanes: GCC 12 copies and spills a __m512i that an
// instruction adds to.
using Sums = __v16si;
using Shorts = __v32hi;
using Mask = __mmask16;

constexpr int32_t kLanes = 16;
constexpr bool kLooksUp32 = true;  // looks up 32 floats in one operation

// Four vectors are a block's 64 columns. Of 32 registers four rows take 16 for sums and up to eight
// for their expanded activations; the rest holds weights. Eight rows would not fit.
constexpr TileShape kTile = {
    .rows = 4, .vectors = 4, .single_row_vectors = 4, .single_row_blocks = 2};
// From this many rows on expanding nibbles once for all of them is faster than for each tile.
constexpr int32_t kExpandedRows = 24;
// For panels: 24 sums, 4 vectors of weights, one activation.
constexpr TileShape kPanelTile = {
    .rows = 6, .vectors = 4, .single_row_vectors = 4, .single_row_blocks = 1};

inline Floats load(const float* from) { return _mm512_loadu_ps(from); }
inline void store(float* to, Floats value) { _mm512_storeu_ps(to, value); }
inline Floats broadcast(float value) { return _mm512_set1_ps(value); }
inline Floats multiply_add(Floats a, Floats b, Floats c) { return _mm512_fmadd_ps(a, b, c); }
inline Floats minimum(Floats a, Floats b) { return _mm512_min_ps(a, b); }
inline Floats maximum(Floats a, Floats b) { return _mm512_max_ps(a, b); }
inline Mask is_number(Floats a) { return _mm512_cmp_ps_mask(a, a, _CMP_ORD_Q); }
inline Mask less(Floats a, Floats b) { return _mm512_cmp_ps_mask(a, b, _CMP_LT_OQ); }
inline Floats select(Mask mask, Floats yes, Floats no) {
  return _mm512_mask_blend_ps(mask, no, yes);
}

inline Words load_words(const void* from) { return _mm512_loadu_si512(from); }
// Loads words that are used several times. After load_words the compiler may load them again for
// each use, and repeated loads keep the prefetchers of AMD's cores from following.
inline Words load_once(const void* from) {
  Words words = load_words(from);
  asm("" : "+v"(words));
  return words;
}
inline void store_words(void* to, Words words) { _mm512_storeu_si512(to, words); }
inline Words broadcast_word(uint32_t word) { return _mm512_set1_epi32(static_cast<int>(word)); }
inline Words add_words(Words a, Words b) { return _mm512_add_epi32(a, b); }
inline Words subtract_words(Words a, Words b) { return _mm512_sub_epi32(a, b); }
inline Words maximum_words(Words a, Words b) { return _mm512_max_epi32(a, b); }
template <int kBits>
inline Words shift_left(Words a) {
  return _mm512_slli_epi32(a, kBits);
}
template <int kBits>
inline Words shift_right(Words a) {
  return _mm512_srli_epi32(a, kBits);
}
inline Sums as_sums(Words a) { return reinterpret_cast<Sums>(a); }
inline Shorts as_shorts(Words a) { return reinterpret_cast<Shorts>(a); }
inline Words words_of(Shorts a) { return reinterpret_cast<Words>(a); }
inline Words words_of(Sums a) { return reinterpret_cast<Words>(a); }
inline Sums add_sums(Sums a, Sums b) { return as_sums(add_words(words_of(a), words_of(b))); }
inline Words as_words(Floats a) { return _mm512_castps_si512(a); }
inline Floats as_floats(Words a) { return _mm512_castsi512_ps(a); }
inline Floats words_to_floats(Words a) { return _mm512_cvtepi32_ps(a); }
inline uint32_t largest_lane(Words a) { return static_cast<uint32_t>(_mm512_reduce_max_epi32(a)); }
inline int32_t sum_of_lanes(Words a) { return _mm512_reduce_add_epi32(a); }

inline __m256i load_sixteen_halves(const void* from) {
  return _mm256_loadu_si256(static_cast<const __m256i*>(from));
}
inline Words load_uint16(const void* from) {
  return _mm512_cvtepu16_epi32(load_sixteen_halves(from));
}
inline Floats load_half(const void* from) { return _mm512_cvtph_ps(load_sixteen_halves(from)); }
inline Words load_bytes(const void* from) {
  return _mm512_cvtepu8_epi32(_mm_loadu_si128(static_cast<const __m128i*>(from)));
}
inline Words load_signed_bytes(const void* from) {
  return _mm512_cvtepi8_epi32(_mm_loadu_si128(static_cast<const __m128i*>(from)));
}
inline Floats load_half_of_e4m3(const void* from) {
  const __m128i bytes = _mm_loadu_si128(static_cast<const __m128i*>(from));
  return _mm512_cvtph_ps(_mm256_slli_epi16(_mm256_cvtepu8_epi16(bytes), 7));
}

// E4M3 as halves; see kE4m3HalfUnit.
struct E4m3 {
  static constexpr float kUnit = 256;
  static constexpr float kLift = 1;

  // Subnormal halves are normal floats.
  static uint32_t count_subnormals() { return 0; }
  static void restore_subnormals(uint32_t) {}

  static void upper(__m512i pairs, Floats (&floats)[2]) {
    const __m512i halves =
        _mm512_and_si512(_mm512_srai_epi16(pairs, 1), _mm512_set1_epi16(-0x4080));
    floats[0] = _mm512_cvtph_ps(_mm512_castsi512_si256(halves));
    floats[1] = _mm512_cvtph_ps(_mm512_extracti64x4_epi64(halves, 1));
  }
  // Loads two vectors of columns, so that only the conversion works on half registers.
  static void load_pairs(const void* from, Floats (&low)[2], Floats (&high)[2]) {
    const __m512i pairs = load_words(from);
    upper(_mm512_slli_epi16(pairs, 8), low);
    upper(pairs, high);
  }
  static void put_in_order(Floats&, Floats&) {}

  // Returns a vector of words of bf16. Below the sign the bits are those of a bf16, but for the
  // bias. Zero and subnormal numbers are looked up.
  static Words to_bf16(const void* pairs) {
    alignas(64) static constexpr uint16_t kWithoutExponent[32] = {0,      0x3b00, 0x3b80, 0x3bc0,
                                                                  0x3c00, 0x3c20, 0x3c40, 0x3c60};
    const Words bytes = _mm512_cvtepu8_epi16(load_sixteen_halves(pairs));
    const Words moved = _mm512_srai_epi16(_mm512_slli_epi16(bytes, 8), 4);
    const Words sign = _mm512_and_si512(moved, _mm512_set1_epi16(-0x8000));
    const Words number = _mm512_add_epi16(_mm512_and_si512(moved, _mm512_set1_epi16(0x7f0)),
                                          _mm512_set1_epi16(0x3c00));
    const __mmask32 without = _mm512_testn_epi16_mask(bytes, _mm512_set1_epi16(0x78));
    return _mm512_or_si512(
        sign, _mm512_mask_permutexvar_epi16(number, without, bytes, load_words(kWithoutExponent)));
  }
};

// Shifts each 16 bits by themselves, with copies of their sign.
template <int kBits>
inline Words shift_right_signed_halves(Words a) {
  return _mm512_srai_epi16(a, kBits);
}
// Interleaves lanes: lane j of both becomes lanes 2j and 2j + 1 of first and second, taken as one.
inline void alternate_lanes(Floats& first, Floats& second) {
  const Words low = _mm512_set_epi32(23, 7, 22, 6, 21, 5, 20, 4, 19, 3, 18, 2, 17, 1, 16, 0);
  const Words high = add_words(low, broadcast_word(8));
  const Floats in_order = _mm512_permutex2var_ps(first, low, second);
  second = _mm512_permutex2var_ps(first, high, second);
  first = in_order;
}

// Swaps lane j of vector i with lane i of vector j.
inline void transpose_lanes(Floats (&vectors)[16]) {
  Floats two[16], four[16];  // vectors' values beside each other, in all four quarters
  for (int i = 0; i < 16; i += 2) {
    two[i] = _mm512_unpacklo_ps(vectors[i], vectors[i + 1]);
    two[i + 1] = _mm512_unpackhi_ps(vectors[i], vectors[i + 1]);
  }
  for (int i = 0; i < 16; i += 4) {
    for (int j = 0; j < 2; ++j) {
      const __m512d first = _mm512_castps_pd(two[i + j]);
      const __m512d second = _mm512_castps_pd(two[i + 2 + j]);
      four[i + 2 * j] = _mm512_castpd_ps(_mm512_unpacklo_pd(first, second));
      four[i + 2 * j + 1] = _mm512_castpd_ps(_mm512_unpackhi_pd(first, second));
    }
  }
  constexpr int kEven = 0x88, kOdd = 0xdd;  // quarters of both
  for (int i = 0; i < 4; ++i) {
    const Floats even[2] = {_mm512_shuffle_f32x4(four[i], four[4 + i], kEven),
                            _mm512_shuffle_f32x4(four[8 + i], four[12 + i], kEven)};
    const Floats odd[2] = {_mm512_shuffle_f32x4(four[i], four[4 + i], kOdd),
                           _mm512_shuffle_f32x4(four[8 + i], four[12 + i], kOdd)};
    vectors[i] = _mm512_shuffle_f32x4(even[0], even[1], kEven);
    vectors[4 + i] = _mm512_shuffle_f32x4(odd[0], odd[1], kEven);
    vectors[8 + i] = _mm512_shuffle_f32x4(even[0], even[1], kOdd);
    vectors[12 + i] = _mm512_shuffle_f32x4(odd[0], odd[1], kOdd);
  }
}

inline void store_uint16(void* to, Words words) {
  _mm256_storeu_si256(static_cast<__m256i*>(to), _mm512_cvtepi32_epi16(words));
}
inline void store_bytes(void* to, Words words) {
  _mm_storeu_si128(static_cast<__m128i*>(to), _mm512_cvtepi32_epi8(words));
}

inline Words increment(Words a, Mask mask) {
  return _mm512_mask_add_epi32(a, mask, a, _mm512_set1_epi32(1));
}
inline Floats look_up(const float (&table)[8], Words index) {
  return _mm512_permutexvar_ps(index, _mm512_castps256_ps512(_mm256_loadu_ps(table)));
}
inline Floats look_up(const float (&table)[16], Words index) {
  return _mm512_permutexvar_ps(index, load(table));
}
// Looks up by the index's lowest five bits.
inline Floats look_up(const float (&table)[32], Words index) {
  return _mm512_permutex2var_ps(load(table), index, load(table + 16));
}
// Looks up bytes below 128 by their lowest four bits.
inline Words look_up_bytes(const uint8_t (&table)[16], Words bytes) {
  const auto* from = reinterpret_cast<const __m128i*>(table);
  return _mm512_shuffle_epi8(_mm512_broadcast_i32x4(_mm_load_si128(from)), bytes);
}
// Loads a table of 16 bytes that is known only at run time.
inline Words load_table(const void* from) {
  return _mm512_broadcast_i32x4(_mm_loadu_si128(static_cast<const __m128i*>(from)));
}
inline Words look_up_bytes(Words table, Words bytes) { return _mm512_shuffle_epi8(table, bytes); }
// Interleaves bytes of both: `first` gets the lower eight of each 16, `second` the upper ones.
inline void interleave_bytes(Words& first, Words& second) {
  const Words lower = _mm512_unpacklo_epi8(first, second);
  second = _mm512_unpackhi_epi8(first, second);
  first = lower;
}
// Multiplies words below 2^15 with the sum of a row's group, which fits 16 bits.
inline Words times_row_sum(Words words, int32_t row_sum) {
  return _mm512_madd_epi16(words, _mm512_set1_epi32(row_sum));
}

// Bytes and 16-bit lanes, for pair_dots-inl.h and pack_trellis-inl.h.
using Signs = __mmask64;
inline Signs signs_of_bytes(Words bytes) { return _mm512_movepi8_mask(bytes); }
inline Words magnitudes_of_bytes(Words bytes) { return _mm512_abs_epi8(bytes); }
inline Words negate_bytes(Words bytes, Signs where) {
  return _mm512_mask_sub_epi8(bytes, where, _mm512_setzero_si512(), bytes);
}
inline Words add_int16(Words a, Words b) { return _mm512_add_epi16(a, b); }
inline Shorts add_int16(Shorts a, Words b) { return as_shorts(add_int16(words_of(a), b)); }
inline Words minimum_uint16(Words a, Words b) { return _mm512_min_epu16(a, b); }
inline Words multiply_int16_pairs(Words a, Words b) { return _mm512_madd_epi16(a, b); }
inline Words multiply_byte_pairs(Words unsigned_bytes, Words signed_bytes) {
  return _mm512_maddubs_epi16(unsigned_bytes, signed_bytes);
}

}  // namespace
}  // namespace torch_mesh

#include "kernels/bf12_words-inl.h"
#include "kernels/e4m3_as_floats-inl.h"  // used on AMD's cores
