#include "kernels/pack_gguf.h"

#include <algorithm>
#include <bit>
#include <cstring>
#include <string>

#include "base/error.h"
#include "kernels/gguf_grids.h"
#include "kernels/small_floats.h"

namespace torch_mesh {
namespace {

constexpr int32_t kColumnsOfLine = 16;  // columns whose words are beside each other
constexpr int64_t kLineBytes = kColumnsOfLine * 4;

// The parts of one block of a file.
struct GgufBlock {
  uint16_t d;
  uint16_t min;  // what mins are multiples of, or the min itself
  uint8_t steps[kMaxGgufDepth / 16];
  uint8_t mins[kMaxGgufDepth / 16];
  uint8_t codes[kMaxGgufDepth];
};

const uint8_t* bytes_of(const std::byte* from) { return reinterpret_cast<const uint8_t*>(from); }

// Writes 2 * `half` codes: the low nibbles of `half` bytes, then the high ones.
void put_halves(const uint8_t* from, int32_t half, uint8_t* codes) {
  for (int32_t i = 0; i < half; ++i) {
    codes[i] = from[i] & 15;
    codes[half + i] = from[i] >> 4;
  }
}

// Adds `bits` bits of each byte, from bit `bit` on, to a code, from its bit `as` on.
void put_bits(const uint8_t* from, int32_t bit, int32_t bits, int32_t as, int32_t count,
              uint8_t* codes) {
  const uint32_t mask = (1u << bits) - 1;
  for (int32_t i = 0; i < count; ++i) {
    codes[i] |= static_cast<uint8_t>((from[i] >> bit & mask) << as);
  }
}

// Steps of q4_k and q5_k: eight scales and eight mins of six bits.
void put_steps_of_six(const uint8_t* from, GgufBlock& to) {
  for (int32_t i = 0; i < 4; ++i) {
    to.steps[i] = from[i] & 63;
    to.mins[i] = from[4 + i] & 63;
    to.steps[4 + i] = static_cast<uint8_t>((from[8 + i] & 15) | (from[i] >> 2 & 0x30));
    to.mins[4 + i] = static_cast<uint8_t>(from[8 + i] >> 4 | (from[4 + i] >> 2 & 0x30));
  }
}

// Blocks of 32 with one scale: d, the min if there is one, a fifth bit of each code if it has one.
void take_block_of_32(const GgufType& type, const std::byte* from, GgufBlock& to) {
  const std::byte* at = from + 2;
  if (type.has_mins()) {
    to.min = read_as<uint16_t>(at) ^ 0x8000;  // these types add their min
    at += 2;
  }
  put_halves(bytes_of(at + (type.bits == 5 ? 4 : 0)), 16, to.codes);
  if (type.bits != 5) return;
  const auto fifth = read_as<uint32_t>(at);
  for (int32_t i = 0; i < 32; ++i) to.codes[i] |= static_cast<uint8_t>((fifth >> i & 1) << 4);
}

void take_q2_k(const std::byte* from, GgufBlock& to) {
  for (int32_t i = 0; i < 16; ++i) to.steps[i] = static_cast<uint8_t>(from[i]);
  std::memset(to.codes, 0, sizeof(to.codes));
  for (int32_t i = 0; i < 8; ++i) {
    put_bits(bytes_of(from) + 16 + i / 4 * 32, i % 4 * 2, 2, 0, 32, to.codes + 32 * i);
  }
  to.d = read_as<uint16_t>(from + 80);
  to.min = read_as<uint16_t>(from + 82);
}

void take_q3_k(const std::byte* from, GgufBlock& to) {
  const uint8_t *bytes = bytes_of(from), *steps = bytes + 96;
  std::memset(to.codes, 0, sizeof(to.codes));
  for (int32_t i = 0; i < 8; ++i) {
    put_bits(bytes + 32 + i / 4 * 32, i % 4 * 2, 2, 0, 32, to.codes + 32 * i);
    put_bits(bytes, i, 1, 2, 32, to.codes + 32 * i);
  }
  for (int32_t i = 0; i < 16; ++i) {
    const int32_t low = steps[i % 8] >> i / 8 * 4 & 15;
    const int32_t high = steps[8 + i % 4] >> i / 4 * 2 & 3;
    to.steps[i] = static_cast<uint8_t>((low | high << 4) - 32);
  }
  to.d = read_as<uint16_t>(from + 108);
}

void take_q4_k(const std::byte* from, GgufBlock& to) {
  to.min = read_as<uint16_t>(from + 2);
  put_steps_of_six(bytes_of(from) + 4, to);
  for (int32_t i = 0; i < 4; ++i) put_halves(bytes_of(from) + 16 + 32 * i, 32, to.codes + 64 * i);
}

void take_q5_k(const std::byte* from, GgufBlock& to) {
  to.min = read_as<uint16_t>(from + 2);
  put_steps_of_six(bytes_of(from) + 4, to);
  for (int32_t i = 0; i < 4; ++i) put_halves(bytes_of(from) + 48 + 32 * i, 32, to.codes + 64 * i);
  for (int32_t i = 0; i < 8; ++i) put_bits(bytes_of(from) + 16, i, 1, 4, 32, to.codes + 32 * i);
}

void take_q6_k(const std::byte* from, GgufBlock& to) {
  const uint8_t* bytes = bytes_of(from);
  for (int32_t i = 0; i < 2; ++i) put_halves(bytes + 64 * i, 64, to.codes + 128 * i);
  for (int32_t i = 0; i < 8; ++i) {
    put_bits(bytes + 128 + i / 4 * 32, i % 4 * 2, 2, 4, 32, to.codes + 32 * i);
  }
  std::memcpy(to.steps, bytes + 192, 16);
  to.d = read_as<uint16_t>(from + 208);
}

void take_iq4_xs(const std::byte* from, GgufBlock& to) {
  const auto high = read_as<uint16_t>(from + 2);
  const uint8_t* low = bytes_of(from) + 4;
  for (int32_t i = 0; i < 8; ++i) {
    const int32_t step = (low[i / 2] >> i % 2 * 4 & 15) | (high >> 2 * i & 3) << 4;
    to.steps[i] = static_cast<uint8_t>(step - 32);
    put_halves(bytes_of(from) + 8 + 16 * i, 16, to.codes + 32 * i);
  }
}

// Returns eight signs for seven bits; the last one makes the number of ones even.
uint32_t eight_signs(uint32_t bits) {
  bits &= 127;
  return bits | (static_cast<uint32_t>(std::popcount(bits)) & 1) << 7;
}

// Writes the codes of `count` weights: magnitudes of `bits` bits from an entry of a grid, and a
// sign above each.
void put_grid(uint32_t entry, uint32_t signs, int32_t bits, int32_t count, uint8_t* codes) {
  const uint32_t mask = (1u << bits) - 1;
  for (int32_t i = 0; i < count; ++i) {
    codes[i] = static_cast<uint8_t>((entry >> bits * i & mask) | (signs >> i & 1) << bits);
  }
}

// Writes the codes of eight weights from two entries of IQ3's grid.
void put_two_of_iq3(uint32_t first, uint32_t second, uint32_t signs, uint8_t* codes) {
  put_grid(first, signs, 3, 4, codes);
  put_grid(second, signs >> 4, 3, 4, codes + 4);
}

// The step 1/2 + nibble, in halves.
uint8_t odd_step(uint32_t nibble) { return static_cast<uint8_t>(2 * (nibble & 15) + 1); }

void take_iq3_xxs(const std::byte* from, GgufBlock& to) {
  const uint8_t* grid = bytes_of(from) + 2;
  for (int32_t group = 0; group < 8; ++group) {
    const auto signs = read_as<uint32_t>(from + 66 + group * 4);
    to.steps[group] = odd_step(signs >> 28);
    for (int32_t i = 0; i < 4; ++i, grid += 2) {
      put_two_of_iq3(kIq3XxsGrid[grid[0]], kIq3XxsGrid[grid[1]], eight_signs(signs >> 7 * i),
                     to.codes + group * 32 + i * 8);
    }
  }
}

void take_iq3_s(const std::byte* from, GgufBlock& to) {
  const uint8_t *low = bytes_of(from) + 2, *high = low + 64, *signs = high + 8;
  const uint8_t* steps = signs + 32;
  for (int32_t group = 0; group < 8; ++group) {
    to.steps[group] = odd_step(steps[group / 2] >> group % 2 * 4);
    const auto entry = [&](int32_t i) {
      return kIq3SGrid[low[group * 8 + i] | (high[group] >> i & 1) << 8];
    };
    for (int32_t i = 0; i < 4; ++i) {
      put_two_of_iq3(entry(2 * i), entry(2 * i + 1), signs[group * 4 + i],
                     to.codes + group * 32 + i * 8);
    }
  }
}

void take_iq2_xxs(const std::byte* from, GgufBlock& to) {
  for (int32_t group = 0; group < 8; ++group) {
    const std::byte* at = from + 2 + group * 8;
    const auto signs = read_as<uint32_t>(at + 4);
    to.steps[group] = odd_step(signs >> 28);
    for (int32_t i = 0; i < 4; ++i) {
      put_grid(kIq2XxsGrid[bytes_of(at)[i]], eight_signs(signs >> 7 * i), 2, 8,
               to.codes + group * 32 + i * 8);
    }
  }
}

// Steps of IQ2_XS and IQ2_S: a nibble for each 16 weights.
void put_steps_of_four(const uint8_t* from, GgufBlock& to) {
  for (int32_t i = 0; i < 16; ++i) to.steps[i] = odd_step(from[i / 2] >> i % 2 * 4);
}

void take_iq2_xs(const std::byte* from, GgufBlock& to) {
  put_steps_of_four(bytes_of(from) + 66, to);
  for (int32_t i = 0; i < 32; ++i) {
    const uint32_t bits = read_as<uint16_t>(from + 2 + i * 2);
    put_grid(kIq2XsGrid[bits & 511], eight_signs(bits >> 9), 2, 8, to.codes + i * 8);
  }
}

void take_iq2_s(const std::byte* from, GgufBlock& to) {
  const uint8_t *low = bytes_of(from) + 2, *signs = low + 32, *high = signs + 32;
  put_steps_of_four(high + 8, to);
  for (int32_t i = 0; i < 32; ++i) {
    put_grid(kIq2SGrid[low[i] | (high[i / 4] >> i % 4 * 2 & 3) << 8], signs[i], 2, 8,
             to.codes + i * 8);
  }
}

// The eight magnitudes of a code of IQ1, by its eight low bits and three high ones.
uint32_t iq1_entry(uint8_t low, uint32_t high) { return kIq1Grid[low | (high & 7) << 8]; }

void take_iq1_s(const std::byte* from, GgufBlock& to) {
  const uint8_t* low = bytes_of(from) + 2;
  for (int32_t group = 0; group < 8; ++group) {
    const uint32_t bits = read_as<uint16_t>(from + 34 + group * 2);
    // Magnitudes 0 to 2 stand for -1 to 1, an eighth more or less: 7/8 or 9/8 is subtracted.
    const uint32_t eighths = bits >> 15 == 0 ? 7 : 9;
    to.steps[group] = static_cast<uint8_t>(odd_step(bits >> 12 & 7) | eighths << 4);
    for (int32_t i = 0; i < 4; ++i) {
      put_grid(iq1_entry(low[group * 4 + i], bits >> 3 * i), 0, 2, 8,
               to.codes + group * 32 + i * 8);
    }
  }
}

void take_iq1_m(const std::byte* from, GgufBlock& to) {
  const uint8_t *low = bytes_of(from), *high = low + 32;
  uint32_t d = 0;
  for (int32_t i = 0; i < 16; ++i) {
    const uint32_t steps = read_as<uint16_t>(from + 48 + i / 4 * 2);
    to.steps[i] = odd_step(steps >> i % 4 * 3 & 7);
    if (i % 4 == 0) d |= steps >> 12 << i;
    for (int32_t half = 0; half < 2; ++half) {
      const uint32_t bits = high[i] >> 4 * half;
      put_grid(iq1_entry(low[2 * i + half], bits), (bits & 8) != 0 ? 0xff : 0, 2, 8,
               to.codes + i * 16 + half * 8);
    }
  }
  to.d = static_cast<uint16_t>(d);
}

void take_block(Format format, const std::byte* from, GgufBlock& to) {
  to.d = read_as<uint16_t>(from);
  to.min = 0;
  switch (format) {
    case Format::kQ2K:
      return take_q2_k(from, to);
    case Format::kQ3K:
      return take_q3_k(from, to);
    case Format::kQ4K:
      return take_q4_k(from, to);
    case Format::kQ5K:
      return take_q5_k(from, to);
    case Format::kQ6K:
      return take_q6_k(from, to);
    case Format::kIq4Xs:
      return take_iq4_xs(from, to);
    case Format::kIq3Xxs:
      return take_iq3_xxs(from, to);
    case Format::kIq3S:
      return take_iq3_s(from, to);
    case Format::kIq2Xxs:
      return take_iq2_xxs(from, to);
    case Format::kIq2Xs:
      return take_iq2_xs(from, to);
    case Format::kIq2S:
      return take_iq2_s(from, to);
    case Format::kIq1S:
      return take_iq1_s(from, to);
    case Format::kIq1M:
      return take_iq1_m(from, to);
    default:
      return take_block_of_32(gguf_type(format), from, to);
  }
}

bool is_finite_half(uint16_t bits) { return (bits & 0x7c00) != 0x7c00; }

// -- into a column of a record's block --

// Writes word `word` of a column's part, whose first word is at `words`.
void put_word(uint32_t bits, int32_t word, std::byte* words) {
  std::memcpy(words + word * kLineBytes, &bits, sizeof(bits));
}

// Returns bits [first, first + bits) of 32 / bits codes: those of code 4 b + i are at bit `bits` *
// b of byte i.
uint32_t word_of(const uint8_t* codes, int32_t first, int32_t bits) {
  const uint32_t mask = (1u << bits) - 1;
  uint32_t word = 0;
  for (int32_t k = 0; k < 32 / bits; ++k) {
    word |= (codes[k] >> first & mask) << (k % 4 * 8 + k / 4 * bits);
  }
  return word;
}

void put_words(const GgufType& type, const uint8_t* codes, std::byte* words) {
  int32_t word = 0;
  int32_t first = 0;  // bit of the codes
  if (type.bits >= 4) {
    for (int32_t k = 0; k < kGgufPart; k += 8) put_word(word_of(codes + k, 0, 4), word++, words);
    first = 4;
  }
  if (type.bits - first >= 2) {
    for (int32_t k = 0; k < kGgufPart; k += 16) {
      put_word(word_of(codes + k, first, 2), word++, words);
    }
    first += 2;
  }
  if (type.bits > first) put_word(word_of(codes, first, 1), word, words);
}

void put_part(const GgufType& type, const GgufBlock& from, int32_t part, int32_t column,
              std::byte* to) {
  const int32_t groups = type.part_groups();
  std::byte* steps = to;
  for (int32_t g = part * groups; g < (part + 1) * groups; ++g) {
    if (type.step_bytes() > 0) steps[column] = std::byte{from.steps[g]};
    if (type.step_bytes() > 1) steps[kBlockColumns + column] = std::byte{from.mins[g]};
    steps += kBlockColumns * type.step_bytes();
  }
  const int64_t line = column / kColumnsOfLine * type.bits * kLineBytes;
  put_words(type, from.codes + part * kGgufPart, steps + line + column % kColumnsOfLine * 4);
}

void put_block(const GgufType& type, const GgufBlock& from, int32_t column, std::byte* stretch) {
  std::memcpy(stretch + column * 2, &from.d, 2);
  if (type.has_half_mins()) std::memcpy(stretch + (kBlockColumns + column) * 2, &from.min, 2);
  for (int32_t part = 0; part < type.depth / kGgufPart; ++part) {
    put_part(type, from, part, column, stretch + type.header_bytes() + part * type.part_bytes());
  }
}

}  // namespace

void pack_gguf(const PackedMatrix& matrix, const CodesView& view, int32_t first_row,
               std::byte* block) {
  const GgufType type = gguf_type(matrix.format);
  const int32_t columns = std::min(matrix.columns - first_row, kBlockColumns);
  std::memset(block, 0, static_cast<size_t>(matrix.block_bytes));
  GgufBlock taken;
  for (int32_t column = 0; column < columns; ++column) {
    const std::byte* from = view.data + (int64_t{first_row} + column) * view.row_bytes;
    for (int32_t stretch = 0; stretch < matrix.depth / type.depth; ++stretch) {
      take_block(matrix.format, from + int64_t{stretch} * type.bytes, taken);
      if (!is_finite_half(taken.d) || !is_finite_half(taken.min)) {
        throw Error(ErrorKind::kInvalid, std::string(format_name(matrix.format)) +
                                             " cannot hold a scale that is not a finite number");
      }
      put_block(type, taken, column, block + stretch * matrix.group_bytes);
    }
  }
}

}  // namespace torch_mesh
