// AVX512 with VNNI: Cascade Lake, Ice Lake.
#include "kernels/simd_avx512_vnni-inl.h"
// All others are written in its terms.
#include "kernels/table-inl.h"
#include "kernels/vnni_dots-inl.h"

namespace torch_mesh {

constinit const KernelTable kAvx512VnniTable =
    make_table<Prefetching<ExpandedBf16Dot>, Prefetching<VnniInt8Dot>, Prefetching<VnniInt4Dot>,
               Prefetching<VnniLut4Dot>>("avx512_vnni", {4, 8, 8}, 8);

}  // namespace torch_mesh
