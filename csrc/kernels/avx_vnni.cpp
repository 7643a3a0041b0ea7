// AVX2 with VNNI in its VEX form: processors of Intel without AVX512, from Alder Lake and Sierra
// Forest on.
#include "kernels/simd_avx_vnni-inl.h"
// All others are written in its terms.
#include "kernels/table-inl.h"
#include "kernels/vnni_dots-inl.h"

namespace torch_mesh {
namespace {

struct AvxVnni {
  using Bf16 = Prefetching<ExpandedBf16Dot>;
  using Int8 = Prefetching<VnniInt8Dot>;
  using Fp8 = Prefetching<ExpandedFp8Dot>;
  template <typename Codes>
  using Nibbles = PrefetchingVnniNibbles<Codes>;
  template <typename Codes>
  using Levels = VnniLevelDot<Codes>;
  using Tiles = NoTiles;
  static constexpr ManyRows kRows{
      .gemm_floats = 4, .gemm_int8 = 8, .gemm_nibbles = 8, .gemm_trellis = 8, .panels = 8};
};

}  // namespace

constinit const KernelTable kAvxVnniTable = make_table<AvxVnni>("avx_vnni");

}  // namespace torch_mesh
