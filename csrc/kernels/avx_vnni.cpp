// AVX2 with VNNI in its VEX form: processors of Intel without AVX512, from Alder Lake and Sierra
// Forest on.
#include "kernels/simd_avx_vnni-inl.h"
// All others are written in its terms.
#include "kernels/table-inl.h"
#include "kernels/vnni_dots-inl.h"

namespace torch_mesh {
constinit const KernelTable kAvxVnniTable =
    make_table<Prefetching<ExpandedBf16Dot>, Prefetching<VnniInt8Dot>, PrefetchingVnniNibbles,
               VnniLevelDot, Prefetching<ExpandedFp8Dot>>(
        "avx_vnni",
        {.gemm_floats = 4, .gemm_int8 = 8, .gemm_nibbles = 8, .gemm_trellis = 8, .panels = 8});

}  // namespace torch_mesh
