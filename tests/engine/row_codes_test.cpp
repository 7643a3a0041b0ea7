// Rows as codes, against the same arithmetic in double.
#include "tables/row_codes.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>
#include <random>
#include <utility>
#include <vector>

#include "base/error.h"
#include "error_of.h"

namespace torch_mesh {
namespace {

using testing::error_of;

constexpr Format kBoth[] = {Format::kInt8, Format::kInt4};
constexpr int64_t kDims[] = {1, 2, 3, 31, 32, 33, 64, 97, 160, 255, 256, 257, 1000};

int64_t group_of(Format format, int64_t dim) { return format == Format::kInt8 ? dim : 32; }

std::vector<std::byte> encoded(Format format, const std::vector<float>& values) {
  std::vector<std::byte> row(coded_row_bytes(format, std::ssize(values)), std::byte{0x5a});
  EXPECT_TRUE(encode_row(format, values, row.data()));
  return row;
}

std::vector<float> decoded(Format format, const std::vector<std::byte>& row, int64_t dim) {
  const RowCodes codes{format, ScalarType::kFloat32, static_cast<int32_t>(dim)};
  std::vector<float> values(dim);
  EXPECT_EQ(codes.value_bytes(), dim * 4);
  decode_row(codes, row.data(), reinterpret_cast<std::byte*>(values.data()));
  return values;
}

float scale_at(const std::vector<std::byte>& row, int64_t group) {
  uint16_t bits;
  std::memcpy(&bits, row.data() + 2 * group, sizeof(bits));
  const uint32_t wide = uint32_t{bits} << 16;
  float scale;
  std::memcpy(&scale, &wide, sizeof(scale));
  return scale;
}

std::vector<float> drawn(std::mt19937_64& random, int64_t dim, float width) {
  std::normal_distribution<float> normal(0, width);
  std::vector<float> values(dim);
  for (float& value : values) value = normal(random);
  return values;
}

// Returns the code of the nearest multiple of `scale`.
double nearest(double value, double scale, double low, double high) {
  return std::min(std::max(std::nearbyint(value / scale), low), high);
}

TEST(RowCodes, EachValueBecomesTheNearestCode) {
  std::mt19937_64 random(1);
  for (const Format format : kBoth) {
    const double low = format == Format::kInt8 ? -127 : -8,
                 high = format == Format::kInt8 ? 127 : 7;
    for (const int64_t dim : kDims) {
      for (const float width : {1e-30f, 1e-3f, 1.0f, 1e30f}) {
        const std::vector<float> values = drawn(random, dim, width);
        const std::vector<std::byte> row = encoded(format, values);
        const std::vector<float> found = decoded(format, row, dim);
        for (int64_t i = 0; i < dim; ++i) {
          const double scale = scale_at(row, i / group_of(format, dim));
          const double expected = nearest(values[i], scale, low, high) * scale;
          // Halfway between two codes either may be chosen.
          EXPECT_LE(std::fabs(found[i] - values[i]),
                    std::fabs(expected - values[i]) + std::fabs(values[i]) * 1e-6)
              << format_name(format) << ", value " << i << " of " << dim;
        }
      }
    }
  }
}

TEST(RowCodes, Int8IsOffByHalfAStepAtMost) {
  std::mt19937_64 random(2);
  for (const int64_t dim : kDims) {
    const std::vector<float> values = drawn(random, dim, 1);
    const std::vector<std::byte> row = encoded(Format::kInt8, values);
    const std::vector<float> found = decoded(Format::kInt8, row, dim);
    for (int64_t i = 0; i < dim; ++i) {
      EXPECT_LE(std::fabs(double{found[i]} - values[i]), 0.5 * scale_at(row, 0));
    }
  }
}

// Values that are codes times the scale are kept exactly.
TEST(RowCodes, EveryCodeIsKept) {
  std::vector<float> bytes;
  for (int code = -127; code <= 127; ++code) bytes.push_back(static_cast<float>(code) * 0.25f);
  EXPECT_EQ(decoded(Format::kInt8, encoded(Format::kInt8, bytes), std::ssize(bytes)), bytes);

  std::vector<float> nibbles;
  for (int code = -8; code <= 7; ++code) nibbles.push_back(static_cast<float>(code) * 0.5f);
  for (int rotated = 0; rotated < 16; ++rotated) {
    std::rotate(nibbles.begin(), nibbles.begin() + 1, nibbles.end());
    std::vector<float> twice = nibbles;
    twice.insert(twice.end(), nibbles.begin(), nibbles.end());
    EXPECT_EQ(decoded(Format::kInt4, encoded(Format::kInt4, twice), 32), twice);
    // The last group has fewer values.
    twice.insert(twice.end(), nibbles.begin(), nibbles.end());
    EXPECT_EQ(decoded(Format::kInt4, encoded(Format::kInt4, twice), 48), twice);
  }
}

// The scale is the best of several candidates. One of these takes the largest magnitude to -8.
TEST(RowCodes, Int4IsNoWorseThanTheLargestMagnitudeAtMinusEight) {
  std::mt19937_64 random(3);
  for (int repeated = 0; repeated < 50; ++repeated) {
    const std::vector<float> values = drawn(random, 32, 1);
    const std::vector<float> found = decoded(Format::kInt4, encoded(Format::kInt4, values), 32);
    float extreme = 0;
    for (const float value : values) {
      if (std::fabs(value) > std::fabs(extreme)) extreme = value;
    }
    double error = 0, plain = 0;
    const double scale = extreme / -8.0;
    for (int i = 0; i < 32; ++i) {
      error += std::pow(double{found[i]} - values[i], 2);
      plain += std::pow(nearest(values[i], scale, -8, 7) * scale - values[i], 2);
    }
    EXPECT_LE(error, plain * 1.02) << "the scale is a bf16 number";
  }
}

TEST(RowCodes, ZerosAndSubnormalsAreEncoded) {
  for (const Format format : kBoth) {
    for (const int64_t dim : kDims) {
      const std::vector<float> zeros(dim, 0.0f);
      EXPECT_EQ(decoded(format, encoded(format, zeros), dim), zeros);
      std::vector<float> tiny(dim, 0.0f);
      tiny[dim / 2] = std::numeric_limits<float>::denorm_min();
      for (const float value : decoded(format, encoded(format, tiny), dim)) {
        EXPECT_LE(std::fabs(value), 1e-37f);
      }
    }
  }
}

TEST(RowCodes, TheLargestValuesStayFinite) {
  for (const Format format : kBoth) {
    for (const auto& [type, largest] :
         {std::pair{ScalarType::kFloat16, 65504.0f},
          {ScalarType::kBf16, 0x1.fep127f},
          {ScalarType::kFloat32, std::numeric_limits<float>::max()}}) {
      // The scales are rounded up for some values and down for others.
      for (float value = largest; value > largest * 0.99f; value *= 0.9993f) {
        const std::vector<float> values{value, -value, 0, value / 3};
        const std::vector<std::byte> row = encoded(format, values);
        const RowCodes codes{format, type, 4};
        std::vector<std::byte> made(codes.value_bytes());
        decode_row(codes, row.data(), made.data());
        for (int i = 0; i < 4; ++i) {
          if (type == ScalarType::kFloat32) {
            float found;
            std::memcpy(&found, made.data() + i * 4, sizeof(found));
            EXPECT_TRUE(std::isfinite(found));
            continue;
          }
          uint16_t bits;
          std::memcpy(&bits, made.data() + i * 2, sizeof(bits));
          const uint16_t exponent = type == ScalarType::kBf16 ? 0x7f80 : 0x7c00;
          EXPECT_NE(bits & exponent, exponent) << value;
        }
      }
    }
  }
}

TEST(RowCodes, NonFiniteValuesAreRefused) {
  for (const Format format : kBoth) {
    for (const float bad :
         {std::numeric_limits<float>::quiet_NaN(), std::numeric_limits<float>::infinity(),
          -std::numeric_limits<float>::infinity()}) {
      for (const int64_t dim : kDims) {
        std::vector<float> values(dim, 1.0f);
        values[dim - 1] = bad;
        std::vector<std::byte> row(coded_row_bytes(format, dim));
        EXPECT_FALSE(encode_row(format, values, row.data()));
      }
    }
  }
}

TEST(RowCodes, RowsHaveTheDocumentedSizes) {
  EXPECT_EQ(coded_row_bytes(Format::kInt8, 160), 162);
  EXPECT_EQ(coded_row_bytes(Format::kInt4, 160), 90);
  EXPECT_EQ(coded_row_bytes(Format::kInt4, 33), 4 + 17);
  EXPECT_EQ(coded_row_bytes(Format::kInt8, 1), 3);
  for (const auto& [format, dim] : {std::pair{Format::kBf16, int64_t{160}},
                                    {Format::kLut4, int64_t{160}},
                                    {Format::kInt8, int64_t{0}},
                                    {Format::kInt4, int64_t{INT32_MAX} + 1}}) {
    const Error error = error_of([&] { static_cast<void>(coded_row_bytes(format, dim)); });
    EXPECT_EQ(error.kind(), ErrorKind::kInvalid);
  }
}

}  // namespace
}  // namespace torch_mesh
