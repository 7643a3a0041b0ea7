// AVX512 with VNNI and BF16: Cooper Lake, Sapphire Rapids, Zen 4.
#include "kernels/simd_avx512_vnni-inl.h"
// All others are written in its terms.
#include "kernels/bf16_dot-inl.h"
#include "kernels/table-inl.h"
#include "kernels/vnni_dots-inl.h"

namespace torch_mesh {
namespace {

constexpr ManyRows kManyRows{.gemm_floats = 8,
                             .gemm_int8 = 8,
                             .gemm_nibbles = 8,
                             .gemm_trellis = 8,
                             .panels = 8,
                             .bf16_panels = false};

// On Zen 4 neither gemm nor panels are ever the faster way (docs/decisions/0027). From gemm_fp8
// rows on fp8 is multiplied as bf16.
constexpr ManyRows kManyRowsOfAmd{.gemm_floats = kNoRows,
                                  .gemm_int8 = kNoRows,
                                  .gemm_nibbles = kNoRows,
                                  .gemm_trellis = kNoRows,
                                  .panels = 0,
                                  .gemm_fp8 = 6};

constexpr KernelTable::Tiles kFp8AsBf16 = [] {
  KernelTable::Tiles tiles;
  tiles.products[static_cast<int>(Format::kFp8)] = many_rows_of_fp8<NativeBf16Dot>;
  return tiles;
}();

}  // namespace

constinit const KernelTable kAvx512Bf16Table =
    make_table<PrefetchingGroups<NativeBf16Dot>, PrefetchingGroups<VnniInt8Dot>,
               GroupPrefetchingVnniNibbles, VnniLevelDot, Fp8Dot<E4m3AsFloats>>(
        "avx512_bf16", kManyRowsOfAmd, kFp8AsBf16);

constinit const KernelTable kIntelBf16Table =
    make_table<Prefetching<NativeBf16Dot>, Prefetching<VnniInt8Dot>, PrefetchingVnniNibbles,
               VnniLevelDot, Prefetching<ExpandedFp8Dot>>("avx512_bf16", kManyRows);

}  // namespace torch_mesh
