// The VNNI and BF16 tables with their two instructions written out in AVX512BW, so that their logic
// is executed on processors that lack them too.
#include "kernels/simd_avx512-inl.h"

namespace {

[[maybe_unused]] inline __m512i emulated_dpbusd(__m512i sum, __m512i u8, __m512i s8) {
  const __m512i low_bytes = _mm512_set1_epi16(0xff);
  const __m512i even = _mm512_madd_epi16(_mm512_and_si512(u8, low_bytes),
                                         _mm512_srai_epi16(_mm512_slli_epi16(s8, 8), 8));
  const __m512i odd = _mm512_madd_epi16(_mm512_srli_epi16(u8, 8), _mm512_srai_epi16(s8, 8));
  return _mm512_add_epi32(sum, _mm512_add_epi32(even, odd));
}

inline __m512 bf16_half(__m512i pairs, bool upper) {
  return _mm512_castsi512_ps(upper ? _mm512_and_si512(pairs, _mm512_set1_epi32(-65536))
                                   : _mm512_slli_epi32(pairs, 16));
}

inline __m512 emulated_dpbf16(__m512 sum, __m512i a, __m512i b) {
  sum = _mm512_fmadd_ps(bf16_half(a, true), bf16_half(b, true), sum);
  return _mm512_fmadd_ps(bf16_half(a, false), bf16_half(b, false), sum);
}

}  // namespace

#define _mm512_dpbusd_epi32(sum, u8, s8) emulated_dpbusd(sum, u8, s8)
#define _mm512_dpbf16_ps(sum, a, b) emulated_dpbf16(sum, (__m512i)(a), (__m512i)(b))
#define kAvx512VnniTable kEmulatedVnniTable
#define kAvx512Bf16Table kEmulatedBf16Table
#define kIntelBf16Table kEmulatedIntelBf16Table

#include "kernels/avx512_bf16.cpp"
#include "kernels/avx512_vnni.cpp"
