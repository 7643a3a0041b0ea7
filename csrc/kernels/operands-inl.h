// Converts activations to the operand form of the products, and finishes sums. Include after the
// target's simd header.
#pragma once

#include "kernels/kernel_table.h"
#include "kernels/rounding-inl.h"
#include "store/gguf_types.h"

namespace torch_mesh {
namespace {

constexpr uint32_t kInfinity = 0x7f800000;
// Below this (2^-100) a group counts as zero; its inverse scale would not be finite.
constexpr uint32_t kNegligible = 0x0d800000;

inline void to_floats(const void* values, ScalarType type, int32_t count, float* floats) {
  alignas(64) uint16_t tail[kLanes] = {};
  alignas(64) float converted[kLanes];
  const int32_t whole = count / kLanes * kLanes;
  if (type == ScalarType::kFloat32) {
    __builtin_memcpy(floats, values, sizeof(float) * static_cast<size_t>(count));
    return;
  }
  const auto* halves = static_cast<const uint16_t*>(values);
  const auto widen = [type](const uint16_t* from) {
    return type == ScalarType::kBf16 ? load_bf16(from) : load_half(from);
  };
  for (int32_t i = 0; i < whole; i += kLanes) store(floats + i, widen(halves + i));
  if (whole == count) return;
  const auto rest = static_cast<size_t>(count - whole);
  __builtin_memcpy(tail, halves + whole, rest * sizeof(uint16_t));
  store(converted, widen(tail));
  __builtin_memcpy(floats + whole, converted, rest * sizeof(float));
}

// Quantizes symmetrically, by the largest magnitude. One value that is not finite makes the scale
// NaN, so that the row's outputs are NaN.
inline void quantize_group(const float* values, int32_t count, uint8_t* bytes, float* scale,
                           int32_t* sum) {
  Words largest = broadcast_word(0);
  for (int32_t i = 0; i < count; i += kLanes) {
    largest = maximum_words(largest, magnitude_bits(load(values + i)));
  }
  const uint32_t bits = largest_lane(largest);
  float amax;
  __builtin_memcpy(&amax, &bits, sizeof(amax));
  const bool usable = bits < kInfinity && bits >= kNegligible;
  *scale = bits >= kInfinity ? __builtin_nanf("") : usable ? amax / 127.0f : 0.0f;
  *sum = 0;
  if (!usable) {
    __builtin_memset(bytes, 0, static_cast<size_t>(count));
    return;
  }
  // amax * (127 / amax) may exceed 127 by a rounding, which the rounding to an integer undoes.
  const Floats inverse = broadcast(127.0f / amax);
  Words total = broadcast_word(0);
  for (int32_t i = 0; i < count; i += kLanes) {
    const Words value = to_integers(load(values + i) * inverse);
    total = add_words(total, value);
    store_bytes(bytes + i, value & broadcast_word(0xff));
  }
  *sum = sum_of_lanes(total);
}

inline void store_operands(const float* values, int32_t column, int32_t count,
                           const OperandShape& shape, std::byte* row) {
  if (has_float_products(shape.format)) {
    auto* to = reinterpret_cast<uint16_t*>(row) + column;
    for (int32_t i = 0; i < count; i += kLanes) store_uint16(to + i, bf16_bits(load(values + i)));
    return;
  }
  auto* bytes = reinterpret_cast<uint8_t*>(row);
  auto* scales = reinterpret_cast<float*>(row + shape.depth_padded);
  auto* sums = reinterpret_cast<int32_t*>(scales + shape.depth_padded / shape.group_size);
  const bool mins = is_gguf(shape.format) && gguf_type(shape.format).has_mins();
  for (int32_t i = 0; i < count; i += shape.group_size) {
    const int32_t group = (column + i) / shape.group_size;
    quantize_group(values + i, shape.group_size, bytes + column + i, scales + group, sums + group);
    if (!mins) continue;
    const float factor = -(scales[group] * static_cast<float>(sums[group]));
    __builtin_memcpy(sums + group, &factor, sizeof(factor));
  }
}

// panel[i][c] = lines[c * stride + i] for `count` values of kBlockColumns lines.
inline void transpose(const float* lines, int64_t stride, int32_t count, float* panel) {
  for (int32_t i = 0; i < count; i += kLanes) {
    for (int32_t c = 0; c < kBlockColumns; c += kLanes) {
      Floats vectors[kLanes];
      for (int32_t j = 0; j < kLanes; ++j) vectors[j] = load(lines + (c + j) * stride + i);
      transpose_lanes(vectors);
      for (int32_t j = 0; j < kLanes; ++j) store(panel + (i + j) * kBlockColumns + c, vectors[j]);
    }
  }
}

inline void finish(float* sums, const float* bias, float weight) {
  for (int32_t c = 0; c < kBlockColumns; c += kLanes) {
    const Floats sum = bias == nullptr ? load(sums + c) : load(sums + c) + load(bias + c);
    store(sums + c, broadcast(weight) * sum);
  }
}

}  // namespace
}  // namespace torch_mesh
