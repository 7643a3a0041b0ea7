// AVX512 with VNNI, BF16 and AMX: Sapphire Rapids and later.
#include "kernels/simd_avx512_vnni-inl.h"
// All others are written in its terms.
#include "kernels/bf16_dot-inl.h"
#include "kernels/table-inl.h"
#include "kernels/tile_products-inl.h"
#include "kernels/vnni_dots-inl.h"

namespace torch_mesh {
namespace {

template <typename Levels, typename Scales>
constexpr auto kNibbleCodes =
    tile_integers<VnniLevelDot<Levels>, Scales, UnfoldedGroup<VnniNibbleDot<Levels>, Scales>>;
template <typename Scales>
constexpr auto kByteCodes = tile_integers<VnniInt8Dot, Scales, IntegerGroup<VnniInt8Dot, Scales>>;
template <typename Code>
constexpr auto kTrellisCodes =
    tile_integers<VnniLevelDot<TrellisLevels>, Bf16Scales, TrellisGroup<Code>>;

template <Format kFormat>
constexpr auto kGgufCodes =
    tile_integers<GgufDot<VnniInt8Dot, VnniLevelDot, kFormat>, HalfScales, GgufGroup<kFormat>>;

// With those of trellises and of GGUF's types.
constexpr KernelTable with_tiles(KernelTable table) {
  auto& products = table.tiles.products;
  products[static_cast<size_t>(Format::kTcq2)] = kTrellisCodes<Tcq2>;
  products[static_cast<size_t>(Format::kTcq3)] = kTrellisCodes<Tcq3>;
  for_gguf(products, [](auto type) { return kGgufCodes<static_cast<Format>(type.value)>; });
  return table;
}

}  // namespace

constinit const KernelTable kAmxTable =
    with_tiles(make_table<Prefetching<NativeBf16Dot>, Prefetching<VnniInt8Dot>,
                          PrefetchingVnniNibbles, VnniLevelDot, Prefetching<ExpandedFp8Dot>>(
        "amx",
        {.gemm_floats = 4,
         .gemm_int8 = 12,
         .gemm_nibbles = 6,
         .gemm_trellis = 4,
         .panels = 8,
         .bf16_panels = false},
        {begin_tiles,
         end_tiles,
         {tile_bf16, kByteCodes<Bf16Scales>, kNibbleCodes<EvenNibbles, Bf16Scales>,
          kNibbleCodes<Lut4Nibbles, Bf16Scales>, kByteCodes<HalfScales>,
          kNibbleCodes<EvenNibbles, HalfScales>, kNibbleCodes<Fp4Nibbles, E8m0Scales>,
          kNibbleCodes<Fp4Nibbles, E4m3Scales>, tile_fp8}}));

}  // namespace torch_mesh
