#include "store/record.h"

#include <algorithm>
#include <string>

#include "base/error.h"
#include "store/gguf_types.h"

namespace torch_mesh {
namespace {

constexpr int32_t kMaxSize = 1 << 20;

void check_size(const char* name, int32_t value) {
  if (value >= 1 && value <= kMaxSize) return;
  throw_invalid(name, " is ", value, "; it must be between 1 and ", kMaxSize);
}

// By Format.
constexpr const char* kNames[kFormats] = {
    "bf16",  "bf12",  "int8",   "int4",   "lut4",    "int8_fp16", "int4_fp16", "mxfp4",
    "nvfp4", "fp8",   "q4_1",   "q5_0",   "q5_1",    "q2_k",      "q3_k",      "q4_k",
    "q5_k",  "q6_k",  "iq4_nl", "iq4_xs", "iq3_xxs", "iq3_s",     "iq2_xxs",   "iq2_xs",
    "iq2_s", "iq1_s", "iq1_m",  "tcq2",   "tcq3"};

constexpr int64_t weight_bits(Format format) {
  switch (format) {
    case Format::kBf16:
      return 16;
    case Format::kBf12:
      return 12;
    case Format::kInt8:
    case Format::kInt8Fp16:
    case Format::kFp8:
      return 8;
    case Format::kTcq2:
      return 2;
    case Format::kTcq3:
      return 3;
    default:
      return 4;
  }
}

int32_t checked_group(Format format, int32_t group_size) {
  switch (format) {
    case Format::kBf16:
    case Format::kBf12:
      return 0;
    case Format::kMxfp4:
      return 32;
    case Format::kNvfp4:
      return 16;
    case Format::kFp8:
      if (group_size == 0 || group_size == 32 || group_size == 128) return group_size;
      throw_invalid("group_size is ", group_size,
                    "; fp8 knows 0 (a scale for each output), 32 and 128");
    default:
      if (is_gguf(format)) return gguf_type(format).group;
      if (group_size == 32 || group_size == 64 || group_size == 128) return group_size;
      throw_invalid("group_size is ", group_size, "; integer formats know 32, 64 and 128");
  }
}

}  // namespace

ScaleType PackedMatrix::scale_type() const {
  switch (format) {
    case Format::kMxfp4:
      return ScaleType::kE8m0;
    case Format::kNvfp4:
      return ScaleType::kE4m3;
    case Format::kInt8Fp16:
    case Format::kInt4Fp16:
      return ScaleType::kFp16;
    case Format::kFp8:
      return group_size == 32 ? ScaleType::kE8m0 : ScaleType::kFp32;
    default:
      return is_gguf(format) ? ScaleType::kFp16 : ScaleType::kBf16;
  }
}

PackedMatrix PackedMatrix::make(Format format, int32_t group_size, int32_t columns, int32_t depth,
                                int32_t halves) {
  check_size("out_features", columns);
  check_size("in_features", depth);
  group_size = checked_group(format, group_size);
  PackedMatrix matrix{};
  matrix.format = format;
  matrix.group_size = group_size;
  matrix.columns = columns;
  matrix.depth = depth;
  matrix.blocks = halves * static_cast<int32_t>(round_up(columns, kBlockColumns) / kBlockColumns);
  if (is_gguf(format)) {
    const GgufType type = gguf_type(format);
    if (depth % type.depth != 0) {
      throw_invalid(format_name(format), " has blocks of ", type.depth, " inputs; in_features is ",
                    depth, ", no multiple of that");
    }
    matrix.depth_padded = static_cast<int32_t>(round_up(depth, kBlockColumns));
    matrix.group_bytes = type.stretch_bytes();
    matrix.block_bytes = matrix.depth_padded / type.depth * matrix.group_bytes;
    return matrix;
  }
  const bool grouped = !has_float_products(format);
  const int32_t step = grouped && group_size > kBlockColumns ? group_size : kBlockColumns;
  matrix.depth_padded = static_cast<int32_t>(round_up(depth, step));
  matrix.header_bytes = block_header_bytes(format, group_size, matrix.depth_padded);
  const int64_t group_depth = grouped ? group_size : matrix.depth_padded;
  matrix.group_bytes =
      matrix.scales_bytes() + group_depth * kBlockColumns * weight_bits(format) / 8;
  matrix.block_bytes = matrix.header_bytes + matrix.group_bytes * (grouped ? matrix.groups() : 1);
  return matrix;
}

RecordLayout RecordLayout::make(RecordFormats formats, int32_t group_size, int32_t hidden,
                                int32_t intermediate, bool gated, bool bias) {
  check_size("hidden", hidden);
  check_size("intermediate", intermediate);
  RecordLayout layout{};
  layout.hidden = hidden;
  layout.intermediate = intermediate;
  layout.gated = gated;
  layout.bias = bias;
  layout.gate_up =
      PackedMatrix::make(formats.gate_up, group_size, intermediate, hidden, layout.halves());
  layout.down = PackedMatrix::make(formats.down, group_size, hidden, intermediate);
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
  std::string known;
  for (int format = 0; format < kFormats; ++format) {
    if (name == kNames[format]) return static_cast<Format>(format);
    known += std::string(format == 0 ? "" : ", ") + kNames[format];
  }
  throw_invalid("unknown weight format \"", name, "\"; there are ", known);
}

RecordFormats RecordFormats::from_name(std::string_view name) {
  const size_t plus = name.find('+');
  if (plus == std::string_view::npos) return format_from_name(name);
  const RecordFormats formats(format_from_name(name.substr(0, plus)),
                              format_from_name(name.substr(plus + 1)));
  if (formats.gate_up == Format::kTcq2 && formats.down == Format::kTcq3) return formats;
  if (formats.gate_up != formats.down && holds_gguf_codes(formats.gate_up) &&
      holds_gguf_codes(formats.down)) {
    return formats;
  }
  throw_invalid("no record holds \"", name,
                "\"; two formats can be tcq2+tcq3, or those of two types of GGUF");
}

std::vector<RecordFormats> formats_of_layers(std::string_view name) {
  const size_t colon = name.find(':');
  std::string_view names = name.substr(0, colon);
  std::vector<RecordFormats> distinct;
  while (true) {
    const size_t bar = names.find('|');
    distinct.push_back(RecordFormats::from_name(names.substr(0, bar)));
    if (bar == std::string_view::npos) break;
    names.remove_prefix(bar + 1);
  }
  if (distinct.size() == 1 && colon == std::string_view::npos) return distinct;
  const auto refuse = [&](const std::string& what) {
    throw_invalid("\"", name, "\" ", what,
                  "; formats of layers are two to ten names and a digit for each layer, as in "
                  "q4_k+q6_k|q4_k:0110");
  };
  if (colon == std::string_view::npos) refuse("does not say which layer has which format");
  if (distinct.size() < 2 || distinct.size() > 10) refuse("has too few or too many formats");
  std::vector<RecordFormats> layers;
  for (const char digit : name.substr(colon + 1)) {
    if (digit < '0' || digit >= '0' + static_cast<int>(distinct.size())) {
      refuse("has a digit that names no format of its table");
    }
    layers.push_back(distinct[static_cast<size_t>(digit - '0')]);
  }
  if (layers.size() < 2) refuse("has too few layers");
  return layers;
}

std::vector<RecordLayout> layouts_of_layers(std::string_view name, int32_t group_size,
                                            int32_t hidden, int32_t intermediate, bool gated,
                                            bool bias) {
  std::vector<RecordLayout> layouts;
  for (const RecordFormats& formats : formats_of_layers(name)) {
    layouts.push_back(RecordLayout::make(formats, group_size, hidden, intermediate, gated, bias));
  }
  return layouts;
}

const RecordLayout& largest(const std::vector<RecordLayout>& layouts) {
  return *std::max_element(layouts.begin(), layouts.end(),
                           [](const auto& a, const auto& b) { return a.bytes < b.bytes; });
}

const char* format_name(Format format) { return kNames[static_cast<int>(format)]; }

}  // namespace torch_mesh
