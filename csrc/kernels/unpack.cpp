// The inverse of packing, one weight at a time: slow, obvious, and independent of the kernels.
#include <cstring>

#include "kernels/pack.h"
#include "kernels/small_floats.h"
#include "store/bf12.h"
#include "store/gguf_types.h"
#include "store/trellis.h"

namespace torch_mesh {
namespace {

uint32_t nibble_at(const std::byte* words, int32_t k, int32_t column) {
  const auto byte = static_cast<uint8_t>(words[(k / 8 * kBlockColumns + column) * 4 + k % 4]);
  return k % 8 < 4 ? byte & 15 : byte >> 4;
}

// Returns the number that the scale multiplies.
float quantized_at(Format format, const std::byte* scale, const std::byte* words, int32_t k,
                   int32_t column) {
  switch (format) {
    case Format::kInt8:
    case Format::kInt8Fp16:
      return static_cast<int8_t>(words[(k / 4 * kBlockColumns + column) * 4 + k % 4]);
    case Format::kMxfp4:
    case Format::kNvfp4:
      return small_float(nibble_at(words, k, column), 2, 1);
    case Format::kLut4: {
      const auto zero = static_cast<int32_t>(lut4_zero(static_cast<uint32_t>(*scale)));
      return static_cast<float>(kLut4Levels[nibble_at(words, k, column)] - zero);
    }
    default:
      return static_cast<float>(static_cast<int32_t>(nibble_at(words, k, column)) - 8);
  }
}

// Returns the bits of code j: a byte holds two bits of four codes, or one of eight.
uint32_t bits_of_code(const std::byte* words, int32_t bits, int32_t j, int32_t stream) {
  const auto byte = static_cast<uint32_t>(words[stream]);
  return byte >> bits * (j % (8 / bits)) & ((1u << bits) - 1);
}

// Code j of a stream, which is a ring.
uint32_t code_at(const PackedMatrix& matrix, const std::byte* block, int32_t j, int32_t stream,
                 int32_t column) {
  const int32_t steps = matrix.depth_padded / kTrellisStreams;
  j = (j + steps) % steps;
  const int32_t deep = matrix.format == Format::kTcq2 ? Tcq2::kUnitDepth : Tcq3::kUnitDepth;
  const int32_t words = matrix.format == Format::kTcq2 ? Tcq2::kUnitWords : Tcq3::kUnitWords;
  const int32_t k = j * kTrellisStreams;
  const int64_t line = 16 * 4;
  const std::byte* group =
      block + k / matrix.group_size * matrix.group_bytes + matrix.scales_bytes();
  const std::byte* part = group + column / 16 * (matrix.group_size / deep) * words * line;
  const std::byte* unit = part + k % matrix.group_size / deep * words * line + column % 16 * 4;
  if (matrix.format == Format::kTcq2) return bits_of_code(unit, 2, j, stream);
  return bits_of_code(unit + k % 32 / 16 * line, 2, j, stream) << 1 |
         bits_of_code(unit + 2 * line, 1, j, stream);
}

// As store/trellis.h defines it.
float trellis_at(const PackedMatrix& matrix, const std::byte* block, int32_t k, int32_t column) {
  const int32_t stream = k % kTrellisStreams;
  const int32_t j = k / kTrellisStreams;
  const auto code = [&](int32_t of) { return code_at(matrix, block, of, stream, column); };
  uint32_t level;
  if (matrix.format == Format::kTcq2) {
    const auto pair = [&](int32_t of) { return code(of - 1) + 4 * code(of); };
    level = Tcq2::kFirst[pair(j) ^ pair(j - 4)] + Tcq2::kSecond[pair(j - 2)];
  } else {
    const auto pair = [&](int32_t of) { return (code(of - 1) >> 1) + 4 * (code(of) >> 1); };
    const auto lowest = [&](int32_t of) { return code(of) & 1; };
    const uint32_t four = lowest(j - 3) + 2 * lowest(j - 2) + 4 * lowest(j - 1) + 8 * lowest(j);
    level = Tcq3::kFirst[pair(j)] + Tcq3::kSecond[four ^ pair(j - 2)];
  }
  const std::byte* scales = block + k / matrix.group_size * matrix.group_bytes;
  return bf16_at(scales + column * 2) *
         static_cast<float>(static_cast<int32_t>(level) - kTrellisZero);
}

float fp8_at(const PackedMatrix& matrix, const std::byte* block, int32_t k, int32_t column) {
  const std::byte* pairs = block + matrix.header_bytes;
  const float value = e4m3_at(pairs + (int64_t{k / 2} * kBlockColumns + column) * 2 + k % 2);
  const int32_t scale = matrix.group_size == 0     ? column
                        : matrix.group_size == 128 ? k / 128
                                                   : k / 32 * kBlockColumns + column;
  return value * scale_value(matrix.scale_type(), block + scale * scale_bytes(matrix.scale_type()));
}

// Returns code k of a column, whose words begin at `words`, from the planes of its bits.
int32_t gguf_code(int32_t bits, const std::byte* words, int32_t k) {
  constexpr int32_t kLine = 16 * 4;
  int32_t code = 0;
  int32_t first = 0;
  if (bits >= 4) {
    code = static_cast<int32_t>(words[k / 8 * kLine + k % 4]) >> k / 4 % 2 * 4 & 15;
    first = 4;
    words += 4 * kLine;
  }
  if (bits - first >= 2) {
    code |= (static_cast<int32_t>(words[k / 16 * kLine + k % 4]) >> k / 4 % 4 * 2 & 3) << first;
    first += 2;
    words += 2 * kLine;
  }
  if (bits > first) code |= (static_cast<int32_t>(words[k % 4]) >> k / 4 & 1) << first;
  return code;
}

float half_at(const std::byte* from, int32_t index) {
  return scale_value(ScaleType::kFp16, from + index * 2);
}

// As store/gguf_types.h defines it.
float gguf_at(const PackedMatrix& matrix, const std::byte* block, int32_t k, int32_t column) {
  const GgufType type = gguf_type(matrix.format);
  const std::byte* stretch = block + k / type.depth * matrix.group_bytes;
  const std::byte* part =
      stretch + type.header_bytes() + k % type.depth / kGgufPart * type.part_bytes();
  const std::byte* words = part + kBlockColumns * type.part_groups() * type.step_bytes();
  const std::byte* steps =
      part + k % kGgufPart / type.group * kBlockColumns * type.step_bytes() + column;
  float scale = half_at(stretch, column);
  float min = type.has_half_mins() ? half_at(stretch, kBlockColumns + column) : 0;
  int32_t eighths = 0;
  if (type.steps) {
    auto step = static_cast<int32_t>(*steps);
    if (type.is_signed) step = static_cast<int8_t>(*steps);
    if (type.mins == GgufMins::kBytes) min *= static_cast<float>(steps[kBlockColumns]);
    if (type.mins == GgufMins::kNibbles) min *= static_cast<float>(step >> 4);
    if (type.mins == GgufMins::kEighths) eighths = step >> 4;
    if (type.has_nibbles()) step &= 15;
    scale *= static_cast<float>(step) * type.unit;
  }
  const std::byte* own = words + column / 16 * type.bits * 16 * 4 + column % 16 * 4;
  const int32_t code = gguf_code(type.bits, own, k % kGgufPart);
  const int32_t level = type.levels != nullptr ? type.levels[code] : code - type.zero;
  // In the order of the gguf package, so that with a scale of zero the sign is the same.
  if (eighths > 0) return scale * (static_cast<float>(8 * level - eighths) * kGgufEighth);
  const float value = scale * static_cast<float>(level);
  return type.has_half_mins() ? value - min : value;
}

// As store/bf12.h defines it.
float bf12_at(const PackedMatrix& matrix, const std::byte* block, int32_t k, int32_t column) {
  const Bf12Block<const std::byte> parts{block, matrix.depth_padded / kBf12Depth};
  const int32_t tile = k / kBf12Depth;
  const int32_t row = k % kBf12Depth / 2;
  const std::byte* bytes = parts.tile(tile) + row * kBf12RowBytes;
  const int32_t place = bf12_place(column);
  const auto both = static_cast<uint8_t>(bytes[kBf12NamesOffset + place % 64 + k % 2]);
  const int32_t name = place < 64 ? both & 15 : both >> 4;
  std::byte value[2] = {bytes[place + k % 2], parts.table(tile)[name]};
  const int32_t upper = (row * kBlockColumns + column) * 4 + k % 2 * 2 + 1;
  for (uint32_t i = parts.first_of(tile); i < parts.last_of(tile); ++i) {
    const uint32_t exception = read_as<uint32_t>(parts.exception(i));
    if (parts.place_of(exception) == static_cast<uint32_t>(upper))
      value[1] = static_cast<std::byte>(exception);
  }
  return bf16_at(value);
}

float weight_at(const PackedMatrix& matrix, const std::byte* block, int32_t k, int32_t column) {
  if (matrix.format == Format::kBf16) {
    return bf16_at(block + (int64_t{k / 2} * kBlockColumns + column) * 4 + k % 2 * 2);
  }
  if (matrix.format == Format::kBf12) return bf12_at(matrix, block, k, column);
  if (matrix.format == Format::kFp8) return fp8_at(matrix, block, k, column);
  if (is_trellis(matrix.format)) return trellis_at(matrix, block, k, column);
  if (is_gguf(matrix.format)) return gguf_at(matrix, block, k, column);
  const std::byte* group = block + matrix.header_bytes + k / matrix.group_size * matrix.group_bytes;
  const std::byte* words = group + matrix.scales_bytes();
  const std::byte* at = group + column * scale_bytes(matrix.scale_type());
  float scale = scale_value(matrix.scale_type(), at);
  if (matrix.format == Format::kNvfp4) {
    scale = scale * read_as<float>(block) / read_as<float>(block + sizeof(float));
  }
  return scale * quantized_at(matrix.format, at, words, k % matrix.group_size, column);
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
