// AVX512 with VNNI and BF16: Cooper Lake, Sapphire Rapids, Zen 4, Zen 5.
#include "kernels/simd_avx512_vnni-inl.h"
// The headers below are written in its terms.
#include "kernels/bf16_dot-inl.h"
#include "kernels/vnni_target-inl.h"

namespace torch_mesh {
namespace {

// Neither gemm nor panels are ever faster on AMD's cores (docs/decisions/0027). From gemm_fp8 rows
// on fp8 is multiplied as bf16.
template <template <typename> typename Prefetches, template <typename> typename PrefetchesInt8>
struct Amd : VnniTarget {
  struct Tiles : NoTiles {
    static constexpr Product fp8 = many_rows_of_fp8<NativeBf16Dot>;
  };
  using Bf16 = Prefetches<NativeBf16Dot>;
  using Int8 = PrefetchesInt8<VnniInt8Dot>;
  using Fp8 = Prefetches<Fp8Dot<E4m3AsFloats>>;
  template <typename Codes>
  using Nibbles = Prefetches<VnniNibbleDot<Codes>>;
  static constexpr ManyRows kRows{.gemm_floats = kNoRows,
                                  .gemm_int8 = kNoRows,
                                  .gemm_nibbles = kNoRows,
                                  .gemm_trellis = kNoRows,
                                  .panels = 0,
                                  .gemm_fp8 = 6};
};

using Zen5 = Amd<PrefetchingFar, PrefetchingFar>;

// Its own prefetchers do most (docs/decisions/0012, 0051).
struct Zen4 : Amd<PrefetchingForTiles, PrefetchingLines> {
  static constexpr int kPlainColumns = 1;
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

constinit const KernelTable kAvx512Bf16Table = make_table<Zen5>("avx512_bf16");
constinit const KernelTable kZen4Bf16Table = make_table<Zen4>("avx512_bf16");
constinit const KernelTable kIntelBf16Table = make_table<Intel>("avx512_bf16");

}  // namespace torch_mesh
