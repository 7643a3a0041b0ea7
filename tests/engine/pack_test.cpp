#include "base/error.h"
#include "kernels_fixture.h"

namespace torch_mesh::testing {
namespace {

constexpr Format kAll[] = {Format::kBf16, Format::kInt8, Format::kInt4, Format::kLut4};

uint16_t bf16_of(float value) {
  uint32_t bits;
  std::memcpy(&bits, &value, 4);
  return static_cast<uint16_t>((bits + 0x7fff + (bits >> 16 & 1)) >> 16);
}

float float_of_bf16(uint16_t half) {
  const uint32_t bits = uint32_t{half} << 16;
  float value;
  std::memcpy(&value, &bits, 4);
  return value;
}

TEST(Pack, EveryTablePacksTheSameBits) {
  Random random;
  for (Format format : kAll) {
    for (int32_t group : {32, 64, 128}) {
      const Shape shape{format, group, 130, 75, true, true};
      Weights weights(shape.layout(), random);
      // Groups of every kind: zeros, huge, tiny, subnormal, not finite.
      for (int32_t k = 0; k < shape.hidden; ++k) weights.gate[k] = 0;
      for (int32_t k = 0; k < shape.hidden; ++k) weights.gate[shape.hidden + k] *= 0x1p126f;
      for (int32_t k = 0; k < shape.hidden; ++k) weights.gate[2 * shape.hidden + k] *= 0x1p-90f;
      for (int32_t k = 0; k < shape.hidden; ++k) weights.gate[3 * shape.hidden + k] *= 0x1p-130f;
      weights.up[7] = std::numeric_limits<float>::quiet_NaN();
      weights.up[2 * shape.hidden] = -HUGE_VALF;
      const Bytes expected = weights.pack(kScalarTable);
      for (const KernelTable* table : all_tables()) {
        EXPECT_TRUE(weights.pack(*table) == expected) << table->name << " " << name_of(shape);
      }
    }
  }
}

// The same numbers in fp32, fp16 and bf16; in rows, transposed, and gate and up interleaved.
TEST(Pack, TakesEveryTypeAndView) {
  Random random;
  for (Format format : kAll) {
    const Shape shape{format, 64, 130, 75};
    const RecordLayout layout = shape.layout();
    Weights weights(layout, random);
    const size_t count = weights.gate.size();
    for (auto* matrix : {&weights.gate, &weights.up, &weights.down}) {
      for (float& w : *matrix) w = std::round(w * 1000) / 64;  // at most 8 bits: exact in all types
    }
    const Bytes expected = weights.pack(kernel_table());

    std::vector<uint16_t> brain(count);
    std::vector<_Float16> half(count), transposed(count), interleaved(2 * count);
    for (size_t i = 0; i < count; ++i) {
      const size_t row = i / shape.hidden, k = i % shape.hidden;
      half[i] = static_cast<_Float16>(weights.gate[i]);
      brain[i] = bf16_of(weights.down[i]);
      transposed[k * shape.intermediate + row] = static_cast<_Float16>(weights.up[i]);
      interleaved[2 * (k * shape.intermediate + row)] = static_cast<_Float16>(weights.gate[i]);
      interleaved[2 * (k * shape.intermediate + row) + 1] = static_cast<_Float16>(weights.up[i]);
    }
    ExpertViews views = weights.views();
    views.gate = {half.data(), ScalarType::kFloat16, shape.hidden, 1};
    views.up = {transposed.data(), ScalarType::kFloat16, 1, shape.intermediate};
    views.down = {brain.data(), ScalarType::kBf16, shape.intermediate, 1};
    Bytes record(layout.bytes);
    pack_record(layout, views, record.data());
    EXPECT_TRUE(record == expected) << name_of(shape);

    views.gate = {interleaved.data(), ScalarType::kFloat16, 2, 2 * shape.intermediate};
    views.up = {interleaved.data() + 1, ScalarType::kFloat16, 2, 2 * shape.intermediate};
    pack_record(layout, views, record.data());
    EXPECT_TRUE(record == expected) << name_of(shape);
  }
}

TEST(Pack, HalfPrecisionIsReadExactly) {
  std::vector<uint16_t> halves(1 << 16);
  for (size_t i = 0; i < halves.size(); ++i) halves[i] = static_cast<uint16_t>(i);
  for (const KernelTable* table : all_tables()) {
    std::vector<float> floats(halves.size());
    table->to_floats(halves.data(), ScalarType::kFloat16, 1 << 16, floats.data());
    for (size_t i = 0; i < halves.size(); ++i) {
      _Float16 half;
      std::memcpy(&half, &halves[i], 2);
      const auto expected = static_cast<float>(half);
      if (std::isnan(expected)) {
        ASSERT_TRUE(std::isnan(floats[i]));
      } else {
        ASSERT_EQ(floats[i], expected) << table->name;
      }
    }
  }
}

TEST(Unpack, Bf16IsTheWeightsRounded) {
  Random random;
  const Shape shape{Format::kBf16, 0, 65, 70, true, true};
  const Weights weights(shape.layout(), random);
  const Unpacked unpacked(shape.layout(), weights.pack(kernel_table()));
  for (size_t i = 0; i < weights.gate.size(); ++i) {
    ASSERT_EQ(unpacked.gate_up[i], float_of_bf16(bf16_of(weights.gate[i])));
    ASSERT_EQ(unpacked.gate_up[weights.gate.size() + i], float_of_bf16(bf16_of(weights.up[i])));
    ASSERT_EQ(unpacked.down[i], float_of_bf16(bf16_of(weights.down[i])));
  }
  EXPECT_TRUE(std::equal(weights.gate_bias.begin(), weights.gate_bias.end(),
                         unpacked.gate_up_bias.begin()));
  EXPECT_TRUE(std::equal(weights.up_bias.begin(), weights.up_bias.end(),
                         unpacked.gate_up_bias.begin() + shape.intermediate));
  EXPECT_EQ(weights.down_bias, unpacked.down_bias);
}

// Squared error of a group of `x` when its largest magnitude is put at `largest`.
double error_by_largest_value(const float* x, int32_t count, float low, float high) {
  float amax = 0;
  for (int32_t k = 0; k < count; ++k) amax = std::max(amax, std::abs(x[k]));
  const float scale = float_of_bf16(bf16_of(amax / high));
  double error = 0;
  for (int32_t k = 0; k < count; ++k) {
    const float q = std::clamp(std::nearbyint(x[k] / scale), low, high);
    error += std::pow(double{x[k]} - double{scale} * q, 2);
  }
  return error;
}

// Per group never worse than the scale by the largest value, but for the rounding of the search's
// sums.
TEST(Unpack, IntegerScalesBeatTheLargestValue) {
  Random random;
  for (Format format : {Format::kInt8, Format::kInt4}) {
    const float high = format == Format::kInt8 ? 127 : 7;
    const float low = format == Format::kInt8 ? -127 : -8;
    for (int32_t group : {32, 64, 128}) {
      const Shape shape{format, group, 256, 100};
      const Weights weights(shape.layout(), random);
      const Unpacked unpacked(shape.layout(), weights.pack(kernel_table()));
      double found = 0, simple = 0;
      for (size_t i = 0; i < weights.gate.size(); i += static_cast<size_t>(group)) {
        for (int32_t k = 0; k < group; ++k) {
          found += std::pow(double{weights.gate[i + k]} - double{unpacked.gate_up[i + k]}, 2);
        }
        simple += error_by_largest_value(&weights.gate[i], group, low, high);
      }
      std::printf("%s g%d: squared error %.3f of the simple scale's\n", format_name(format), group,
                  found / simple);
      EXPECT_LT(found, simple * (format == Format::kInt8 ? 0.99 : 0.8));
    }
  }
}

double squared_error(const std::vector<float>& weights, const float* unpacked) {
  double error = 0;
  for (size_t i = 0; i < weights.size(); ++i) {
    error += std::pow(double{weights[i]} - double{unpacked[i]}, 2);
  }
  return error;
}

// At the same bytes, for weights of any spread and skew that occur.
TEST(Unpack, UnevenLevelsBeatEvenOnes) {
  Random random;
  for (int32_t group : {32, 64, 128}) {
    for (float skew : {0.0f, 0.02f, -0.05f}) {
      double errors[2];
      Weights weights(Shape{Format::kInt4, group, 256, 100}.layout(), random);
      for (float& w : weights.up) w = w * std::exp(2 * random.normal() * std::abs(skew)) + skew;
      for (Format format : {Format::kInt4, Format::kLut4}) {
        const Shape shape{format, group, 256, 100};
        weights.layout = shape.layout();
        const Unpacked unpacked(shape.layout(), weights.pack(kernel_table()));
        errors[format == Format::kLut4] =
            squared_error(weights.up, unpacked.gate_up.data() + weights.gate.size());
      }
      std::printf("g%d, mean %.2f: squared error %.3f of int4's\n", group, double{skew},
                  errors[1] / errors[0]);
      EXPECT_LT(errors[1], errors[0] * 0.85);
    }
  }
}

// No other level is nearer to a weight than its own, given the group's scale and zero.
TEST(Unpack, Lut4TakesTheNearestLevel) {
  Random random;
  const Shape shape{Format::kLut4, 32, 128, 64, false};
  const Weights weights(shape.layout(), random);
  const Bytes record = weights.pack(kernel_table());
  const Unpacked unpacked(shape.layout(), record);
  for (int32_t column = 0; column < 64; ++column) {
    for (int32_t k = 0; k < 128; ++k) {
      const std::byte* group = record.data() + k / 32 * shape.layout().gate_up.group_bytes;
      uint16_t bits;
      std::memcpy(&bits, group + column * 2, 2);
      const size_t i = static_cast<size_t>(column) * 128 + k;
      const double error = std::abs(double{weights.up[i]} - double{unpacked.gate_up[i]});
      for (uint8_t level : kLut4Levels) {
        const double other = double{float_of_bf16(bits)} * (int{level} - int(lut4_zero(bits)));
        ASSERT_LE(error, std::abs(double{weights.up[i]} - other) * (1 + 1e-4));
      }
    }
  }
}

TEST(Unpack, KeepsMagnitudesFromTinyToHuge) {
  Random random;
  for (Format format : {Format::kInt8, Format::kInt4, Format::kLut4}) {
    for (float magnitude : {0x1p-95f, 1.0f, 0x1p120f}) {
      const Shape shape{format, 32, 64, 64};
      Weights weights(shape.layout(), random);
      for (float& w : weights.up) w *= magnitude;
      const Unpacked unpacked(shape.layout(), weights.pack(kernel_table()));
      double error = 0, norm = 0;
      for (size_t i = 0; i < weights.up.size(); ++i) {
        const double exact = double{weights.up[i]} / magnitude;
        error += std::pow(exact - double{unpacked.gate_up[weights.up.size() + i]} / magnitude, 2);
        norm += exact * exact;
      }
      EXPECT_LT(std::sqrt(error / norm), format == Format::kInt8 ? 0.01 : 0.11);
    }
  }
}

TEST(Pack, RefusesViewsThatDoNotFitTheLayout) {
  Random random;
  const Weights gated(Shape{}.layout(), random);
  Bytes record(gated.layout.bytes);
  ExpertViews views = gated.views();
  views.gate.data = nullptr;
  EXPECT_THROW(pack_record(gated.layout, views, record.data()), Error);
  views = gated.views();
  views.down_bias = {gated.down_bias.data(), ScalarType::kFloat32, 1, 1};
  EXPECT_THROW(pack_record(gated.layout, views, record.data()), Error);
}

TEST(RecordLayout, HasTheSizesOfTheFormat) {
  const RecordLayout int4 = RecordLayout::make(Format::kInt4, 64, 2048, 768, true, false);
  EXPECT_EQ(int4.gate_up.blocks, 24);
  EXPECT_EQ(int4.gate_up.group_bytes, 128 + 64 * 64 / 2);
  EXPECT_EQ(int4.gate_up.block_bytes, int4.gate_up.group_bytes * 32);
  EXPECT_EQ(int4.down_offset, int4.gate_up.block_bytes * 24);
  EXPECT_EQ(int4.bytes % kRecordAlignment, 0);
  EXPECT_EQ(int4.gate_up_bias_offset, -1);
  const RecordLayout int8 = RecordLayout::make(Format::kInt8, 128, 65, 1, false, true);
  EXPECT_EQ(int8.gate_up.depth_padded, 128);
  EXPECT_EQ(int8.gate_up.group_bytes, 128 + 128 * 64);
  EXPECT_EQ(int8.down.blocks, 2);
  EXPECT_EQ(int8.down_bias_offset, int8.gate_up_bias_offset + 4);
}

TEST(RecordLayout, RefusesWhatTheFormatDoesNotKnow) {
  EXPECT_THROW(RecordLayout::make(Format::kInt4, 48, 64, 64, true, false), Error);
  EXPECT_THROW(RecordLayout::make(Format::kBf16, 0, 0, 64, true, false), Error);
  EXPECT_THROW(RecordLayout::make(Format::kBf16, 0, 64, (1 << 20) + 1, true, false), Error);
  EXPECT_THROW(format_from_name("fp8"), Error);
  for (Format format : kAll) EXPECT_EQ(format_from_name(format_name(format)), format);
}

}  // namespace
}  // namespace torch_mesh::testing
