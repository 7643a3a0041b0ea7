// AVX512 with VNNI and BF16: Cooper Lake, Sapphire Rapids, Zen 4, Zen 5.
#include "kernels/simd_avx512_vnni-inl.h"
// The headers below are written in its terms.
#include "kernels/bf16_dot-inl.h"
#include "kernels/vnni_target-inl.h"

namespace torch_mesh {
namespace {

// On Zen 4 neither gemm nor panels are ever faster (docs/decisions/0027). From gemm_fp8 rows on fp8
// is multiplied as bf16.
struct Amd : VnniTarget {
  struct Tiles : NoTiles {
    static constexpr Product fp8 = many_rows_of_fp8<NativeBf16Dot>;
  };
  using Bf16 = PrefetchingFar<NativeBf16Dot>;
  using Int8 = PrefetchingFar<VnniInt8Dot>;
  using Fp8 = PrefetchingFar<Fp8Dot<E4m3AsFloats>>;
  template <typename Codes>
  using Nibbles = PrefetchingFar<VnniNibbleDot<Codes>>;
  static constexpr ManyRows kRows{.gemm_floats = kNoRows,
                                  .gemm_int8 = kNoRows,
                                  .gemm_nibbles = kNoRows,
                                  .gemm_trellis = kNoRows,
                                  .panels = 0,
                                  .gemm_fp8 = 6};
};

struct Intel : VnniTarget {
  using Bf16 = Prefetching<NativeBf16Dot>;
  static constexpr ManyRows kRows{.gemm_floats = 8,
                                  .gemm_int8 = 8,
                                  .gemm_nibbles = 8,
                                  .gemm_trellis = 8,
                                  .panels = 8,
                                  .bf16_panels = false};
};

}  // namespace

constinit const KernelTable kAvx512Bf16Table = make_table<Amd>("avx512_bf16");
constinit const KernelTable kIntelBf16Table = make_table<Intel>("avx512_bf16");

}  // namespace torch_mesh
