// A target with VNNI, and without products of bf16.
#pragma once

#include "kernels/table-inl.h"
#include "kernels/vnni_dots-inl.h"

namespace torch_mesh {
namespace {

struct VnniTarget {
  using Bf16 = Prefetching<ExpandedBf16Dot>;
  using Int8 = Prefetching<VnniInt8Dot>;
  using Fp8 = Prefetching<ExpandedFp8Dot>;
  template <typename Codes>
  using Nibbles = PrefetchingVnniNibbles<Codes>;
  template <typename Codes>
  using Levels = VnniLevelDot<Codes>;
  using Tiles = NoTiles;
  static constexpr int kPlainColumns = 4;  // plain_products' of a single row
  static constexpr ManyRows kRows{.panels = 8};
};

}  // namespace
}  // namespace torch_mesh
