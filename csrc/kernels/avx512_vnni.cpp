// AVX512 with VNNI: Cascade Lake, Ice Lake.
#include "kernels/simd_avx512_vnni-inl.h"
// All others are written in its terms.
#include "kernels/table-inl.h"
#include "kernels/vnni_dots-inl.h"

namespace torch_mesh {
constinit const KernelTable kAvx512VnniTable =
    make_table<Prefetching<ExpandedBf16Dot>, Prefetching<VnniInt8Dot>, PrefetchingVnniNibbles,
               VnniLevelDot, Prefetching<ExpandedFp8Dot>>(
        "avx512_vnni",
        {.gemm_floats = 4, .gemm_int8 = 8, .gemm_nibbles = 8, .gemm_trellis = 8, .panels = 8});

}  // namespace torch_mesh
