// AVX512 F, BW, DQ, VL, CD: Skylake servers.
#include "kernels/simd_avx512-inl.h"
// All others are written in its terms.
#include "kernels/pair_dots-inl.h"
#include "kernels/table-inl.h"

namespace torch_mesh {
constinit const KernelTable kAvx512Table =
    make_table<Prefetching<ExpandedBf16Dot>, Prefetching<PairInt8Dot>, PrefetchingPairNibbles,
               PairLevelDot, Prefetching<ExpandedFp8Dot>>(
        "avx512",
        {.gemm_floats = 4, .gemm_int8 = 4, .gemm_nibbles = 4, .gemm_trellis = 4, .panels = 8});

}  // namespace torch_mesh
