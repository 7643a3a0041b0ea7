// AVX2 with VNNI in its VEX form: processors of Intel without AVX512, from Alder Lake and Sierra
// Forest on.
#include "kernels/simd_avx_vnni-inl.h"
// All others are written in its terms.
#include "kernels/table-inl.h"
#include "kernels/vnni_dots-inl.h"

namespace torch_mesh {

constinit const KernelTable kAvxVnniTable =
    make_table<Prefetching<ExpandedBf16Dot>, Prefetching<VnniInt8Dot>, Prefetching<VnniInt4Dot>,
               Prefetching<VnniLut4Dot>>("avx_vnni", {4, 8, 8}, 8);

}  // namespace torch_mesh
