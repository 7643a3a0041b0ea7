// Codes of a trellis (store/trellis.h) to bytes of their levels, which are then multiplied as other
// formats' words. Include after the target's simd header.
#pragma once

#include <bit>

#include "kernels/products-inl.h"
#include "store/trellis.h"

namespace torch_mesh {
namespace {

constexpr int32_t kTrellisColumns = 16;  // whose words stand beside each other
constexpr int32_t kTrellisLine = kTrellisColumns * 4;
constexpr int32_t kTrellisAhead = 8192;  // see Prefetching, dots-inl.h

inline Words bits_of(Words bytes, uint32_t mask) {
  return bytes & broadcast_word(mask * 0x01010101);
}

// Pairs of codes of two bits, four of them in each byte, and the byte before it.
template <int kCode>
inline Words pair_of_codes(Words bytes, Words before) {
  if constexpr (kCode == 0) {
    return bits_of(shift_right<6>(before), 3) | bits_of(shift_left<2>(bytes), 12);
  } else {
    return bits_of(shift_right<2 * kCode - 2>(bytes), 15);
  }
}

// Codes of one bit, of which there are eight in each byte, as look_up_bytes takes four of them.
struct SingleCodes {
  Words bytes, early;  // the codes; the first four, after the last three of the byte before

  SingleCodes(Words bytes, Words before)
      : bytes(bytes),
        early(bits_of(shift_right<5>(before), 7) | bits_of(shift_left<3>(bytes), 0x78)) {}

  // Code kCode and the three before it.
  template <int kCode>
  Words four() const {
    if constexpr (kCode == 0) {
      return early;
    } else if constexpr (kCode < 3) {
      return bits_of(shift_right<kCode>(early), 15);
    } else {
      return bits_of(shift_right<kCode - 3>(bytes), 15);
    }
  }
};

// Unit u of a block, as the words of 16 columns.
template <typename Code>
struct TrellisBlock {
  const std::byte* block;
  int32_t units;
  int32_t unit_bits;  // of its index within a group
  int64_t part_bytes;

  TrellisBlock(const std::byte* block, int32_t group_size, int32_t depth_padded)
      : block(block),
        units(depth_padded / Code::kUnitDepth),
        unit_bits(std::countr_zero(static_cast<uint32_t>(group_size / Code::kUnitDepth))),
        part_bytes(int64_t{Code::kUnitWords * kTrellisLine} << unit_bits) {}

  const std::byte* scales(int32_t group) const {
    const int64_t bytes = kBlockColumns * 2 + part_bytes * (kBlockColumns / kTrellisColumns);
    return block + group * bytes;
  }
  const std::byte* words(int32_t unit) const {
    return scales(unit >> unit_bits) + kBlockColumns * 2 +
           (unit & ((1 << unit_bits) - 1)) * Code::kUnitWords * kTrellisLine;
  }
  // From the words of a unit's first column to those of another one.
  int64_t to_column(int32_t column) const {
    return column / kTrellisColumns * part_bytes + column % kTrellisColumns * 4;
  }
};

// Where reading begins, and what it has to know of the units before.
template <typename Code>
struct TrellisPlace {
  const std::byte *words, *last, *last_but_one;

  TrellisPlace(const TrellisBlock<Code>& block, int32_t unit)
      : words(block.words(unit)),
        last(block.words(unit >= 1 ? unit - 1 : block.units - 1)),
        last_but_one(block.words(unit >= 2 ? unit - 2 : unit + block.units - 2)) {}
};

// What the codes of kLanes columns are read with, one unit after the other.
template <typename Code>
struct TrellisReader;

template <>
struct TrellisReader<Tcq2> {
  Words last, last_turned;  // codes; and these ^ those of the unit before

  TrellisReader(const TrellisPlace<Tcq2>& place, int64_t to_column)
      : last(load_words(place.last + to_column)),
        last_turned(last ^ load_words(place.last_but_one + to_column)) {}

  static Words level(Words first, Words second) {
    return add_words(look_up_bytes(Tcq2::kFirst, first), look_up_bytes(Tcq2::kSecond, second));
  }
  // Of the unit's inputs, four in each.
  void operator()(const std::byte* words, Words (&levels)[4]) {
    const Words codes = load_words(words);
    const Words turned = codes ^ last;
    levels[0] = level(pair_of_codes<0>(turned, last_turned), pair_of_codes<2>(last, last));
    levels[1] = level(pair_of_codes<1>(turned, turned), pair_of_codes<3>(last, last));
    levels[2] = level(pair_of_codes<2>(turned, turned), pair_of_codes<0>(codes, last));
    levels[3] = level(pair_of_codes<3>(turned, turned), pair_of_codes<1>(codes, codes));
    last = codes;
    last_turned = turned;
  }
};

template <>
struct TrellisReader<Tcq3> {
  Words last;           // upper bits
  Words last_pairs[2];  // of these, the two that the next codes still depend on
  Words last_lowest;

  TrellisReader(const TrellisPlace<Tcq3>& place, int64_t to_column)
      : last(load_words(place.last + to_column + kTrellisLine)),
        last_pairs{pair_of_codes<2>(last, last), pair_of_codes<3>(last, last)},
        last_lowest(load_words(place.last + to_column + 2 * kTrellisLine)) {}

  static Words level(Words first, Words second) {
    return add_words(look_up_bytes(Tcq3::kFirst, first), look_up_bytes(Tcq3::kSecond, second));
  }
  template <int kFirst>
  void four_levels(Words upper, const SingleCodes& lowest, Words* levels) {
    const Words pairs[4] = {pair_of_codes<0>(upper, last), pair_of_codes<1>(upper, upper),
                            pair_of_codes<2>(upper, upper), pair_of_codes<3>(upper, upper)};
    levels[0] = level(pairs[0], lowest.four<kFirst>() ^ last_pairs[0]);
    levels[1] = level(pairs[1], lowest.four<kFirst + 1>() ^ last_pairs[1]);
    levels[2] = level(pairs[2], lowest.four<kFirst + 2>() ^ pairs[0]);
    levels[3] = level(pairs[3], lowest.four<kFirst + 3>() ^ pairs[1]);
    last = upper;
    last_pairs[0] = pairs[2];
    last_pairs[1] = pairs[3];
  }
  void operator()(const std::byte* words, Words (&levels)[8]) {
    const SingleCodes lowest(load_words(words + 2 * kTrellisLine), last_lowest);
    four_levels<0>(load_words(words), lowest, levels);
    four_levels<4>(load_words(words + kTrellisLine), lowest, levels + 4);
    last_lowest = lowest.bytes;
  }
};

// Inputs [depth, depth + count) of a block, within one group and multiples of 32:
// [count / 4][kBlockColumns] words of four levels.
template <typename Code>
inline void unfold_trellis(const TrellisBlock<Code>& block, int32_t depth, int32_t count,
                           std::byte* levels) {
  constexpr int32_t kWords = Code::kUnitDepth / 4;
  const TrellisPlace<Code> place(block, depth / Code::kUnitDepth);
  for (int32_t c = 0; c < kBlockColumns; c += kLanes) {
    TrellisReader<Code> read(place, block.to_column(c));
    const std::byte* words = place.words + block.to_column(c);
    std::byte* to = levels + c * 4;
    for (int32_t u = 0; u < count / Code::kUnitDepth; ++u) {
      Words unit[kWords];
      for (int32_t w = 0; w < Code::kUnitWords; ++w) {
        __builtin_prefetch(words + kTrellisAhead + w * kTrellisLine);
      }
      read(words, unit);
      for (int32_t j = 0; j < kWords; ++j, to += kBlockColumns * 4) store_words(to, unit[j]);
      words += Code::kUnitWords * kTrellisLine;
    }
  }
}

// As IntegerGroup; its words are unfolded for all rows at once.
template <typename Code>
struct TrellisGroup {
  const std::byte* scales;
  const std::byte* words;
  int32_t count;  // of pairs of words
  alignas(64) std::byte levels[kMaxGroup * kBlockColumns];

  TrellisGroup(const BlockProducts& products, int32_t group) {
    const int32_t size = products.shape.group_size;
    const TrellisBlock<Code> block(products.block, size, products.shape.depth_padded);
    scales = block.scales(group);
    bytes_ = block.scales(1) - block.scales(0);
    for (int32_t line = 0; line < kBlockColumns * 2; line += kTrellisLine) {
      __builtin_prefetch(scales + kTrellisAhead + line);
    }
    unfold_trellis(block, group * size, size, levels);
    words = levels;
    count = size / 8;
  }
  TrellisGroup(const TrellisGroup&) = delete;
  TrellisGroup& operator=(const TrellisGroup&) = delete;

  const std::byte* scales_of(int32_t column) const { return scales + column * 2; }
  int64_t total_bytes() const { return bytes_; }

 private:
  int64_t bytes_;
};

// One row: levels are multiplied where they are looked up, and go through no memory.
template <typename Dot, typename Code>
inline void trellis_row(const BlockProducts& products) {
  constexpr int32_t kWords = Code::kUnitDepth / 4;
  const int32_t size = products.shape.group_size;
  const int32_t groups = products.shape.depth_padded / size;
  const TrellisBlock<Code> block(products.block, size, products.shape.depth_padded);
  typename Dot::Row row[kMaxGroup / 8];
  for (int32_t g = 0; g < groups; ++g) {
    const GroupRows rows = group_rows(products, g, 1.0f);
    for (int32_t j = 0; j < size / 8; ++j) row[j] = Dot::row(rows.bytes[0] + j * 8);
    const std::byte* scales = block.scales(g);
    for (int32_t line = 0; line < kBlockColumns * 2; line += kTrellisLine) {
      __builtin_prefetch(scales + kTrellisAhead + line);
    }
    const TrellisPlace<Code> place(block, g * size / Code::kUnitDepth);
    for (int32_t c = 0; c < kBlockColumns; c += kLanes) {
      TrellisReader<Code> read(place, block.to_column(c));
      const std::byte* words = place.words + block.to_column(c);
      Words sum = Dot::start(Dot::zeros(scales), rows.sum[0]);
      for (const auto* at = row; at < row + size / 8; at += kWords / 2) {
        for (int32_t w = 0; w < Code::kUnitWords; ++w) {
          if (c % kTrellisColumns == 0)
            __builtin_prefetch(words + kTrellisAhead + w * kTrellisLine);
        }
        Words levels[kWords];
        read(words, levels);
        for (int32_t j = 0; j < kWords / 2; ++j) {
          sum = Dot::add(sum, at[j], {levels[2 * j], levels[2 * j + 1]});
        }
        words += Code::kUnitWords * kTrellisLine;
      }
      add_scaled(products.sums + c, sum, rows.scale[0], Bf16Scales::load(scales + c * 2));
    }
  }
}

}  // namespace
}  // namespace torch_mesh
