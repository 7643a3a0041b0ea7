// AVX512 with VNNI, BF16 and AMX: Sapphire Rapids and later.
#include "kernels/simd_avx512_vnni-inl.h"
// The headers below are written in its terms.
#include "kernels/tile_products-inl.h"
#include "kernels/vnni_target-inl.h"

namespace torch_mesh {
namespace {

struct AmxTiles {
  static constexpr auto begin = begin_tiles;
  static constexpr auto end = end_tiles;
  static constexpr Product bf16 = tile_bf16;
  static constexpr Product bf12 = tile_bf12;
  static constexpr Product fp8 = tile_fp8;
  template <typename Scales>
  static constexpr Product bytes =
      tile_integers<VnniInt8Dot, Scales, IntegerGroup<VnniInt8Dot, Scales>>;
  template <typename Codes, typename Scales>
  static constexpr Product nibbles =
      tile_integers<VnniLevelDot<Codes>, Scales, ExpandedGroup<VnniNibbleDot<Codes>, Scales>>;
  template <typename Code>
  static constexpr Product trellis =
      tile_integers<VnniLevelDot<TrellisLevels>, Bf16Scales, TrellisGroup<Code>>;
  template <Format kFormat>
  static constexpr Product gguf = tile_gguf<kFormat>;
};

struct Amx : VnniTarget {
  using Tiles = AmxTiles;
  static constexpr ManyRows kRows{
      .tile_floats = 4, .tile_int8 = 12, .tile_nibbles = 6, .tile_trellis = 4, .panels = 8};
};

}  // namespace

constinit const KernelTable kAmxTable = make_table<Amx>("amx");

}  // namespace torch_mesh
