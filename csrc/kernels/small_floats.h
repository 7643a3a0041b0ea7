// Numbers of one and two bytes as fp32, one at a time: for packing and unpacking. The kernels have
// their own.
#pragma once

#include <bit>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstring>

#include "store/record.h"

namespace torch_mesh {

template <typename T>
inline T read_as(const std::byte* from) {
  T value;
  std::memcpy(&value, from, sizeof(value));
  return value;
}

inline float bf16_at(const std::byte* from) {
  const uint32_t bits = uint32_t{read_as<uint16_t>(from)} << 16;
  float value;
  std::memcpy(&value, &bits, sizeof(value));
  return value;
}

// The nearest bf16, ties to even; an infinity beyond its range. NaN stays NaN.
inline uint16_t nearest_bf16(float value) {
  const auto bits = std::bit_cast<uint32_t>(value);
  if ((bits & 0x7fffffff) > 0x7f800000) return static_cast<uint16_t>(bits >> 16 | 0x40);
  return static_cast<uint16_t>((bits + 0x7fff + (bits >> 16 & 1)) >> 16);
}

// A number with a sign, `exponent_bits` and `mantissa_bits`. Does not decode infinities and NaN.
inline float small_float(uint32_t bits, int exponent_bits, int mantissa_bits) {
  const uint32_t mantissa = bits & ((1u << mantissa_bits) - 1);
  const int exponent = static_cast<int>(bits >> mantissa_bits & ((1u << exponent_bits) - 1));
  const int lowest = 2 - (1 << (exponent_bits - 1)) - mantissa_bits;
  const float magnitude =
      exponent == 0
          ? std::ldexp(static_cast<float>(mantissa), lowest)
          : std::ldexp(static_cast<float>(mantissa | 1u << mantissa_bits), lowest + exponent - 1);
  return (bits >> (exponent_bits + mantissa_bits) & 1) != 0 ? -magnitude : magnitude;
}

inline float e4m3_at(const std::byte* from) {
  return small_float(static_cast<uint32_t>(*from), 4, 3);
}

inline float scale_value(ScaleType type, const std::byte* from) {
  switch (type) {
    case ScaleType::kBf16:
      return bf16_at(from);
    case ScaleType::kFp16:
      return small_float(read_as<uint16_t>(from), 5, 10);
    case ScaleType::kFp32:
      return read_as<float>(from);
    case ScaleType::kE8m0:
      return std::ldexp(1.0f, static_cast<int>(*from) - 127);
    case ScaleType::kE4m3:
      return e4m3_at(from);
  }
  return 0;
}

}  // namespace torch_mesh
