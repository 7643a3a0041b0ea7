// AVX2, FMA and F16C: every x86 server and desktop since 2015.
#include "kernels/simd_avx2-inl.h"
// The headers below are written in its terms.
#include "kernels/pair_target-inl.h"

namespace torch_mesh {

constinit const KernelTable kAvx2Table = make_table<PairTarget<Prefetching>>("avx2");
constinit const KernelTable kAmdAvx2Table = make_table<PairTarget<PrefetchingStreams>>("avx2");

}  // namespace torch_mesh
