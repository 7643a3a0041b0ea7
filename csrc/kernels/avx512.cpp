// AVX512 F, BW, DQ, VL, CD: Skylake servers.
#include "kernels/simd_avx512-inl.h"
// The headers below are written in its terms.
#include "kernels/pair_target-inl.h"

namespace torch_mesh {

constinit const KernelTable kAvx512Table = make_table<PairTarget<Prefetching>>("avx512");

}  // namespace torch_mesh
