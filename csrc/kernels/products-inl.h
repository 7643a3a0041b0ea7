// Rows times one block, the same algorithm on every target. A target's
// simd header says how much it sums in registers; its translation unit brings a Dot for each
// format:
//
//   Sum      its accumulator, one per column: Floats for bf16, Words for the integers
//   Weights  one word of kLanes columns, unfolded into operands
//   Row      the activations that meet this word, broadcast to all columns
//   kRowWords  how many 32-bit words of activations that is
//   add(sum, row, weights)
//   zeros(scales)   which operand stands for a weight of zero, per column (integers)
//   correct(sum, zeros, row_sum)   takes out what these have added
#pragma once

#include "kernels/dots-inl.h"
#include "kernels/kernel_table.h"
#include "kernels/rounding-inl.h"

namespace torch_mesh {
namespace {

template <int kValue>
struct Constant {
  static constexpr int value = kValue;
};

constexpr int32_t kLineColumns = 16;  // words in a cache line

constexpr int32_t vectors_at_once(const TileShape& tile, int32_t rows) {
  const int32_t all = kBlockColumns / kLanes;
  const int32_t room = rows == 1 ? tile.single_row_vectors : tile.vectors;
  return all < room ? all : room;
}

// A Dot that asks for the weights ahead of their use. The prefetchers of Intel's cores stop at the
// end of a 4 KiB page, and one row's products are too short to hide the reads that follow.
template <typename Dot>
struct Prefetching : Dot {
  static constexpr int32_t kPrefetchBytes = 4096;
};

template <typename Dot>
inline void prefetch_ahead(const std::byte* words) {
  if constexpr (requires { Dot::kPrefetchBytes; }) {
    __builtin_prefetch(words + Dot::kPrefetchBytes);
  }
}

template <typename Dot, int kRows, int kVectors>
inline void add_words_of_block(const std::byte* words, int32_t count, const std::byte* const* rows,
                               typename Dot::Sum (&sums)[kRows][kVectors]) {
  for (int32_t j = 0; j < count; ++j) {
    typename Dot::Row row[kRows];
    for (int r = 0; r < kRows; ++r) row[r] = Dot::row(rows[r] + j * Dot::kRowWords * 4);
    for (int v = 0; v < kVectors; ++v) {
      const std::byte* at = words + (j * kBlockColumns + v * kLanes) * 4;
      if (v * kLanes % kLineColumns == 0) prefetch_ahead<Dot>(at);
      const auto weights = Dot::weights(at);
      for (int r = 0; r < kRows; ++r) sums[r][v] = Dot::add(sums[r][v], row[r], weights);
    }
  }
}

// One group of each row's activations.
struct GroupRows {
  const std::byte* bytes[kTileRows];
  float scale[kTileRows];
  int32_t sum[kTileRows];
};

inline const std::byte* operand_row(const BlockProducts& products, int32_t r) {
  const OperandRows& rows = products.rows;
  const int64_t index = rows.index == nullptr ? r : rows.index[r];
  return rows.data + index * products.shape.row_bytes;
}

inline GroupRows group_rows(const BlockProducts& products, int32_t group) {
  GroupRows rows;
  const OperandShape& shape = products.shape;
  const int32_t groups = shape.depth_padded / shape.group_size;
  for (int32_t r = 0; r < products.rows.count; ++r) {
    const std::byte* row = operand_row(products, r);
    rows.bytes[r] = row + group * shape.group_size;
    const std::byte* scale = row + shape.depth_padded + group * 4;
    __builtin_memcpy(&rows.scale[r], scale, 4);
    __builtin_memcpy(&rows.sum[r], scale + groups * 4, 4);
  }
  return rows;
}

// The parts of one group of an integer block.
template <typename Dot>
struct IntegerGroup {
  static constexpr int32_t kWeightsPerWord = Dot::kRowWords * 4;

  const std::byte* scales;  // bf16
  const std::byte* words;
  int32_t count;  // of words per column

  IntegerGroup(const BlockProducts& products, int32_t group) {
    const int32_t size = products.shape.group_size;
    count = size / kWeightsPerWord;
    scales = products.block + static_cast<int64_t>(group) * kBlockColumns * (2 + count * 4);
    words = scales + kBlockColumns * 2;
  }
};

inline void add_scaled(float* sums, Words exact, float row_scale, const std::byte* scales) {
  const Floats scale = broadcast(row_scale) * load_bf16(scales);
  store(sums, multiply_add(words_to_floats(exact), scale, load(sums)));
}

template <typename Dot, int kRows>
inline void integer_tile(const IntegerGroup<Dot>& group, const GroupRows& rows, int32_t first,
                         float* sums) {
  constexpr int kVectors = vectors_at_once(kTile, kRows);
  for (int32_t c = 0; c < kBlockColumns; c += kVectors * kLanes) {
    Words exact[kRows][kVectors];
    for (auto& row : exact) {
      for (Words& sum : row) sum = broadcast_word(0);
    }
    add_words_of_block<Dot>(group.words + c * 4, group.count, rows.bytes + first, exact);
    for (int v = 0; v < kVectors; ++v) {
      const int32_t column = c + v * kLanes;
      const Words zeros = Dot::zeros(group.scales + column * 2);
      for (int r = 0; r < kRows; ++r) {
        const Words corrected = Dot::correct(exact[r][v], zeros, rows.sum[first + r]);
        add_scaled(sums + (first + r) * kBlockColumns + column, corrected, rows.scale[first + r],
                   group.scales + column * 2);
      }
    }
  }
}

// Runs tile(rows at once, first row) over all rows, as many at once as the registers hold.
template <int kMost, typename Tile>
inline void for_each_tile(int32_t rows, const Tile& tile, int32_t first = 0) {
  for (; first + kMost <= rows; first += kMost) tile(Constant<kMost>{}, first);
  if constexpr (kMost > 1) {
    if (first < rows) for_each_tile<kMost - 1>(rows, tile, first);
  }
}

template <typename Dot>
inline void integer_products(const BlockProducts& products) {
  const int32_t groups = products.shape.depth_padded / products.shape.group_size;
  for (int32_t g = 0; g < groups; ++g) {
    const IntegerGroup<Dot> group(products, g);
    const GroupRows rows = group_rows(products, g);
    for_each_tile<kTile.rows>(products.rows.count, [&](auto at_once, int32_t first) {
      integer_tile<Dot, at_once.value>(group, rows, first, products.sums);
    });
  }
}

// bf16 has no groups of its own. 32 words are 8 KiB of the block: they stay in L1 while the tiles
// go over them.
constexpr int32_t kBf16Words = 32;

template <typename Dot, int kRows>
inline void bf16_tile(const std::byte* words, const std::byte* const* rows, float* sums) {
  constexpr int kVectors = vectors_at_once(kTile, kRows);
  for (int32_t c = 0; c < kBlockColumns; c += kVectors * kLanes) {
    Floats tile[kRows][kVectors];
    for (int r = 0; r < kRows; ++r) {
      for (int v = 0; v < kVectors; ++v)
        tile[r][v] = load(sums + r * kBlockColumns + c + v * kLanes);
    }
    add_words_of_block<Dot>(words + c * 4, kBf16Words, rows, tile);
    for (int r = 0; r < kRows; ++r) {
      for (int v = 0; v < kVectors; ++v)
        store(sums + r * kBlockColumns + c + v * kLanes, tile[r][v]);
    }
  }
}

template <typename Dot>
inline void bf16_products(const BlockProducts& products) {
  for (int32_t word = 0; word < products.shape.depth_padded / 2; word += kBf16Words) {
    const std::byte* rows[kTileRows];
    for (int32_t r = 0; r < products.rows.count; ++r) rows[r] = operand_row(products, r) + word * 4;
    const std::byte* words = products.block + static_cast<int64_t>(word) * kBlockColumns * 4;
    for_each_tile<kTile.rows>(products.rows.count, [&](auto at_once, int32_t first) {
      bf16_tile<Dot, at_once.value>(words, rows + first, products.sums + first * kBlockColumns);
    });
  }
}

}  // namespace
}  // namespace torch_mesh
