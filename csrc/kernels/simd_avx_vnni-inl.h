// AVX2 and the VEX form of VNNI.
#pragma once

#include "kernels/simd_avx2-inl.h"

namespace torch_mesh {
namespace {

// sum + the four products of unsigned and signed bytes of each lane.
inline Sums add_byte_products(Sums sum, Words unsigned_bytes, Words signed_bytes) {
  return as_sums(_mm256_dpbusd_avx_epi32(words_of(sum), unsigned_bytes, signed_bytes));
}

}  // namespace
}  // namespace torch_mesh
