// Products with bf12 (store/bf12.h). A tile becomes words of bf16, in registers for one row and in
// the first-level cache for several. bf16's own products take these, so sums have the same bits.
#pragma once

#include "kernels/panel_products-inl.h"
#include "store/bf12.h"

namespace torch_mesh {
namespace {

using Bf12 = Bf12Block<const std::byte>;

inline Bf12 bf12_block(const std::byte* block, int32_t depth_padded) {
  return {block, depth_padded / kBf12Depth};
}

// Expands a tile to words of bf16.
inline void expand_bf12_tile(const Bf12& block, int32_t tile, std::byte* words) {
  const Bf12Words rows(block.table(tile));
  const std::byte* row = block.tile(tile);
  for (int32_t j = 0; j < kBf12Rows; ++j, row += kBf12RowBytes) {
    std::byte* to = words + j * kBlockColumns * 4;
    rows.read(row, [&](int v, Words own) { store_words(to + v * kLanes * 4, own); });
  }
  const uint32_t last = block.last_of(tile);
  for (uint32_t i = block.first_of(tile); i < last; ++i) {
    const uint32_t exception = Bf12::word(block.exception(i));
    words[Bf12::place_of(exception)] = static_cast<std::byte>(exception);
  }
}

// Expands a tile to weights[kBf12Depth][kBlockColumns].
inline void dequantize_bf12_tile(const Bf12& block, int32_t tile, float* weights) {
  const Bf12Words rows(block.table(tile));
  const std::byte* row = block.tile(tile);
  for (int32_t j = 0; j < kBf12Rows; ++j, row += kBf12RowBytes) {
    float* to = weights + 2 * j * kBlockColumns;
    rows.read(row, [&](int v, Words own) {
      const auto values = ExpandedBf16Dot::expand(own);
      store(to + v * kLanes, values.low);
      store(to + kBlockColumns + v * kLanes, values.high);
    });
  }
  const uint32_t last = block.last_of(tile);
  for (uint32_t i = block.first_of(tile); i < last; ++i) {
    const uint32_t exception = Bf12::word(block.exception(i));
    const uint32_t place = Bf12::place_of(exception), word = place / 4;
    const uint32_t k = word / kBlockColumns * 2 + place % 4 / 2;
    auto* weight = reinterpret_cast<std::byte*>(weights + k * kBlockColumns + word % kBlockColumns);
    weight[3] = static_cast<std::byte>(exception);
  }
}

using Bf12Sums = Floats[kBlockColumns / kLanes];

// Multiplies one row with tiles without exceptions, one of each block. Weights do not go through
// memory.
template <typename Dot, int kBlocks, typename Ahead>
inline void add_bf12_tiles(const Bf12* blocks, int32_t tile, const std::byte* values, Ahead& ahead,
                           Bf12Sums* sums) {
  Bf12Words rows[kBlocks];
  for (int b = 0; b < kBlocks; ++b) rows[b] = Bf12Words(blocks[b].table(tile));
  for (int32_t j = 0; j < kBf12Rows; ++j) {
    const typename Dot::Row pair = Dot::row(values + j * 4);
    ahead.ask();
#pragma GCC unroll 2
    for (int b = 0; b < kBlocks; ++b) {
      const std::byte* row = blocks[b].tile(tile) + j * kBf12RowBytes;
      for (int32_t line = 0; line < kBf12RowBytes; line += kLineBytes) {
        prefetch_ahead<Dot>(row + line);
      }
      rows[b].read(row, [&](int v, Words own) {
        sums[b][v] = Dot::add(sums[b][v], pair, Dot::expand(own));
      });
    }
  }
}

// The same for a tile with exceptions.
template <typename Dot, typename Ahead>
inline void add_mended_bf12_tile(const Bf12& block, int32_t tile, const std::byte* values,
                                 Ahead& ahead, Bf12Sums& sums) {
  constexpr int32_t kVectors = kBlockColumns / kLanes;
  alignas(64) std::byte words[kBf12WordsBytes];
  for (int32_t line = 0; line < kBf12TileBytes; line += kLineBytes) {
    prefetch_ahead<Dot>(block.tile(tile) + line);
  }
  expand_bf12_tile(block, tile, words);
  for (int32_t j = 0; j < kBf12Rows; ++j) {
    const typename Dot::Row pair = Dot::row(values + j * 4);
    ahead.ask();
    for (int v = 0; v < kVectors; ++v) {
      sums[v] = Dot::add(sums[v], pair, Dot::weights(words + (j * kVectors + v) * kLanes * 4));
    }
  }
}

// Multiplies one row with one block or with two. Dot is for one; DotAtOnce prefetches less far
// ahead if there are two. `ahead` prefetches as well (StreamsAhead, NothingAhead::Share).
template <typename Dot, typename DotAtOnce, int kBlocks, typename Ahead>
inline void bf12_row(const BlockProducts* const (&products)[kBlocks], Ahead ahead) {
  constexpr int32_t kVectors = kBlockColumns / kLanes;
  const std::byte* row = operand_row(*products[0], 0);
  Bf12 blocks[kBlocks];
  Bf12Sums sums[kBlocks];
  for (int b = 0; b < kBlocks; ++b) {
    blocks[b] = bf12_block(products[b]->block, products[b]->shape.depth_padded);
    for (int v = 0; v < kVectors; ++v) sums[b][v] = broadcast(0.0f);
  }
  for (int32_t tile = 0; tile < blocks[0].tiles; ++tile, row += kBf12Depth * 2) {
    bool mended[kBlocks], any = false;
    for (int b = 0; b < kBlocks; ++b) {
      mended[b] = blocks[b].first_of(tile) != blocks[b].last_of(tile);
      any |= mended[b];
    }
    if (!any) {
      add_bf12_tiles<DotAtOnce, kBlocks>(blocks, tile, row, ahead, sums);
      continue;
    }
#pragma GCC unroll 2
    for (int b = 0; b < kBlocks; ++b) {
      if (mended[b]) {
        add_mended_bf12_tile<Dot>(blocks[b], tile, row, ahead, sums[b]);
      } else {
        add_bf12_tiles<Dot, 1>(blocks + b, tile, row, ahead, sums + b);
      }
    }
  }
  for (int b = 0; b < kBlocks; ++b) {
    for (int v = 0; v < kVectors; ++v) store(products[b]->sums + v * kLanes, sums[b][v]);
  }
}

// Multiplies several rows. Products read the first-level cache, and prefetch the next tile
// meanwhile.
template <typename Dot>
inline void bf12_products(const BlockProducts& products) {
  const Bf12 block = bf12_block(products.block, products.shape.depth_padded);
  alignas(64) std::byte words[kBf12WordsBytes];
  for (int32_t tile = 0; tile < block.tiles; ++tile) {
    expand_bf12_tile(block, tile, words);
    float_step<typename WithoutPrefetching<Dot>::Type>(
        products, tile * kBf12Depth, Constant<kBf12Rows>{}, words, Unscaled{},
        LinesAhead{block.tile(tile + 1), kBf12TileBytes});
  }
}

inline void bf12_panels(const BlockProducts& products) {
  const Bf12 block = bf12_block(products.block, products.shape.depth_padded);
  Panel panel;
  panel.depth = kBf12Depth;
  for (int32_t tile = 0; tile < block.tiles; ++tile) {
    dequantize_bf12_tile(block, tile, panel.weights[0]);
    multiply_panel(products, tile * kBf12Depth, Unscaled{},
                   NextBf12{{block.tile(tile + 1), kBf12TileBytes}}, panel);
  }
}

inline void dequantize_bf12(const SquareOfBlock& from, float* square) {
  static_assert(kSquare == kBf12Depth);
  dequantize_bf12_tile(bf12_block(from.block, from.depth_padded), from.depth / kBf12Depth, square);
}

}  // namespace
}  // namespace torch_mesh
