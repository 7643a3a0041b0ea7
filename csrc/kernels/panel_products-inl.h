// Many rows of bf16 without AVX512-BF16: a stretch of a block is unfolded to fp32 once, into a
// panel that stays in L1, and multiplied with all rows. Adds in the order of products-inl.h and so
// gives the same bits.
#pragma once

#include "kernels/products-inl.h"

namespace torch_mesh {
namespace {

constexpr int32_t kPanelDepth = 64;  // 16 KiB of weights
constexpr int kPanelSteps = 4;       // unrolled

struct Panel {
  const std::byte* next;  // the words of the next panel
  alignas(64) float weights[kPanelDepth][kBlockColumns];
  alignas(64) float rows[kTileRows][kPanelDepth];
};

inline void unfold_bf16(const std::byte* words, Panel& panel) {
  for (int32_t k = 0; k < kPanelDepth; k += 2) {
    for (int32_t c = 0; c < kBlockColumns; c += kLanes) {
      const auto pair = ExpandedBf16Dot::weights(words + (k / 2 * kBlockColumns + c) * 4);
      store(panel.weights[k] + c, pair.low);
      store(panel.weights[k + 1] + c, pair.high);
    }
  }
}

// One k-value after the other: sums[row] += value of the row * weights, kSteps times.
template <int kSteps, int kRows, int kVectors>
inline void add_panel_rows(const float* weights, const float* rows,
                           Floats (&sums)[kRows][kVectors]) {
  for (int step = 0; step < kSteps; ++step) {
    Floats weight[kVectors];
    for (int v = 0; v < kVectors; ++v)
      weight[v] = load(weights + step * kBlockColumns + v * kLanes);
    for (int r = 0; r < kRows; ++r) {
      const Floats value = broadcast(rows[r * kPanelDepth + step]);
      for (int v = 0; v < kVectors; ++v) sums[r][v] = multiply_add(value, weight[v], sums[r][v]);
    }
  }
}

template <int kRows>
inline void panel_tile(const Panel& panel, int32_t first, float* sums) {
  constexpr int kVectors = vectors_at_once(kPanelTile, kRows);
  constexpr int kPasses = kBlockColumns / (kVectors * kLanes);
  // The products hide the reads of the next panel, one cache line a step, which would wait at every
  // page otherwise: the processor's own prefetchers do not look beyond it.
  const std::byte* next = panel.next + int64_t{first / kPanelTile.rows} * kPanelDepth * 64;
  for (int pass = 0; pass < kPasses; ++pass) {
    const int32_t c = pass * kVectors * kLanes;
    Floats tile[kRows][kVectors];
    for (int r = 0; r < kRows; ++r) {
      float* from = sums + (first + r) * kBlockColumns + c;
      for (int v = 0; v < kVectors; ++v) tile[r][v] = load(from + v * kLanes);
    }
    for (int32_t k = 0; k < kPanelDepth; k += kPanelSteps) {
      for (int line = pass; line < kPanelSteps; line += kPasses) {
        __builtin_prefetch(next + (k + line) * 64);
      }
      add_panel_rows<kPanelSteps>(panel.weights[k] + c, panel.rows[first] + k, tile);
    }
    for (int r = 0; r < kRows; ++r) {
      float* to = sums + (first + r) * kBlockColumns + c;
      for (int v = 0; v < kVectors; ++v) store(to + v * kLanes, tile[r][v]);
    }
  }
}

inline void bf16_panels(const BlockProducts& products) {
  Panel panel;
  for (int32_t begin = 0; begin < products.shape.depth_padded; begin += kPanelDepth) {
    const std::byte* words = products.block + int64_t{begin} * kBlockColumns * 2;
    panel.next = words + int64_t{kPanelDepth} * kBlockColumns * 2;
    unfold_bf16(words, panel);
    for (int32_t r = 0; r < products.rows.count; ++r) {
      const std::byte* row = operand_row(products, r) + int64_t{begin} * 2;
      for (int32_t k = 0; k < kPanelDepth; k += kLanes) {
        store(panel.rows[r] + k, load_bf16(row + k * 2));
      }
    }
    for_each_tile<kPanelTile.rows>(products.rows.count, [&](auto at_once, int32_t first) {
      panel_tile<at_once.value>(panel, first, products.sums);
    });
  }
}

}  // namespace
}  // namespace torch_mesh
