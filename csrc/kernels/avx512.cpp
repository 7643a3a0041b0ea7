// AVX512 F, BW, DQ, VL, CD: Skylake servers.
#include "kernels/simd_avx512-inl.h"
// All others are written in its terms.
#include "kernels/pair_dots-inl.h"
#include "kernels/table-inl.h"

namespace torch_mesh {

constinit const KernelTable kAvx512Table =
    make_table<Prefetching<ExpandedBf16Dot>, Prefetching<PairInt8Dot>, Prefetching<PairInt4Dot>,
               Prefetching<PairLut4Dot>>("avx512", {4, 4, 4}, 8);

}  // namespace torch_mesh
