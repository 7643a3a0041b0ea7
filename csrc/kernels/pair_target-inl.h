// A target without VNNI.
#pragma once

#include "kernels/pair_dots-inl.h"
#include "kernels/table-inl.h"

namespace torch_mesh {
namespace {

// Prefetches is how its Dots do.
template <template <typename> typename Prefetches>
struct PairTarget {
  using Bf16 = Prefetches<ExpandedBf16Dot>;
  using Int8 = Prefetches<PairInt8Dot>;
  using Fp8 = Prefetches<ExpandedFp8Dot>;
  template <typename Codes>
  using Nibbles = Prefetches<PairNibbleDot<Codes>>;
  template <typename Codes>
  using Levels = PairLevelDot<Codes>;
  using Tiles = NoTiles;
  static constexpr int kPlainColumns = 4;  // plain_products' of a single row
  static constexpr ManyRows kRows{.panels = 8};
};

}  // namespace
}  // namespace torch_mesh
