#include "kernels/pack_gguf.h"

#include <algorithm>
#include <array>
#include <cstring>

#include "base/error.h"
#include "kernels/gguf_grids.h"
#include "kernels/small_floats.h"

namespace torch_mesh {
namespace {

constexpr int32_t kColumnsOfLine = 16;  // columns whose words are beside each other
constexpr int64_t kLineBytes = kColumnsOfLine * 4;
constexpr int32_t kAhead = 8;  // columns

// The parts of one block of a file.
struct GgufBlock {
  uint16_t d;
  uint16_t min;  // what mins are multiples of, or the min itself
  uint8_t steps[kMaxGgufDepth / 16];
  uint8_t mins[kMaxGgufDepth / 16];
  uint8_t codes[kMaxGgufDepth];
};

constexpr uint64_t kEachByte = 0x0101010101010101;

const uint8_t* bytes_of(const std::byte* from) { return reinterpret_cast<const uint8_t*>(from); }

uint64_t eight_at(const uint8_t* codes) {
  return read_as<uint64_t>(reinterpret_cast<const std::byte*>(codes));
}

void put_eight(uint64_t codes, uint8_t* to) { std::memcpy(to, &codes, sizeof(codes)); }

// Returns eight fields of `kBits` bits each, with a byte for each.
template <int32_t kBits>
constexpr uint64_t spread(uint64_t fields) {
  const auto halve = [&](int32_t width,
                         uint64_t each) {  // the upper half of `width` fields moves up
    fields = (fields | fields << (width * (8 - kBits))) & ((1u << width * kBits) - 1) * each;
  };
  halve(4, 0x0000000100000001);
  halve(2, 0x0001000100010001);
  halve(1, kEachByte);
  return fields;
}

// spread<1>() of eight bits.
constexpr auto kBytesOfBits = [] {
  std::array<uint64_t, 256> bytes{};
  for (uint64_t bits = 0; bits < bytes.size(); ++bits) bytes[bits] = spread<1>(bits);
  return bytes;
}();

// Writes 2 * `half` codes: the low nibbles of `half` bytes, then the high ones.
void put_halves(const uint8_t* from, int32_t half, uint8_t* codes) {
  for (int32_t i = 0; i < half; i += 8) {
    const auto eight = eight_at(from + i);
    put_eight(eight & 15 * kEachByte, codes + i);
    put_eight(eight >> 4 & 15 * kEachByte, codes + half + i);
  }
}

// Returns bits [bit, bit + bits) of each of eight bytes.
uint64_t bits_of_eight(const uint8_t* from, int32_t bit, int32_t bits) {
  return eight_at(from) >> bit & ((1u << bits) - 1) * kEachByte;
}

// Writes two bits of each of 32 bytes, from bit `bit` on, as codes.
void put_twos(const uint8_t* from, int32_t bit, uint8_t* codes) {
  for (int32_t i = 0; i < 32; i += 8) put_eight(bits_of_eight(from + i, bit, 2), codes + i);
}

// Adds `bits` bits of each of 32 bytes, from bit `bit` on, to codes, from their bit `as` on.
void add_bits(const uint8_t* from, int32_t bit, int32_t bits, int32_t as, uint8_t* codes) {
  for (int32_t i = 0; i < 32; i += 8) {
    const uint64_t more = bits_of_eight(from + i, bit, bits) << as;
    put_eight(eight_at(codes + i) | more, codes + i);
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
template <Format kFormat>
void take_block_of_32(const std::byte* from, GgufBlock& to) {
  constexpr GgufType kType = gguf_type(kFormat);
  const std::byte* at = from + 2;
  if (kType.has_mins()) {
    to.min = read_as<uint16_t>(at) ^ 0x8000;  // these types add their min
    at += 2;
  }
  put_halves(bytes_of(at + (kType.bits == 5 ? 4 : 0)), 16, to.codes);
  if (kType.bits != 5) return;
  for (int32_t i = 0; i < 4; ++i) {
    uint8_t* codes = to.codes + 8 * i;
    put_eight(eight_at(codes) | kBytesOfBits[bytes_of(at)[i]] << 4, codes);
  }
}

void take_q2_k(const std::byte* from, GgufBlock& to) {
  for (int32_t i = 0; i < 16; ++i) to.steps[i] = static_cast<uint8_t>(from[i]);
  for (int32_t i = 0; i < 8; ++i) {
    put_twos(bytes_of(from) + 16 + i / 4 * 32, i % 4 * 2, to.codes + 32 * i);
  }
  to.d = read_as<uint16_t>(from + 80);
  to.min = read_as<uint16_t>(from + 82);
}

void take_q3_k(const std::byte* from, GgufBlock& to) {
  const uint8_t *bytes = bytes_of(from), *steps = bytes + 96;
  for (int32_t i = 0; i < 8; ++i) {
    put_twos(bytes + 32 + i / 4 * 32, i % 4 * 2, to.codes + 32 * i);
    add_bits(bytes, i, 1, 2, to.codes + 32 * i);
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
  for (int32_t i = 0; i < 8; ++i) add_bits(bytes_of(from) + 16, i, 1, 4, to.codes + 32 * i);
}

void take_q6_k(const std::byte* from, GgufBlock& to) {
  const uint8_t* bytes = bytes_of(from);
  for (int32_t i = 0; i < 2; ++i) put_halves(bytes + 64 * i, 64, to.codes + 128 * i);
  for (int32_t i = 0; i < 8; ++i) {
    add_bits(bytes + 128 + i / 4 * 32, i % 4 * 2, 2, 4, to.codes + 32 * i);
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
  const uint32_t nibble = bits ^ bits >> 4;
  return bits | (0x6996 >> (nibble & 15) & 1) << 7;  // bit n: whether n has an odd number of ones
}

// Writes the codes of eight weights: magnitudes of `kBits` bits from an entry of a grid, and a sign
// above each.
template <int32_t kBits>
void put_grid(uint32_t entry, uint32_t signs, uint8_t* codes) {
  put_eight(spread<kBits>(entry) | kBytesOfBits[signs & 255] << kBits, codes);
}

// The same from two entries of IQ3's grid, with four weights each.
void put_two_of_iq3(uint32_t first, uint32_t second, uint32_t signs, uint8_t* codes) {
  put_grid<3>(first | second << 12, signs, codes);
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
      put_grid<2>(kIq2XxsGrid[bytes_of(at)[i]], eight_signs(signs >> 7 * i),
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
    put_grid<2>(kIq2XsGrid[bits & 511], eight_signs(bits >> 9), to.codes + i * 8);
  }
}

void take_iq2_s(const std::byte* from, GgufBlock& to) {
  const uint8_t *low = bytes_of(from) + 2, *signs = low + 32, *high = signs + 32;
  put_steps_of_four(high + 8, to);
  for (int32_t i = 0; i < 32; ++i) {
    put_grid<2>(kIq2SGrid[low[i] | (high[i / 4] >> i % 4 * 2 & 3) << 8], signs[i],
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
      put_grid<2>(iq1_entry(low[group * 4 + i], bits >> 3 * i), 0, to.codes + group * 32 + i * 8);
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
      put_grid<2>(iq1_entry(low[2 * i + half], bits), (bits & 8) != 0 ? 255 : 0,
                  to.codes + i * 16 + half * 8);
    }
  }
  to.d = static_cast<uint16_t>(d);
}

bool is_finite_half(uint16_t bits) { return (bits & 0x7c00) != 0x7c00; }

// -- into a column of a record's block --

// Writes word `word` of a column's part, whose first word is at `words`.
void put_word(uint32_t bits, int32_t word, std::byte* words) {
  std::memcpy(words + word * kLineBytes, &bits, sizeof(bits));
}

// Returns bits [kFirst, kFirst + kBits) of 32 / kBits codes: those of code 4 b + i are at bit
// kBits * b of byte i.
template <int32_t kFirst, int32_t kBits>
uint32_t word_of(const uint8_t* codes) {
  uint32_t word = 0;
  for (int32_t i = 0; i < 4 / kBits; ++i) {
    const uint64_t eight = bits_of_eight(codes + 8 * i, kFirst, kBits);
    word |= static_cast<uint32_t>(eight | eight >> (32 - kBits)) << (2 * kBits * i);
  }
  return word;
}

// Writes the words of a column's part: of nibbles, of two bits, of one bit, as codes have them.
template <int32_t kBits>
void put_words(const uint8_t* codes, std::byte* words) {
  constexpr int32_t kNibble = kBits & 4;
  int32_t word = 0;
  if constexpr (kNibble != 0) {
    for (int32_t k = 0; k < kGgufPart; k += 8) put_word(word_of<0, 4>(codes + k), word++, words);
  }
  if constexpr ((kBits & 2) != 0) {
    for (int32_t k = 0; k < kGgufPart; k += 16) {
      put_word(word_of<kNibble, 2>(codes + k), word++, words);
    }
  }
  if constexpr ((kBits & 1) != 0) put_word(word_of<kBits - 1, 1>(codes), word, words);
}

template <Format kFormat>
void put_part(const GgufBlock& from, int32_t part, int32_t column, std::byte* to) {
  constexpr GgufType kType = gguf_type(kFormat);
  constexpr int32_t kGroups = kType.part_groups();
  std::byte* steps = to;
  for (int32_t g = part * kGroups; g < (part + 1) * kGroups; ++g) {
    if (kType.step_bytes() > 0) steps[column] = std::byte{from.steps[g]};
    if (kType.step_bytes() > 1) steps[kBlockColumns + column] = std::byte{from.mins[g]};
    steps += kBlockColumns * kType.step_bytes();
  }
  const int64_t line = column / kColumnsOfLine * kType.bits * kLineBytes;
  put_words<kType.bits>(from.codes + part * kGgufPart, steps + line + column % kColumnsOfLine * 4);
}

template <Format kFormat>
void put_block(const GgufBlock& from, int32_t column, std::byte* stretch) {
  constexpr GgufType kType = gguf_type(kFormat);
  std::memcpy(stretch + column * 2, &from.d, 2);
  if (kType.has_half_mins()) std::memcpy(stretch + (kBlockColumns + column) * 2, &from.min, 2);
  for (int32_t part = 0; part < kType.depth / kGgufPart; ++part) {
    put_part<kFormat>(from, part, column,
                      stretch + kType.header_bytes() + part * kType.part_bytes());
  }
}

template <Format kFormat, void (*kTake)(const std::byte* from, GgufBlock& to)>
void pack(const PackedMatrix& matrix, const CodesView& view, int32_t first_row, std::byte* block) {
  constexpr GgufType kType = gguf_type(kFormat);
  const int32_t columns = std::min(matrix.columns - first_row, kBlockColumns);
  if (columns < kBlockColumns || matrix.depth < matrix.depth_padded) {
    std::memset(block, 0, static_cast<size_t>(matrix.block_bytes));
  }
  GgufBlock taken;
  const std::byte* rows = view.data + int64_t{first_row} * view.row_bytes;
  const std::byte* end = rows + columns * view.row_bytes;
  // A stretch of all columns is written while it is in the first-level cache. The columns' blocks
  // are far apart in the file, so those of the next columns are prefetched.
  for (int32_t stretch = 0; stretch < matrix.depth / kType.depth; ++stretch) {
    const std::byte* from = rows + int64_t{stretch} * kType.bytes;
    for (int32_t column = 0; column < columns; ++column, from += view.row_bytes) {
      const std::byte* ahead = from + kAhead * view.row_bytes;
      if (ahead >= end) ahead += kType.bytes - columns * view.row_bytes;
      for (int32_t line = 0; line < kType.bytes; line += 64) __builtin_prefetch(ahead + line);
      taken.d = read_as<uint16_t>(from);
      taken.min = 0;
      kTake(from, taken);
      if (!is_finite_half(taken.d) || !is_finite_half(taken.min)) {
        throw_invalid(format_name(kFormat), " cannot hold a scale that is not a finite number");
      }
      put_block<kFormat>(taken, column, block + stretch * matrix.group_bytes);
    }
  }
}

using Pack = void (*)(const PackedMatrix& matrix, const CodesView& view, int32_t first_row,
                      std::byte* block);

Pack pack_of(Format format) {
  switch (format) {
    case Format::kQ4_1:
      return pack<Format::kQ4_1, take_block_of_32<Format::kQ4_1>>;
    case Format::kQ5_0:
      return pack<Format::kQ5_0, take_block_of_32<Format::kQ5_0>>;
    case Format::kQ5_1:
      return pack<Format::kQ5_1, take_block_of_32<Format::kQ5_1>>;
    case Format::kIq4Nl:
      return pack<Format::kIq4Nl, take_block_of_32<Format::kIq4Nl>>;
    case Format::kQ2K:
      return pack<Format::kQ2K, take_q2_k>;
    case Format::kQ3K:
      return pack<Format::kQ3K, take_q3_k>;
    case Format::kQ4K:
      return pack<Format::kQ4K, take_q4_k>;
    case Format::kQ5K:
      return pack<Format::kQ5K, take_q5_k>;
    case Format::kQ6K:
      return pack<Format::kQ6K, take_q6_k>;
    case Format::kIq4Xs:
      return pack<Format::kIq4Xs, take_iq4_xs>;
    case Format::kIq3Xxs:
      return pack<Format::kIq3Xxs, take_iq3_xxs>;
    case Format::kIq3S:
      return pack<Format::kIq3S, take_iq3_s>;
    case Format::kIq2Xxs:
      return pack<Format::kIq2Xxs, take_iq2_xxs>;
    case Format::kIq2Xs:
      return pack<Format::kIq2Xs, take_iq2_xs>;
    case Format::kIq2S:
      return pack<Format::kIq2S, take_iq2_s>;
    case Format::kIq1S:
      return pack<Format::kIq1S, take_iq1_s>;
    case Format::kIq1M:
      return pack<Format::kIq1M, take_iq1_m>;
    default:
      throw_invalid(format_name(format), " has no blocks of a GGUF file");
  }
}

}  // namespace

void pack_gguf(const PackedMatrix& matrix, const CodesView& view, int32_t first_row,
               std::byte* block) {
  pack_of(matrix.format)(matrix, view, first_row, block);
}

}  // namespace torch_mesh
