// The VNNI, BF16 and AMX tables with their instructions emulated in AVX512BW and plain C++, so that
// processors without them test their logic too.
#include <cstdlib>
#include <cstring>

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

// Unlike the instruction, this does not flush subnormals to zero.
inline __m512 emulated_dpbf16(__m512 sum, __m512i a, __m512i b) {
  sum = _mm512_fmadd_ps(bf16_half(a, true), bf16_half(b, true), sum);
  return _mm512_fmadd_ps(bf16_half(a, false), bf16_half(b, false), sum);
}

// A thread's eight tiles, as configured; the rest is zero.
struct EmulatedTiles {
  uint8_t config[64] = {};
  uint8_t bytes[8][16][64] = {};

  int row_bytes(int tile) const { return config[16 + 2 * tile]; }
  int rows(int tile) const { return config[48 + tile]; }

  void load(int tile, const void* base, int64_t stride) {
    std::memset(bytes[tile], 0, sizeof(bytes[tile]));
    for (int r = 0; r < rows(tile); ++r) {
      std::memcpy(bytes[tile][r], static_cast<const char*>(base) + r * stride, row_bytes(tile));
    }
  }
  void store(int tile, void* base, int64_t stride) const {
    for (int r = 0; r < rows(tile); ++r) {
      std::memcpy(static_cast<char*>(base) + r * stride, bytes[tile][r], row_bytes(tile));
    }
  }
  // sum[r][c] = add(sum, word k of a's row, word c of b's row k), for each k.
  template <typename Sum, typename Add>
  void multiply(int sums, int a, int b, const Add& add) {
    if (row_bytes(a) != 4 * rows(b)) std::abort();
    for (int r = 0; r < rows(sums); ++r) {
      for (int c = 0; c < row_bytes(sums) / 4; ++c) {
        Sum sum;
        std::memcpy(&sum, bytes[sums][r] + 4 * c, 4);
        for (int k = 0; k < rows(b); ++k) sum = add(sum, bytes[a][r] + 4 * k, bytes[b][k] + 4 * c);
        std::memcpy(bytes[sums][r] + 4 * c, &sum, 4);
      }
    }
  }
};
thread_local EmulatedTiles emulated_tiles;

int32_t add_signed_bytes(int32_t sum, const uint8_t* a, const uint8_t* b) {
  for (int i = 0; i < 4; ++i) sum += static_cast<int8_t>(a[i]) * static_cast<int8_t>(b[i]);
  return sum;
}

float add_bf16_pair(float sum, const uint8_t* a, const uint8_t* b) {
  for (int i = 0; i < 4; i += 2) {
    float values[2] = {};
    std::memcpy(reinterpret_cast<char*>(&values[0]) + 2, a + i, 2);
    std::memcpy(reinterpret_cast<char*>(&values[1]) + 2, b + i, 2);
    sum += values[0] * values[1];
  }
  return sum;
}

}  // namespace

#undef _tile_zero
#undef _tile_loadd
#undef _tile_stored
#undef _tile_dpbssd
#undef _tile_dpbf16ps
#define _tile_loadconfig(from) std::memcpy(emulated_tiles.config, from, 64)
#define _tile_release() (emulated_tiles = {})
#define _tile_zero(tile) std::memset(emulated_tiles.bytes[tile], 0, 16 * 64)
#define _tile_loadd(tile, base, stride) emulated_tiles.load(tile, base, stride)
#define _tile_stored(tile, base, stride) emulated_tiles.store(tile, base, stride)
#define _tile_dpbssd(sums, a, b) emulated_tiles.multiply<int32_t>(sums, a, b, add_signed_bytes)
#define _tile_dpbf16ps(sums, a, b) emulated_tiles.multiply<float>(sums, a, b, add_bf16_pair)
#define _mm512_dpbusd_epi32(sum, u8, s8) emulated_dpbusd(sum, u8, s8)
#define _mm512_dpbf16_ps(sum, a, b) emulated_dpbf16(sum, (__m512i)(a), (__m512i)(b))
#define kAvx512VnniTable kEmulatedVnniTable
#define kAvx512Bf16Table kEmulatedBf16Table
#define kZen4Bf16Table kEmulatedZen4Bf16Table
#define kAmxTable kEmulatedAmxTable

#include "kernels/amx.cpp"
#include "kernels/avx512_bf16.cpp"
#include "kernels/avx512_vnni.cpp"
