// Packs one group of 64 columns into lut4: as pack_group-inl.h, with sixteen uneven levels.
#pragma once

#include <type_traits>

#include "kernels/pack_group-inl.h"

namespace torch_mesh {
namespace {

// The levels, and the thresholds between them as a search tree: four comparisons find the nearest
// level where a scan needs fifteen. Row r has 2^r thresholds.
struct Lut4Tree {
  float levels[16];
  float thresholds[4][8];

  constexpr Lut4Tree() : levels{}, thresholds{} {
    for (int code = 0; code < 16; ++code) levels[code] = kLut4Levels[code];
    for (int row = 0; row < 4; ++row) {
      const int apart = 16 >> row;
      for (int i = 0; i < 1 << row; ++i) {
        const int above = i * apart + apart / 2;
        thresholds[row][i] = 0.5f * (levels[above - 1] + levels[above]);
      }
    }
  }
};
constexpr Lut4Tree kLut4Tree;

// The same by the nearest even number, 0 to 62: between two odd ones there is at most one
// threshold, and at odd ones none. Takes half of the tree's operations where 32 entries are in
// registers.
struct Lut4Bins {
  float thresholds[32], below[32], above[32];

  constexpr Lut4Bins() : thresholds{}, below{}, above{} {
    for (int bin = 0, code = 0; bin < 32; ++bin) {
      const float next = code < 15 ? 0.5f * (kLut4Levels[code] + kLut4Levels[code + 1]) : 64.0f;
      const bool has_one = next < 2.0f * static_cast<float>(bin) + 1.0f;
      thresholds[bin] = has_one ? next : __builtin_inff();
      below[bin] = kLut4Levels[code];
      code += has_one;
      above[bin] = kLut4Levels[code];
    }
  }
};
// The codes of the levels that are nearest to `position`.
inline Words nearest_codes(Floats position) {
  Words code = broadcast_word(0);
  for (const auto& row : kLut4Tree.thresholds) {
    const Mask above = less(look_up(row, code), position);
    code = increment(add_words(code, code), above);
  }
  return code;
}

inline Floats nearest_level(const Lut4Tree& tree, Floats position) {
  return look_up(tree.levels, nearest_codes(position));
}

// A template, since not every target looks up 32 entries.
template <typename Bins>
inline Floats nearest_level(const Bins& bins, Floats position) {
  const Floats magic = broadcast(kRoundingMagic);
  const Floats half = multiply_add(position, broadcast(0.5f), magic);
  const Words bin = as_words(minimum(broadcast(kRoundingMagic + 31), maximum(magic, half)));
  const Mask above = less(look_up(bins.thresholds, bin), position);
  return select(above, look_up(bins.above, bin), look_up(bins.below, bin));
}

using Lut4Search = std::conditional_t<kLooksUp32, Lut4Bins, Lut4Tree>;
constexpr Lut4Search kLut4Search;

// The nearest scale whose lowest bits as bf16 are `choice`, which picks the zero.
inline Floats with_choice(Floats scale, uint32_t choice) {
  const Words offset = broadcast_word(choice << 16);
  const Words bits = subtract_words(as_words(scale), offset);
  const Words rounded = add_words(bits, broadcast_word(kLut4Zeros << 15));
  return as_floats(add_words(rounded & broadcast_word(~((kLut4Zeros << 16) - 1)), offset));
}

struct Lut4Fit {
  Floats scale, zero, gain;
};

inline void keep_better(Lut4Fit& best, const Lut4Fit& fit) {
  const Mask better = less(best.gain, fit.gain);
  best.scale = select(better, fit.scale, best.scale);
  best.zero = select(better, fit.zero, best.zero);
  best.gain = select(better, fit.gain, best.gain);
}

// The least-squares scale for the levels that `inverse` and the chosen zero give.
template <typename Cost>
inline Lut4Fit fit_lut4(const Columns& columns, const Cost& cost, Floats inverse, uint32_t choice) {
  const Floats zero = broadcast(static_cast<float>(lut4_zero(choice)));
  Floats xq = broadcast(0.0f), qq = broadcast(0.0f);
  for (int32_t k = 0; k < columns.depth; ++k) {
    const Floats x = columns.row(k);
    const Floats q = nearest_level(kLut4Search, multiply_add(x, inverse, zero)) - zero;
    const Floats costly = cost(k, q);
    xq = multiply_add(x, costly, xq);
    qq = multiply_add(q, costly, qq);
  }
  const Floats scale = with_choice(xq / qq, choice);
  return {scale, zero, scale * (xq + xq - scale * qq)};
}

// Packing tries both directions of the levels, each zero, and these fractions of the scale that
// just reaches the group's ends. More fractions, or repeating the fit, gain less than 0.5 %.
constexpr float kLut4Shares[] = {0.78f, 0.85f, 0.92f, 0.99f};

template <typename Cost = Flat>
inline Lut4Fit best_lut4(const Columns& columns, const Cost& cost = {}) {
  Floats low = columns.amax, high = broadcast(0.0f) - low;
  for (int32_t k = 0; k < columns.depth; ++k) {
    high = maximum(high, columns.row(k));
    low = minimum(low, columns.row(k));
  }
  Lut4Fit best{columns.amax, broadcast(static_cast<float>(lut4_zero(0))), broadcast(-1.0f)};
  for (const float sign : {1.0f, -1.0f}) {
    const Floats up = broadcast(sign) * (sign > 0 ? high : low);
    const Floats down = broadcast(-sign) * (sign > 0 ? low : high);
    for (uint32_t choice = 0; choice < kLut4Zeros; ++choice) {
      const auto zero = static_cast<float>(lut4_zero(choice));
      const Floats reaching =
          maximum(up * broadcast(1 / (kLut4Levels[15] - zero)), down * broadcast(1 / zero));
      const Floats inverse = broadcast(sign) / reaching;
      for (const float share : kLut4Shares) {
        keep_better(best, fit_lut4(columns, cost, inverse * broadcast(1 / share), choice));
      }
    }
  }
  return best;
}

// Replaces the values by their codes.
inline void quantize_lut4(Columns& columns, const Lut4Fit& fit) {
  const Floats inverse = broadcast(1.0f) / fit.scale;
  for (int32_t k = 0; k < columns.depth; ++k) {
    const Floats position = multiply_add(columns.row(k), inverse, fit.zero);
    store(columns.values + k * kLanes, words_to_floats(nearest_codes(position)));
  }
}

inline void pack_lut4_group(const float* panel, int32_t depth, std::byte* group) {
  for (int32_t c = 0; c < kBlockColumns; c += kLanes) {
    Columns columns(panel + c, depth);
    const Lut4Fit fit = best_lut4(columns);
    quantize_lut4(columns, fit);
    store_scale(group, c, columns, fit.scale);
    store_nibbles(group, c, columns, 0);
  }
}

}  // namespace
}  // namespace torch_mesh
