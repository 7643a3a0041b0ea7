// The AVX-VNNI table with its instruction emulated in AVX2, so that processors without it test its
// logic too.
#include "kernels/simd_avx2-inl.h"

namespace {

inline __m256i emulated_dpbusd(__m256i sum, __m256i u8, __m256i s8) {
  const __m256i low_bytes = _mm256_set1_epi16(0xff);
  const __m256i even = _mm256_madd_epi16(_mm256_and_si256(u8, low_bytes),
                                         _mm256_srai_epi16(_mm256_slli_epi16(s8, 8), 8));
  const __m256i odd = _mm256_madd_epi16(_mm256_srli_epi16(u8, 8), _mm256_srai_epi16(s8, 8));
  return _mm256_add_epi32(sum, _mm256_add_epi32(even, odd));
}

}  // namespace

#define _mm256_dpbusd_avx_epi32(sum, u8, s8) emulated_dpbusd(sum, u8, s8)
#define kAvxVnniTable kEmulatedAvxVnniTable

#include "kernels/avx_vnni.cpp"
