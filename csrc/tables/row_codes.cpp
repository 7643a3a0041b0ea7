#include "tables/row_codes.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <cstring>
#include <limits>

#include "base/error.h"
#include "kernels/convert.h"
#include "kernels/small_floats.h"

namespace torch_mesh {
namespace {

constexpr int64_t kScaleBytes = 2;
constexpr int64_t kInt4Group = 32;
constexpr int kInt8High = 127;
constexpr int kInt4Low = -8, kInt4High = 7;
// Candidates put a group's largest magnitude at -6.86, -7.12, ..., as records of int4 do.
constexpr double kFirstCandidate = -6.86, kCandidateStep = -0.26;
constexpr int kCandidates = 10;
// Values decoded at a time, so that a row needs no memory of its own.
constexpr int64_t kValuesAtOnce = 256;
static_assert(kValuesAtOnce % kInt4Group == 0);

int64_t groups_of(Format format, int64_t dim) {
  return format == Format::kInt8 ? 1 : (dim + kInt4Group - 1) / kInt4Group;
}

// For magnitudes below 2^51. The addition rounds in hardware, without a call for each value.
double nearest_integer(double value) {
  constexpr double kMagic = 0x1.8p52;
  return value + kMagic - kMagic;
}

int code_of(float value, float scale, int low, int high) {
  if (scale == 0) return 0;
  return static_cast<int>(nearest_integer(std::clamp<double>(double{value} / scale, low, high)));
}

float as_scale(double value, std::byte* to) {
  const uint16_t bits = nearest_bf16(static_cast<float>(value));
  std::memcpy(to, &bits, sizeof(bits));
  return bf16_at(to);
}

void encode_int8(std::span<const float> values, float largest, std::byte* row) {
  const float scale = as_scale(largest / kInt8High, row);
  std::byte* codes = row + kScaleBytes;
  for (size_t i = 0; i < values.size(); ++i) {
    codes[i] = static_cast<std::byte>(code_of(values[i], scale, -kInt8High, kInt8High));
  }
}

// The least-squares scale of the codes that a candidate gives, and what it takes off the squared
// error: |x - s q|^2 = |x|^2 - (2 s xq - s^2 qq).
struct Int4Fit {
  double scale = 0;
  double gain = -1;
};

Int4Fit fitted(std::span<const float> group, double inverse) {
  double xq = 0, qq = 0;
  for (const float value : group) {
    const double code = nearest_integer(std::clamp<double>(value * inverse, kInt4Low, kInt4High));
    xq += value * code;
    qq += code * code;
  }
  std::array<std::byte, kScaleBytes> rounded;
  const double scale = as_scale(xq / qq, rounded.data());
  return {scale, scale * (2 * xq - scale * qq)};
}

float int4_scale(std::span<const float> group, std::byte* to) {
  const auto [lowest, highest] = std::minmax_element(group.begin(), group.end());
  // The codes have one more negative value than positive ones: the largest magnitude gets it.
  const double extreme = -*lowest > *highest ? *lowest : *highest;
  Int4Fit best;
  if (extreme != 0) {
    for (int i = 0; i < kCandidates; ++i) {
      const Int4Fit fit = fitted(group, (kFirstCandidate + kCandidateStep * i) / extreme);
      if (fit.gain > best.gain) best = fit;
    }
  }
  return as_scale(best.scale, to);
}

void encode_int4(std::span<const float> values, std::byte* row) {
  const auto dim = std::ssize(values);
  std::byte* codes = row + groups_of(Format::kInt4, dim) * kScaleBytes;
  std::memset(codes, 0, static_cast<size_t>((dim + 1) / 2));
  for (int64_t begin = 0; begin < dim; begin += kInt4Group) {
    const auto group = values.subspan(begin, std::min(kInt4Group, dim - begin));
    const float scale = int4_scale(group, row + begin / kInt4Group * kScaleBytes);
    for (int64_t i = begin; i < begin + std::ssize(group); ++i) {
      const int code = code_of(values[i], scale, kInt4Low, kInt4High);
      codes[i / 2] |= static_cast<std::byte>((code - kInt4Low) << (i % 2 * 4));
    }
  }
}

float largest_of(ScalarType type) {
  switch (type) {
    case ScalarType::kFloat16:
      return 65504.0f;
    case ScalarType::kBf16:
      return 0x1.fep127f;
    case ScalarType::kFloat32:
      break;
  }
  return std::numeric_limits<float>::max();
}

// Decodes values [begin, begin + count) of a row.
void values_of(const RowCodes& codes, const std::byte* row, int64_t begin, int64_t count,
               float* to) {
  const std::byte* from = row + groups_of(codes.format, codes.dim) * kScaleBytes;
  if (codes.format == Format::kInt8) {
    const float scale = bf16_at(row);
    for (int64_t i = 0; i < count; ++i) {
      to[i] = static_cast<float>(static_cast<int8_t>(from[begin + i])) * scale;
    }
    return;
  }
  for (int64_t i = 0; i < count; ++i) {
    const int64_t at = begin + i;
    const auto nibble = static_cast<int>(from[at / 2] >> (at % 2 * 4) & std::byte{15});
    to[i] = static_cast<float>(nibble + kInt4Low) * bf16_at(row + at / kInt4Group * kScaleBytes);
  }
}

}  // namespace

int64_t coded_row_bytes(Format format, int64_t dim) {
  if ((format != Format::kInt8 && format != Format::kInt4) || dim < 1 || dim > INT32_MAX) {
    throw_invalid("there are no rows of ", dim, " values in ", format_name(format),
                  "; a row has 1 value or more in int8 or int4");
  }
  const int64_t codes = format == Format::kInt8 ? dim : (dim + 1) / 2;
  return groups_of(format, dim) * kScaleBytes + codes;
}

bool encode_row(Format format, std::span<const float> values, std::byte* row) {
  float largest = 0;
  for (const float value : values) {
    if (!std::isfinite(value)) return false;
    largest = std::max(largest, std::fabs(value));
  }
  if (format == Format::kInt8) {
    encode_int8(values, largest, row);
  } else {
    encode_int4(values, row);
  }
  return true;
}

void decode_row(const RowCodes& codes, const std::byte* row, std::byte* values) {
  std::array<float, kValuesAtOnce> part;
  const float largest = largest_of(codes.type);
  for (int64_t begin = 0; begin < codes.dim; begin += kValuesAtOnce) {
    const int64_t count = std::min<int64_t>(kValuesAtOnce, codes.dim - begin);
    values_of(codes, row, begin, count, part.data());
    for (int64_t i = 0; i < count; ++i) part[i] = std::clamp(part[i], -largest, largest);
    store_row(part.data(), count, values + begin * scalar_bytes(codes.type), codes.type);
  }
}

}  // namespace torch_mesh
