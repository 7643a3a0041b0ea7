#include "kernels/convert.h"

#include <bit>
#include <cstring>

#include "kernels/small_floats.h"

namespace torch_mesh {
namespace {

// The baseline instruction set has no F16C: rescale so that the hardware's fp32 rounding does the
// work. Adding `magic`, whose last bit has the weight of the last half bit that `value` keeps,
// rounds to nearest even.
uint16_t to_fp16(float value) {
  const uint32_t bits = std::bit_cast<uint32_t>(value);
  const uint16_t sign = static_cast<uint16_t>((bits >> 16) & 0x8000u);
  const uint32_t magnitude = bits & 0x7fffffffu;
  if (magnitude > 0x7f800000u) return sign | 0x7e00u;
  if (magnitude >= 0x477ff000u) return sign | 0x7c00u;      // rounds to 65536 or more: infinity
  if (magnitude < 0x38800000u) {                            // below the smallest normal half
    const float magic = std::bit_cast<float>(0x3f000000u);  // 0.5: its last bit is worth 2^-24
    const float sum = std::bit_cast<float>(magnitude) + magic;
    return sign | static_cast<uint16_t>(std::bit_cast<uint32_t>(sum) - 0x3f000000u);
  }
  const uint32_t rounded = magnitude + 0xfffu + ((magnitude >> 13) & 1u);
  return sign | static_cast<uint16_t>((rounded - 0x38000000u) >> 13);
}

template <typename Round>
void store_halves(const float* from, int64_t count, void* to, const Round& round) {
  auto* out = static_cast<uint16_t*>(to);
  for (int64_t i = 0; i < count; ++i) out[i] = round(from[i]);
}

}  // namespace

void store_row(const float* from, int64_t count, void* to, ScalarType type) {
  switch (type) {
    case ScalarType::kFloat32:
      std::memcpy(to, from, count * sizeof(float));
      return;
    case ScalarType::kBf16:
      store_halves(from, count, to, nearest_bf16);
      return;
    case ScalarType::kFloat16:
      store_halves(from, count, to, to_fp16);
      return;
  }
}

}  // namespace torch_mesh
