#include "store/record.h"

#include <string>

#include "base/error.h"

namespace torch_mesh {
namespace {

constexpr int32_t kMaxSize = 1 << 20;

void check_size(const char* name, int32_t value) {
  if (value >= 1 && value <= kMaxSize) return;
  throw Error(ErrorKind::kInvalid, std::string(name) + " is " + std::to_string(value) +
                                       "; it must be between 1 and " + std::to_string(kMaxSize));
}

void check_group(int32_t group_size) {
  if (group_size == 32 || group_size == 64 || group_size == 128) return;
  throw Error(ErrorKind::kInvalid, "group_size is " + std::to_string(group_size) +
                                       "; integer formats know 32, 64 and 128");
}

constexpr int64_t weight_bits(Format format) {
  return format == Format::kBf16 ? 16 : format == Format::kInt8 ? 8 : 4;
}

}  // namespace

PackedMatrix PackedMatrix::make(Format format, int32_t group_size, int32_t columns, int32_t depth,
                                int32_t halves) {
  check_size("out_features", columns);
  check_size("in_features", depth);
  if (format == Format::kBf16) {
    group_size = 0;
  } else {
    check_group(group_size);
  }
  PackedMatrix matrix{};
  matrix.format = format;
  matrix.group_size = group_size;
  matrix.columns = columns;
  matrix.depth = depth;
  matrix.blocks = halves * static_cast<int32_t>(round_up(columns, kBlockColumns) / kBlockColumns);
  const int32_t step = group_size > kBlockColumns ? group_size : kBlockColumns;
  matrix.depth_padded = static_cast<int32_t>(round_up(depth, step));
  const int64_t group_depth = group_size == 0 ? matrix.depth_padded : group_size;
  matrix.group_bytes =
      matrix.scales_bytes() + group_depth * kBlockColumns * weight_bits(format) / 8;
  matrix.block_bytes = matrix.group_bytes * matrix.groups();
  return matrix;
}

RecordLayout RecordLayout::make(Format format, int32_t group_size, int32_t hidden,
                                int32_t intermediate, bool gated, bool bias) {
  check_size("hidden", hidden);
  check_size("intermediate", intermediate);
  RecordLayout layout{};
  layout.format = format;
  layout.hidden = hidden;
  layout.intermediate = intermediate;
  layout.gated = gated;
  layout.bias = bias;
  layout.gate_up = PackedMatrix::make(format, group_size, intermediate, hidden, layout.halves());
  layout.down = PackedMatrix::make(format, group_size, hidden, intermediate);
  layout.group_size = layout.down.group_size;
  layout.gate_up_offset = 0;
  layout.down_offset = layout.gate_up.bytes();
  int64_t end = layout.down_offset + layout.down.bytes();
  layout.gate_up_bias_offset = layout.down_bias_offset = -1;
  if (bias) {
    layout.gate_up_bias_offset = end;
    layout.down_bias_offset = end + int64_t{4} * layout.halves() * intermediate;
    end = layout.down_bias_offset + int64_t{4} * hidden;
  }
  layout.bytes = round_up(end, kRecordAlignment);
  return layout;
}

Format format_from_name(std::string_view name) {
  if (name == "bf16") return Format::kBf16;
  if (name == "int8") return Format::kInt8;
  if (name == "int4") return Format::kInt4;
  if (name == "lut4") return Format::kLut4;
  throw Error(ErrorKind::kInvalid, "unknown weight format \"" + std::string(name) +
                                       "\"; there are \"bf16\", \"int8\", \"int4\" and \"lut4\"");
}

const char* format_name(Format format) {
  switch (format) {
    case Format::kBf16:
      return "bf16";
    case Format::kInt8:
      return "int8";
    case Format::kInt4:
      return "int4";
    case Format::kLut4:
      return "lut4";
  }
  return "unknown";
}

}  // namespace torch_mesh
