// A vector of one lane, the oracle that the others must agree with.
#pragma once

#include <cstddef>
#include <cstdint>

#include "kernels/tile_shape.h"
#include "store/bf12.h"

namespace torch_mesh {
namespace {

using Floats = float;
using Words = uint32_t;
using Sums = uint32_t;
using Shorts = uint32_t;  // not used
using Mask = bool;

constexpr int32_t kLanes = 1;
constexpr bool kLooksUp32 = false;

constexpr TileShape kTile = {
    .rows = 1, .vectors = 8, .single_row_vectors = 8, .single_row_blocks = 1};
constexpr int32_t kExpandedRows = 4;
constexpr TileShape kPanelTile = kTile;

template <typename To, typename From>
inline To bits_as(From from) {
  To to;
  static_assert(sizeof(to) == sizeof(from));
  __builtin_memcpy(&to, &from, sizeof(to));
  return to;
}

inline float load(const float* from) { return *from; }
inline void store(float* to, float value) { *to = value; }
inline float broadcast(float value) { return value; }
inline float multiply_add(float a, float b, float c) { return __builtin_fmaf(a, b, c); }
// As minps and maxps: return the second operand if one is NaN.
inline float minimum(float a, float b) { return a < b ? a : b; }
inline float maximum(float a, float b) { return a > b ? a : b; }
inline Mask is_number(float a) { return a == a; }
inline Mask less(float a, float b) { return a < b; }
inline float select(Mask mask, float yes, float no) { return mask ? yes : no; }

inline uint32_t load_words(const void* from) {
  uint32_t word;
  __builtin_memcpy(&word, from, sizeof(word));
  return word;
}
inline uint32_t load_once(const void* from) { return load_words(from); }
inline void store_words(void* to, uint32_t words) { __builtin_memcpy(to, &words, sizeof(words)); }
inline uint32_t broadcast_word(uint32_t word) { return word; }
inline uint32_t times_row_sum(uint32_t words, int32_t row_sum) {
  return words * static_cast<uint32_t>(row_sum);
}
inline uint32_t add_words(uint32_t a, uint32_t b) { return a + b; }
inline uint32_t subtract_words(uint32_t a, uint32_t b) { return a - b; }
inline uint32_t maximum_words(uint32_t a, uint32_t b) {
  return static_cast<int32_t>(a) > static_cast<int32_t>(b) ? a : b;
}
template <int kBits>
inline uint32_t shift_left(uint32_t a) {
  return a << kBits;
}
template <int kBits>
inline uint32_t shift_right(uint32_t a) {
  return a >> kBits;
}
inline uint32_t as_sums(uint32_t a) { return a; }
inline uint32_t as_shorts(uint32_t a) { return a; }
inline uint32_t words_of(uint32_t a) { return a; }
inline uint32_t add_sums(uint32_t a, uint32_t b) { return a + b; }
inline uint32_t as_words(float a) { return bits_as<uint32_t>(a); }
inline float as_floats(uint32_t a) { return bits_as<float>(a); }
inline float words_to_floats(uint32_t a) { return static_cast<float>(static_cast<int32_t>(a)); }
inline uint32_t largest_lane(uint32_t a) { return a; }
inline int32_t sum_of_lanes(uint32_t a) { return static_cast<int32_t>(a); }

inline uint32_t load_uint16(const void* from) {
  uint16_t half;
  __builtin_memcpy(&half, from, sizeof(half));
  return half;
}
inline void store_uint16(void* to, uint32_t words) {
  const auto half = static_cast<uint16_t>(words);
  __builtin_memcpy(to, &half, sizeof(half));
}
inline void store_bytes(uint8_t* to, uint32_t words) { *to = static_cast<uint8_t>(words); }

inline uint32_t increment(uint32_t a, Mask mask) { return a + (mask ? 1 : 0); }
template <int kEntries>
inline float look_up(const float (&table)[kEntries], uint32_t index) {
  return table[index];
}
inline uint32_t look_up_bytes(const uint8_t (&table)[16], uint32_t bytes) {
  uint32_t found = 0;
  for (int shift = 0; shift < 32; shift += 8) {
    found |= uint32_t{table[bytes >> shift & 15]} << shift;
  }
  return found;
}

// These work on both halves of a word.
inline uint32_t add_int16(uint32_t a, uint32_t b) {
  return ((a & 0xffff0000) + (b & 0xffff0000)) | ((a + b) & 0xffff);
}
inline uint32_t minimum_uint16(uint32_t a, uint32_t b) {
  const uint32_t low = (a & 0xffff) < (b & 0xffff) ? a & 0xffff : b & 0xffff;
  const uint32_t high = a >> 16 < b >> 16 ? a & 0xffff0000 : b & 0xffff0000;
  return high | low;
}

// IEEE half precision. A subnormal half is its integer times 2^-24.
inline float half_value(uint32_t bits) {
  const uint32_t sign = (bits & 0x8000u) << 16;
  const uint32_t magnitude = bits & 0x7fffu;
  if (magnitude >= 0x7c00) return as_floats(sign | 0x7f800000 | (magnitude & 0x3ff) << 13);
  if (magnitude < 0x400) {
    return as_floats(sign | as_words(static_cast<float>(magnitude) * 0x1p-24f));
  }
  return as_floats(sign | ((magnitude << 13) + 0x38000000));
}
inline float load_half(const void* from) { return half_value(load_uint16(from)); }

inline uint32_t load_bytes(const void* from) { return *static_cast<const uint8_t*>(from); }
inline uint32_t load_signed_bytes(const void* from) {
  return static_cast<uint32_t>(int32_t{*static_cast<const int8_t*>(from)});
}
// E4M3 as halves; see kE4m3HalfUnit.
inline float e4m3_part(uint32_t byte) {
  return half_value((byte & 0x80) << 8 | (byte & 0x7f) << 7);
}
inline float load_half_of_e4m3(const void* from) { return e4m3_part(load_bytes(from) & 0x7f); }
struct E4m3 {
  static constexpr float kUnit = 256;
  static constexpr float kLift = 1;

  // Subnormal halves are normal floats.
  static uint32_t count_subnormals() { return 0; }
  static void restore_subnormals(uint32_t) {}

  static void load_pairs(const void* from, float (&low)[2], float (&high)[2]) {
    const uint32_t pairs = load_words(from);
    for (int i = 0; i < 2; ++i) {
      low[i] = e4m3_part(pairs >> 16 * i & 0xff);
      high[i] = e4m3_part(pairs >> (16 * i + 8) & 0xff);
    }
  }
  static void put_in_order(float&, float&) {}
};

inline void transpose_lanes(float (&)[1]) {}

// Rows of bf12 as words of bf16.
class Bf12Words {
 public:
  Bf12Words() = default;
  explicit Bf12Words(const std::byte* table) : table_(table) {}

  // Calls take(column, word) for each column of the row. Does not look up exceptions.
  template <typename Take>
  void read(const std::byte* row, const Take& take) const {
    for (int32_t column = 0; column < 64; ++column) {
      const int32_t place = bf12_place(column);
      const std::byte* names = row + kBf12NamesOffset + place % 64;
      uint32_t word = 0;
      for (int k = 0; k < 2; ++k) {
        const uint32_t both = static_cast<uint8_t>(names[k]);
        const auto upper = static_cast<uint32_t>(table_[place < 64 ? both & 15 : both >> 4]);
        word |= (static_cast<uint32_t>(row[place + k]) | upper << 8) << 16 * k;
      }
      take(column, word);
    }
  }

 private:
  const std::byte* table_;
};

}  // namespace
}  // namespace torch_mesh
