// AVX2, FMA and F16C: every x86 server and desktop since 2015.
#include "kernels/simd_avx2-inl.h"
// All others are written in its terms.
#include "kernels/pair_dots-inl.h"
#include "kernels/table-inl.h"

namespace torch_mesh {
namespace {

struct Avx2 {
  using Bf16 = Prefetching<ExpandedBf16Dot>;
  using Int8 = Prefetching<PairInt8Dot>;
  using Fp8 = Prefetching<ExpandedFp8Dot>;
  template <typename Codes>
  using Nibbles = PrefetchingPairNibbles<Codes>;
  template <typename Codes>
  using Levels = PairLevelDot<Codes>;
  using Tiles = NoTiles;
  static constexpr ManyRows kRows{
      .gemm_floats = 4, .gemm_int8 = 4, .gemm_nibbles = 4, .gemm_trellis = 4, .panels = 8};
};

}  // namespace

constinit const KernelTable kAvx2Table = make_table<Avx2>("avx2");

}  // namespace torch_mesh
