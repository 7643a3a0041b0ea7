// The inverse of packing, one weight at a time: slow, obvious, and independent of the kernels.
#include <cstring>

#include "kernels/pack.h"

namespace torch_mesh {
namespace {

float bf16_at(const std::byte* from) {
  uint16_t half;
  std::memcpy(&half, from, sizeof(half));
  const uint32_t bits = uint32_t{half} << 16;
  float value;
  std::memcpy(&value, &bits, sizeof(value));
  return value;
}

int32_t nibble_at(const std::byte* words, int32_t k, int32_t column) {
  const auto byte = static_cast<uint8_t>(words[(k / 8 * kBlockColumns + column) * 4 + k % 4]);
  return k % 8 < 4 ? byte & 15 : byte >> 4;
}

// What the scale multiplies.
int32_t quantised_at(Format format, const std::byte* scale, const std::byte* words, int32_t k,
                     int32_t column) {
  if (format == Format::kInt8) {
    return static_cast<int8_t>(words[(k / 4 * kBlockColumns + column) * 4 + k % 4]);
  }
  const int32_t nibble = nibble_at(words, k, column);
  if (format == Format::kInt4) return nibble - 8;
  const auto zero = static_cast<int32_t>(lut4_zero(static_cast<uint32_t>(*scale)));
  return kLut4Levels[nibble] - zero;
}

float weight_at(const PackedMatrix& matrix, const std::byte* block, int32_t k, int32_t column) {
  if (matrix.format == Format::kBf16) {
    return bf16_at(block + (int64_t{k / 2} * kBlockColumns + column) * 4 + k % 2 * 2);
  }
  const std::byte* group = block + k / matrix.group_size * matrix.group_bytes;
  const std::byte* words = group + matrix.scales_bytes();
  const std::byte* scale = group + column * 2;
  const int32_t quantised =
      quantised_at(matrix.format, scale, words, k % matrix.group_size, column);
  return bf16_at(scale) * static_cast<float>(quantised);
}

void unpack_matrix(const PackedMatrix& matrix, int32_t halves, const std::byte* blocks, float* to) {
  for (int32_t half = 0; half < halves; ++half) {
    for (int32_t column = 0; column < matrix.columns; ++column) {
      const int64_t index = int64_t{column / kBlockColumns} * halves + half;
      const std::byte* block = blocks + index * matrix.block_bytes;
      for (int32_t k = 0; k < matrix.depth; ++k) {
        *to++ = weight_at(matrix, block, k, column % kBlockColumns);
      }
    }
  }
}

}  // namespace

void unpack_blocks(const PackedMatrix& matrix, const std::byte* blocks, float* weights) {
  unpack_matrix(matrix, 1, blocks, weights);
}

void unpack_record(const RecordLayout& layout, const std::byte* record, float* gate_up, float* down,
                   float* gate_up_bias, float* down_bias) {
  if (gate_up != nullptr) {
    unpack_matrix(layout.gate_up, layout.halves(), record + layout.gate_up_offset, gate_up);
  }
  if (down != nullptr) unpack_matrix(layout.down, 1, record + layout.down_offset, down);
  if (!layout.bias) return;
  const size_t halves = static_cast<size_t>(layout.halves());
  if (gate_up_bias != nullptr) {
    std::memcpy(gate_up_bias, record + layout.gate_up_bias_offset,
                sizeof(float) * halves * static_cast<size_t>(layout.intermediate));
  }
  if (down_bias != nullptr) {
    std::memcpy(down_bias, record + layout.down_bias_offset,
                sizeof(float) * static_cast<size_t>(layout.hidden));
  }
}

}  // namespace torch_mesh
