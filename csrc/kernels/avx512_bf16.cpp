// AVX512 with VNNI and BF16: Zen 4, Zen 5. On Intel's cores avx512_vnni.cpp is faster
// (docs/decisions/0027).
#include "kernels/simd_avx512_vnni-inl.h"
// The headers below are written in its terms.
#include "kernels/fp8_as_bf16-inl.h"
#include "kernels/vnni_target-inl.h"

namespace torch_mesh {
namespace {

// vdpbf16ps adds both products of a word, rounded on its own terms (subnormals count as zero).
struct NativeBf16Dot {
  using Sum = Floats;
  struct Weights {
    Words pairs;
  };
  using Row = Weights;
  static constexpr int kRowWords = 1;

  static Weights expand(Words words) { return {words}; }
  static Weights weights(const std::byte* words) { return expand(load_words(words)); }
  static Row row(const std::byte* word) { return {broadcast_word(word_at(word))}; }
  static Sum add(Sum sum, const Row& row, const Weights& weights) {
    return _mm512_dpbf16_ps(sum, (__m512bh)row.pairs, (__m512bh)weights.pairs);
  }
};

template <typename Dot>
inline void many_rows_of_fp8(const BlockProducts& products) {
  clear_sums(products);
  fp8_as_bf16<Dot>(products);
}

// Panels are never faster on AMD's cores (docs/decisions/0027). Many rows of fp8 are multiplied as
// bf16.
template <template <typename> typename Prefetches>
struct Amd : VnniTarget {
  struct Tiles : NoTiles {
    static constexpr Product fp8 = many_rows_of_fp8<NativeBf16Dot>;
  };
  using Bf16 = Prefetches<NativeBf16Dot>;
  using Int8 = Prefetches<VnniInt8Dot>;
  using Fp8 = Prefetches<Fp8Dot<E4m3AsFloats>>;
  template <typename Codes>
  using Nibbles = Prefetches<VnniNibbleDot<Codes>>;
  static constexpr ManyRows kRows{.tile_fp8 = 6};
};

using Zen5 = Amd<PrefetchingFar>;

// Its own prefetchers do most (docs/decisions/0012, 0051).
struct Zen4 : Amd<PrefetchingLines> {
  static constexpr int kPlainColumns = 1;
};

}  // namespace

constinit const KernelTable kAvx512Bf16Table = make_table<Zen5>("avx512_bf16");
constinit const KernelTable kZen4Bf16Table = make_table<Zen4>("avx512_bf16");

}  // namespace torch_mesh
