// GGUF's types in blocks whose records hold each block's scales and a code for each weight:
//
//   weight = scale * (code - zero) - min         or    scale * levels[code] of the IQ types
//
// A file's block has `depth` weights of a row. With steps it has an fp16 number d, and a byte or
// less for each `group` weights: scale = d * step * unit, in fp32, and min = dmin * its step
// likewise. Without steps, scale is d itself, and min an fp16 number of the block. All products but
// the last are exact in fp32: the values are the gguf package's, bit for bit. docs/decisions/0069.
//
// A file's code of IQ1, IQ2 or IQ3 names the magnitudes of several weights at once. A record has a
// code for each weight, whose last bit is the sign. Weights of IQ1 are -1, 0 or 1, plus or minus an
// eighth. In IQ1_M a bit of each code says which. In IQ1_S it is the same for a group, whose min is
// a multiple of the scale in eighths.
//
// In a record a block of 64 columns is a row of stretches of `depth` inputs:
//   64 fp16 d | 64 fp16 dmin, if there are mins | a part for each 32 inputs:
//     for each group 64 steps, and behind them the 64 of its mins (of q2_k and iq1_s in the upper
//     nibble) |
//     [4][bits][16] words
// A word holds the codes of one column; the words of 16 columns stand beside each other.
// - The lower four bits of codes of four bits and more are in the first four words, as int4's
//   (eight inputs each).
// - Two bits of codes of two, three and six bits are in two words of 16 inputs each: input 4 b + i
//   is in bits 2 b and 2 b + 1 of byte i.
// - The last bit of codes of three and five bits is in one word: input 4 b + i is in bit b of
//   byte i.
#pragma once

#include <algorithm>
#include <cstdint>

#include "store/record.h"

namespace torch_mesh {

inline constexpr int32_t kGgufPart = 32;       // inputs
inline constexpr int32_t kMaxGgufDepth = 256;  // of a stretch

// How mins are stored: fp16; fp16 times bytes or nibbles; scales times nibbles.
enum class GgufMins : uint8_t { kNone, kHalves, kBytes, kNibbles, kEighths };
inline constexpr float kGgufEighth = 0.125f;

alignas(16) inline constexpr int8_t kIq4Levels[16] = {-127, -104, -83, -65, -49, -35, -22, -10,
                                                      1,    13,   25,  38,  53,  69,  89,  113};
alignas(16) inline constexpr int8_t kIq3SLevels[16] = {1,  3,  5,  7,  9,  11,  13,  15,
                                                       -1, -3, -5, -7, -9, -11, -13, -15};
alignas(16) inline constexpr int8_t kIq3XxsLevels[16] = {4,  12,  20,  28,  36,  44,  52,  62,
                                                         -4, -12, -20, -28, -36, -44, -52, -62};
alignas(16) inline constexpr int8_t kIq2Levels[16] = {8, 25, 43, 0, -8, -25, -43, 0};
alignas(16) inline constexpr int8_t kIq1Levels[16] = {-7, 1, 9, 0, -9, -1, 7, 0};

struct GgufType {
  int32_t depth;   // weights of a file's block
  int32_t bytes;   // of it
  int32_t bits;    // of a code
  int32_t group;   // weights that share a scale, 16 or 32
  bool steps;      // a scale is d times a step
  bool is_signed;  // of steps
  GgufMins mins;
  int32_t zero;          // the code of a weight of zero, but for its min; 0 with levels
  const int8_t* levels;  // [16] that codes name; nullptr: none
  float unit = 1;        // a power of two that scales are multiplied by

  // Products take codes, or levels minus the lowest level, as unsigned bytes. AMX's tiles
  // take weights as signed bytes, and IQ4's exceed them, so IQ4's levels keep their sign.
  constexpr bool has_unsigned_bytes() const { return max_byte() <= INT8_MAX; }
  constexpr int32_t max_byte() const {
    return levels == nullptr ? (1 << bits) - 1
                             : *std::max_element(levels, levels + 16) - lowest_level();
  }
  constexpr int32_t zero_byte() const { return zero - lowest_level(); }  // of a weight of zero
  constexpr int32_t lowest_level() const {
    return levels == nullptr ? 0 : *std::min_element(levels, levels + 16);
  }
  constexpr bool has_mins() const { return mins != GgufMins::kNone; }
  constexpr bool has_half_mins() const { return has_mins() && mins != GgufMins::kEighths; }
  // Whether a step and its min share a byte.
  constexpr bool has_nibbles() const {
    return mins == GgufMins::kNibbles || mins == GgufMins::kEighths;
  }
  constexpr int32_t part_groups() const { return kGgufPart / group; }
  // Bytes of one column of a group: its step and its min.
  constexpr int32_t step_bytes() const { return !steps ? 0 : mins == GgufMins::kBytes ? 2 : 1; }
  constexpr int64_t header_bytes() const {
    return int64_t{kBlockColumns} * (has_half_mins() ? 4 : 2);
  }
  constexpr int64_t part_bytes() const {
    return int64_t{kBlockColumns} * (part_groups() * step_bytes() + 4 * bits);
  }
  constexpr int64_t stretch_bytes() const {
    return header_bytes() + depth / kGgufPart * part_bytes();
  }
};

constexpr GgufType gguf_type(Format format) {
  using enum GgufMins;
  switch (format) {
    case Format::kQ4_1:
      return {32, 20, 4, 32, false, false, kHalves, 0, nullptr};
    case Format::kQ5_0:
      return {32, 22, 5, 32, false, false, kNone, 16, nullptr};
    case Format::kQ5_1:
      return {32, 24, 5, 32, false, false, kHalves, 0, nullptr};
    case Format::kQ2K:
      return {256, 84, 2, 16, true, false, kNibbles, 0, nullptr};
    case Format::kQ3K:
      return {256, 110, 3, 16, true, true, kNone, 4, nullptr};
    case Format::kQ4K:
      return {256, 144, 4, 32, true, false, kBytes, 0, nullptr};
    case Format::kQ5K:
      return {256, 176, 5, 32, true, false, kBytes, 0, nullptr};
    case Format::kQ6K:
      return {256, 210, 6, 16, true, true, kNone, 32, nullptr};
    case Format::kIq4Nl:
      return {32, 18, 4, 32, false, false, kNone, 0, kIq4Levels};
    case Format::kIq4Xs:
      return {256, 136, 4, 32, true, true, kNone, 0, kIq4Levels};
    case Format::kIq3Xxs:
      return {256, 98, 4, 32, true, false, kNone, 0, kIq3XxsLevels, 0.25f};
    case Format::kIq3S:
      return {256, 110, 4, 32, true, false, kNone, 0, kIq3SLevels};
    case Format::kIq2Xxs:
      return {256, 66, 3, 32, true, false, kNone, 0, kIq2Levels, 0.125f};
    case Format::kIq2Xs:
      return {256, 74, 3, 16, true, false, kNone, 0, kIq2Levels, 0.125f};
    case Format::kIq2S:
      return {256, 82, 3, 16, true, false, kNone, 0, kIq2Levels, 0.125f};
    case Format::kIq1S:
      return {256, 50, 2, 32, true, false, kEighths, 0, nullptr};
    default:  // kIq1M
      return {256, 56, 3, 16, true, false, kNone, 0, kIq1Levels, kGgufEighth};
  }
}

}  // namespace torch_mesh
