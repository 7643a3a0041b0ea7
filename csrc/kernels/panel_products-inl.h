// Multiplies many rows with bf16, bf12 and fp8, on all tables but the scalar one and AMD's with
// AVX512-BF16. A step of a block is expanded to fp32 once, into a panel that stays in L1, and
// multiplied with all rows. Adds in the order of products-inl.h and so gives the same bits.
#pragma once

#include "kernels/products-inl.h"

namespace torch_mesh {
namespace {

constexpr int kPanelUnroll = 4;
static_assert(kStepDepth == kSquare);  // rows of both go to add_panel_rows

struct Panel {
  int32_t depth;
  alignas(64) float weights[kStepDepth][kBlockColumns];  // 16 KiB
  alignas(64) float rows[kTileRows][kStepDepth];
};

// Expands words to weights[depth][kBlockColumns].
template <typename Dot>
inline void expand(const std::byte* words, float weight_unit, int32_t depth, float* weights_of) {
  const Floats unit = broadcast(weight_unit);
  constexpr int kAtOnce = vectors_expanded<Dot>();
  for (int32_t k = 0; k < depth; k += 2) {
    float* to = weights_of + k * kBlockColumns;
    for (int32_t c = 0; c < kBlockColumns; c += kAtOnce * kLanes) {
      typename Dot::Weights weights[kAtOnce];
      expand_weights<Dot>(words + (k / 2 * kBlockColumns + c) * column_bytes<Dot>(), weights);
      if constexpr (kAtOnce == 2) {
        Dot::Expanding::put_in_order(weights[0].low, weights[1].low);
        Dot::Expanding::put_in_order(weights[0].high, weights[1].high);
      }
      for (int v = 0; v < kAtOnce; ++v) {
        store(to + c + v * kLanes, weights[v].low * unit);
        store(to + kBlockColumns + c + v * kLanes, weights[v].high * unit);
      }
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
      const Floats value = broadcast(rows[r * kStepDepth + step]);
      for (int v = 0; v < kVectors; ++v) sums[r][v] = multiply_add(value, weight[v], sums[r][v]);
    }
  }
}

// Tiles prefetch what follows the panel's words, a cache line for each k-value. The products hide
// the reads. Otherwise these would wait at every page: the processor's own prefetchers stop at its
// end.
struct NextPanels {
  struct Share {
    const std::byte* from;

    template <int kPasses>
    void ask(int32_t k, int pass) const {
      for (int line = pass; line < kPanelUnroll; line += kPasses) {
        __builtin_prefetch(from + (k + line) * kLineBytes);
      }
    }
  };
  const std::byte* from;

  Share share(int32_t first, int32_t, int32_t) const {
    return {from + int64_t{first / kPanelTile.rows} * kStepDepth * kLineBytes};
  }
};

// Tiles share the lines of the next tile of bf12.
struct NextBf12 : LinesAhead {
  struct Share : LinesAhead::Share {
    template <int kPasses>
    void ask(int32_t, int) {
      for (int i = 0; i < kPanelUnroll / kPasses; i += 2) LinesAhead::Share::ask();
    }
  };

  Share share(int32_t first, int32_t rows, int32_t of) const {
    return {LinesAhead::share(first, rows, of)};
  }
};

template <int kRows, typename Step, typename Share>
inline void panel_tile(const Panel& panel, const Step& step, int32_t first, Share&& ahead,
                       float* sums) {
  constexpr int kVectors = vectors_at_once(kPanelTile, kRows);
  constexpr int kPasses = kBlockColumns / (kVectors * kLanes);
  for (int pass = 0; pass < kPasses; ++pass) {
    const int32_t c = pass * kVectors * kLanes;
    Floats tile[kRows][kVectors];
    for (int r = 0; r < kRows; ++r) {
      float* from = sums + (first + r) * kBlockColumns + c;
      for (int v = 0; v < kVectors; ++v) tile[r][v] = step.begin(from + v * kLanes);
    }
    for (int32_t k = 0; k < panel.depth; k += kPanelUnroll) {
      ahead.template ask<kPasses>(k, pass);
      add_panel_rows<kPanelUnroll>(panel.weights[k] + c, panel.rows[first] + k, tile);
    }
    for (int v = 0; v < kVectors; ++v) {
      const int32_t column = c + v * kLanes;
      const auto scales = step.scales_of(column);
      for (int r = 0; r < kRows; ++r) {
        step.end(sums + (first + r) * kBlockColumns + column, tile[r][v], scales);
      }
    }
  }
}

// Multiplies all rows with the panel's weights.
template <typename Step, typename Ahead>
inline void multiply_panel(const BlockProducts& products, int32_t depth, const Step& step,
                           const Ahead& ahead, Panel& panel) {
  const int32_t count = products.rows.count;
  for (int32_t r = 0; r < count; ++r) {
    const std::byte* row = operand_row(products, r) + int64_t{depth} * 2;
    for (int32_t k = 0; k < panel.depth; k += kLanes) {
      store(panel.rows[r] + k, load_bf16(row + k * 2));
    }
  }
  for_each_tile<kPanelTile.rows>(count, [&](auto at_once, int32_t first) {
    panel_tile<at_once.value>(panel, step, first, ahead.share(first, at_once.value, count),
                              products.sums);
  });
}

template <typename Dot, typename Step>
inline void panel_step(const BlockProducts& products, int32_t depth, const std::byte* words,
                       float unit, const Step& step, Panel& panel) {
  const std::byte* end = words + int64_t{panel.depth / 2} * kBlockColumns * column_bytes<Dot>();
  expand<Dot>(words, unit, panel.depth, panel.weights[0]);
  multiply_panel(products, depth, step, NextPanels{end}, panel);
}

inline void bf16_panels(const BlockProducts& products) {
  Panel panel;
  panel.depth = kStepDepth;
  for (int32_t depth = 0; depth < products.shape.depth_padded; depth += panel.depth) {
    const std::byte* words = products.block + int64_t{depth} * kBlockColumns * 2;
    panel_step<ExpandedBf16Dot>(products, depth, words, 1, Unscaled{}, panel);
  }
}

inline void fp8_panels(const BlockProducts& products) {
  const std::byte* pairs = fp8_pairs(products);
  const uint32_t before = E4m3::count_subnormals();
  Panel panel;
  panel.depth = fp8_step_depth(products.shape.group_size);
  for (int32_t depth = 0; depth < products.shape.depth_padded; depth += panel.depth) {
    panel_step<ExpandedFp8Dot>(products, depth, pairs + int64_t{depth} * kBlockColumns, E4m3::kUnit,
                               Fp8Step(products.block, products.shape.group_size, depth, 1), panel);
  }
  E4m3::restore_subnormals(before);
}

}  // namespace
}  // namespace torch_mesh
