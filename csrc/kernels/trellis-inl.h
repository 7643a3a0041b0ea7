// Expands codes of a trellis (store/trellis.h) to bytes of their levels, which are then multiplied
// as other formats' words. Include after the target's simd header.
#pragma once

#include <bit>

#include "kernels/products-inl.h"
#include "store/trellis.h"

namespace torch_mesh {
namespace {

constexpr int32_t kTrellisColumns = 16;  // columns whose words are beside each other
constexpr int32_t kTrellisLine = kTrellisColumns * 4;
constexpr int32_t kTrellisAhead = 8192;  // see Prefetching, dots-inl.h

inline Words bits_of(Words bytes, uint32_t mask) {
  return bytes & broadcast_word(mask * 0x01010101);
}

// Codes of two bits, four in each byte, in pairs as look_up_bytes takes them.
struct PairsOfCodes {
  Words of[4];  // code k and the one before it, in the lowest four bits; the uppermost bit is zero

  PairsOfCodes(Words bytes, Words before) {
    of[1] = bits_of(bytes, 15);
    of[0] = shift_left<2>(of[1]) | bits_of(shift_right<6>(before), 3);
    of[2] = bits_of(shift_right<2>(bytes), 15);
    of[3] = bits_of(shift_right<4>(bytes), 15);
  }
};

// Codes of one bit, eight in each byte, in fours as look_up_bytes takes them.
struct SingleCodes {
  Words bytes, half, early;  // the codes; the first four, and these after the last three before

  SingleCodes(Words bytes, Words before)
      : bytes(bytes),
        half(bits_of(bytes, 15)),
        early(bits_of(shift_right<5>(before), 7) | shift_left<3>(half)) {}

  // Code kCode and the three before it.
  template <int kCode>
  Words four() const {
    if constexpr (kCode == 0) {
      return early;
    } else if constexpr (kCode < 3) {
      return bits_of(shift_right<kCode>(early), 15);
    } else if constexpr (kCode == 3) {
      return half;
    } else {
      return bits_of(shift_right<kCode - 3>(bytes), 15);
    }
  }
};

// A block, and where its scales and the words of its units are.
template <typename Code>
struct TrellisBlock {
  const std::byte* block;
  int32_t units;
  int32_t unit_bits;  // of a unit's index within a group
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
  // Bytes from the words of a unit's first column to those of `column`.
  int64_t to_column(int32_t column) const {
    return column / kTrellisColumns * part_bytes + column % kTrellisColumns * 4;
  }
};

// The place where reading begins, and the two units before it.
template <typename Code>
struct TrellisPlace {
  const std::byte *words, *last, *last_but_one;

  TrellisPlace(const TrellisBlock<Code>& block, int32_t unit)
      : words(block.words(unit)),
        last(block.words(unit >= 1 ? unit - 1 : block.units - 1)),
        last_but_one(block.words(unit >= 2 ? unit - 2 : unit + block.units - 2)) {}
};

// Reads the codes of kLanes columns, one unit after the other. Passes levels on two words at a
// time, take(Constant<i>, low, high): AVX2's registers do not hold all of a unit's.
template <typename Code>
struct TrellisReader;

template <>
struct TrellisReader<Tcq2> {
  Words last;
  PairsOfCodes pairs;  // of these

  TrellisReader(const TrellisPlace<Tcq2>& place, int64_t to_column)
      : last(load_words(place.last + to_column)),
        pairs(last, load_words(place.last_but_one + to_column)) {}

  static Words level(Words first, Words second) {
    return add_words(look_up_bytes(Tcq2::kFirst, first), look_up_bytes(Tcq2::kSecond, second));
  }
  template <typename Take>
  void operator()(const std::byte* words, const Take& take) {
    const Words codes = load_words(words);
    const PairsOfCodes now(codes, last);
    take(Constant<0>{}, level(now.of[0] ^ pairs.of[0], pairs.of[2]),
         level(now.of[1] ^ pairs.of[1], pairs.of[3]));
    take(Constant<1>{}, level(now.of[2] ^ pairs.of[2], now.of[0]),
         level(now.of[3] ^ pairs.of[3], now.of[1]));
    last = codes;
    pairs = now;
  }
};

template <>
struct TrellisReader<Tcq3> {
  Words last;           // upper bits
  Words last_pairs[2];  // of these, the two that the next codes still depend on
  Words last_lowest;

  TrellisReader(const TrellisPlace<Tcq3>& place, int64_t to_column)
      : last(load_words(place.last + to_column + kTrellisLine)),
        last_pairs{PairsOfCodes(last, last).of[2], PairsOfCodes(last, last).of[3]},
        last_lowest(load_words(place.last + to_column + 2 * kTrellisLine)) {}

  static Words level(Words first, Words second) {
    return add_words(look_up_bytes(Tcq3::kFirst, first), look_up_bytes(Tcq3::kSecond, second));
  }
  template <int kFirst, typename Take>
  void four_levels(Words upper, const SingleCodes& lowest, const Take& take) {
    const PairsOfCodes pairs(upper, last);
    take(Constant<kFirst / 2>{}, level(pairs.of[0], lowest.four<kFirst>() ^ last_pairs[0]),
         level(pairs.of[1], lowest.four<kFirst + 1>() ^ last_pairs[1]));
    take(Constant<kFirst / 2 + 1>{}, level(pairs.of[2], lowest.four<kFirst + 2>() ^ pairs.of[0]),
         level(pairs.of[3], lowest.four<kFirst + 3>() ^ pairs.of[1]));
    last = upper;
    last_pairs[0] = pairs.of[2];
    last_pairs[1] = pairs.of[3];
  }
  template <typename Take>
  void operator()(const std::byte* words, const Take& take) {
    const SingleCodes lowest(load_words(words + 2 * kTrellisLine), last_lowest);
    four_levels<0>(load_words(words), lowest, take);
    four_levels<4>(load_words(words + kTrellisLine), lowest, take);
    last_lowest = lowest.bytes;
  }
};

// Expands inputs [depth, depth + count) of a block, within one group and multiples of 32. Writes
// [count / 4][kBlockColumns] words of four levels.
template <typename Code>
inline void expand_trellis(const TrellisBlock<Code>& block, int32_t depth, int32_t count,
                           std::byte* levels) {
  constexpr int32_t kWords = Code::kUnitDepth / 4;
  const TrellisPlace<Code> place(block, depth / Code::kUnitDepth);
  for (int32_t c = 0; c < kBlockColumns; c += kLanes) {
    TrellisReader<Code> read(place, block.to_column(c));
    const std::byte* words = place.words + block.to_column(c);
    std::byte* to = levels + c * 4;
    for (int32_t u = 0; u < count / Code::kUnitDepth; ++u) {
      for (int32_t w = 0; w < Code::kUnitWords; ++w) {
        __builtin_prefetch(words + kTrellisAhead + w * kTrellisLine);
      }
      read(words, [to](auto pair, Words low, Words high) {
        store_words(to + pair.value * 2 * kBlockColumns * 4, low);
        store_words(to + (pair.value * 2 + 1) * kBlockColumns * 4, high);
      });
      words += Code::kUnitWords * kTrellisLine;
      to += kWords * kBlockColumns * 4;
    }
  }
}

// As IntegerGroup; its words are expanded once for all rows.
template <typename Code>
struct TrellisGroup {
  static constexpr bool kHasMins = false;

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
    expand_trellis(block, group * size, size, levels);
    words = levels;
    count = size / 8;
  }
  TrellisGroup(const TrellisGroup&) = delete;
  TrellisGroup& operator=(const TrellisGroup&) = delete;

  const std::byte* scales_of(int32_t column) const { return scales + column * 2; }
  Floats scale(int32_t column) const { return Bf16Scales::load(scales_of(column)); }
  int64_t total_bytes() const { return bytes_; }

 private:
  int64_t bytes_;
};

// Multiplies one row. Levels are multiplied in registers, where they are looked up, and do not go
// through memory.
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
      Sums sums[Dot::kChains] = {Dot::start(Dot::zeros(scales), rows.sum[0])};
      for (int i = 1; i < Dot::kChains; ++i) sums[i] = as_sums(broadcast_word(0));
      for (const auto* at = row; at < row + size / 8; at += kWords / 2) {
        for (int32_t w = 0; w < Code::kUnitWords; ++w) {
          if (c % kTrellisColumns == 0)
            __builtin_prefetch(words + kTrellisAhead + w * kTrellisLine);
        }
        read(words, [&](auto pair, Words low, Words high) {
          Sums& sum = sums[pair.value % Dot::kChains];
          sum = Dot::add(sum, at[pair.value], {low, high});
        });
        words += Code::kUnitWords * kTrellisLine;
      }
      for (int i = 1; i < Dot::kChains; ++i) sums[0] = add_sums(sums[0], sums[i]);
      add_scaled(products.sums + c, sums[0], rows.scale[0], Bf16Scales::load(scales + c * 2));
    }
  }
}

}  // namespace
}  // namespace torch_mesh
