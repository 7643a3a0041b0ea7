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

// On Zen 4 gemm is never the faster way for integers (docs/decisions/0027).
constexpr ManyRows kManyRowsOfAmd{.gemm_floats = 16,
                                  .gemm_int8 = kNoRows,
                                  .gemm_nibbles = kNoRows,
                                  .gemm_trellis = kNoRows,
                                  .panels = 8,
                                  .bf16_panels = false,
                                  .gemm_fp8 = 8};

}  // namespace

constinit const KernelTable kAvx512Bf16Table =
    make_table<NativeBf16Dot, VnniInt8Dot, VnniNibbleDot, VnniLevelDot, Fp8Dot<E4m3AsFloats>>(
        "avx512_bf16", kManyRowsOfAmd);

constinit const KernelTable kIntelBf16Table =
    make_table<Prefetching<NativeBf16Dot>, Prefetching<VnniInt8Dot>, PrefetchingVnniNibbles,
               VnniLevelDot, Prefetching<ExpandedFp8Dot>>("avx512_bf16", kManyRows);

}  // namespace torch_mesh
