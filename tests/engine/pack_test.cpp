#include <functional>
#include <initializer_list>

#include "base/error.h"
#include "engine_fixture.h"
#include "error_of.h"
#include "kernels_fixture.h"

namespace torch_mesh::testing {
namespace {

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
  for (Format format : kRoundedFormats) {
    if (format == Format::kBf12) continue;  // these weights do not fit; see bf12_test.cpp
    for (int32_t group : {32, 64, 128}) {
      const Shape shape{format, group, 130, 75, true, true};
      Weights weights(shape.layout(), random);
      // Groups of zeros, of huge, tiny, subnormal and non-finite values.
      for (int32_t k = 0; k < shape.hidden; ++k) weights.gate[k] = 0;
      for (int32_t k = 0; k < shape.hidden; ++k) weights.gate[shape.hidden + k] *= 0x1p126f;
      for (int32_t k = 0; k < shape.hidden; ++k) weights.gate[2 * shape.hidden + k] *= 0x1p-90f;
      for (int32_t k = 0; k < shape.hidden; ++k) weights.gate[3 * shape.hidden + k] *= 0x1p-130f;
      weights.up[7] = std::numeric_limits<float>::quiet_NaN();
      weights.up[2 * shape.hidden] = -HUGE_VALF;
      const Bytes expected = weights.pack(kScalarTable);
      for (const KernelTable* table : vector_tables()) {
        EXPECT_TRUE(weights.pack(*table) == expected) << table->name << " " << name_of(shape);
      }
    }
  }
}

// The same numbers in fp32, fp16 and bf16; row-major, transposed, and gate and up interleaved.
TEST(Pack, TakesEveryTypeAndView) {
  Random random;
  for (Format format : kRoundedFormats) {
    const Shape shape{format, 64, 130, 75};
    const RecordLayout layout = shape.layout();
    Weights weights(layout, random);
    const size_t count = weights.gate.size();
    for (auto* matrix : {&weights.gate, &weights.up, &weights.down}) {
      // At most 8 significant bits are exact in all types.
      for (float& w : *matrix) w = std::clamp(std::round(w * 1000), -255.0f, 255.0f) / 64;
    }
    const Bytes expected = weights.pack(*all_tables().back());

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
    ExpertViews of_one = views;
    of_one.gate = {interleaved.data(), ScalarType::kFloat16, 2, 2 * shape.intermediate};
    of_one.up = {interleaved.data() + 1, ScalarType::kFloat16, 2, 2 * shape.intermediate};
    for (const KernelTable* table : all_tables()) {
      for (const ExpertViews& each : {views, of_one}) {
        Bytes record(layout.bytes);
        pack_record(layout, each, record.data(), *table);
        EXPECT_TRUE(record == expected) << name_of(shape) << ' ' << table->name;
      }
    }
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

constexpr Format kOfCodes[] = {Format::kInt8,  Format::kInt4,  Format::kInt8Fp16, Format::kInt4Fp16,
                               Format::kMxfp4, Format::kNvfp4, Format::kFp8};

std::vector<int32_t> groups_of(Format format) {
  if (format == Format::kMxfp4) return {32};
  if (format == Format::kNvfp4) return {16};
  if (format == Format::kFp8) return {0, 32, 128};
  return {32, 64, 128};
}

// Codes and scales in any order unpack to exactly the values they represent.
TEST(PackCodes, ChangesNoWeight) {
  Random random;
  const auto below = [&](int32_t end) { return random.below(end); };
  for (int round = 0; round < 4; ++round) {
    for (Format format : kOfCodes) {
      for (int32_t group : groups_of(format)) {
        const bool whole = round == 3;  // without padding
        const int32_t hidden = whole ? 256 : 8 + random.below(250);
        const int32_t intermediate = whole ? 128 : 8 + random.below(150);
        const Shape shape{format, group, hidden, intermediate, round % 2 == 0};
        SCOPED_TRACE(name_of(shape));
        const RecordLayout layout = shape.layout();
        const Codes gate(format, group, intermediate, hidden, below);
        const Codes up(format, group, intermediate, hidden, below);
        const Codes down(format, group, hidden, intermediate, below);
        ExpertCodes codes;
        codes.up = up.view();
        codes.down = down.view();
        if (layout.gated) codes.gate = gate.view();
        const Bytes record(layout.bytes), again(layout.bytes, 0);
        pack_record(layout, codes, record.data());
        pack_record(layout, codes, again.data());
        EXPECT_TRUE(record == again);  // independent of the buffer's earlier content
        const Unpacked unpacked(layout, record);
        const auto expect_equal = [](const Codes& expected, const float* weights) {
          for (int32_t row = 0; row < expected.rows(); ++row) {
            for (int32_t k = 0; k < expected.depth(); ++k) {
              ASSERT_EQ(weights[row * expected.depth() + k], expected.weight(row, k))
                  << row << ", " << k;
            }
          }
        };
        const float* of_up =
            unpacked.gate_up.data() + (layout.gated ? int64_t{intermediate} * hidden : 0);
        if (layout.gated) expect_equal(gate, unpacked.gate_up.data());
        expect_equal(up, of_up);
        expect_equal(down, unpacked.down.data());
      }
    }
  }
}

TEST(PackCodes, ABlockOfGgufDoesNotKeepTheContentOfItsMemory) {
  Random random;
  const auto below = [&](int32_t end) { return random.below(end); };
  for (Format format : kGgufFormats) {
    const int32_t depth = gguf_type(format).depth;
    for (int32_t hidden : {256, 3 * depth}) {  // 3 x 32 is padded
      const Shape shape{format, 32, hidden, 256};
      SCOPED_TRACE(name_of(shape));
      const RecordLayout layout = shape.layout();
      const Codes gate(format, 32, 256, hidden, below), up(format, 32, 256, hidden, below);
      const Codes down(format, 32, hidden, 256, below);
      ExpertCodes codes;
      codes.gate = gate.view(), codes.up = up.view(), codes.down = down.view();
      const Bytes record(layout.bytes), again(layout.bytes, 0);
      pack_record(layout, codes, record.data());
      pack_record(layout, codes, again.data());
      EXPECT_TRUE(record == again);
    }
  }
}

// Gate and up in one matrix with its own scales, one after the other or with alternating rows.
TEST(PackCodes, TakesRowsOfALargerMatrix) {
  Random random;
  const auto below = [&](int32_t end) { return random.below(end); };
  for (Format format : kOfCodes) {
    for (int32_t group : groups_of(format)) {
      for (bool in_turn : {false, true}) {
        const Shape shape{format, group, 160, 192};
        const RecordLayout layout = shape.layout();
        const Codes both(format, group, 384, 160, below), down(format, group, 160, 192, below);
        ExpertCodes codes;
        codes.gate = codes.up = both.view();
        codes.down = down.view();
        if (in_turn && codes.up.scales.rows > 1) continue;
        for (CodesView* view : {&codes.gate, &codes.up}) {
          const int64_t first = view == &codes.gate ? 0 : in_turn ? 1 : 192;
          view->data += first * view->row_bytes;
          if (!in_turn) {
            view->first_row = static_cast<int32_t>(first);
            continue;
          }
          view->scales.data += first * view->scales.row_bytes;
          view->row_bytes *= 2;
          view->scales.row_bytes *= 2;
        }
        const Bytes record(layout.bytes);
        pack_record(layout, codes, record.data());
        const Unpacked unpacked(layout, record);
        for (int32_t row = 0; row < 384; ++row) {
          const int32_t from = !in_turn ? row : row < 192 ? 2 * row : 2 * (row - 192) + 1;
          for (int32_t k = 0; k < 160; ++k) {
            ASSERT_EQ(unpacked.gate_up[row * 160 + k], both.weight(from, k)) << name_of(shape);
          }
        }
      }
    }
  }
}

std::string why_refused(Format format, int32_t group,
                        const std::function<void(Codes&, CodesView&)>& spoil) {
  Random random;
  const auto below = [&](int32_t end) { return random.below(end); };
  Codes up(format, group, 70, 160, below), down(format, group, 160, 70, below);
  CodesView view = up.view();
  spoil(up, view);
  const RecordLayout layout = RecordLayout::make(format, group, 160, 70, false, false);
  const Bytes record(layout.bytes);
  ExpertCodes codes;
  codes.up = view;
  codes.down = down.view();
  return error_of([&] { pack_record(layout, codes, record.data()); }).what();
}

// A block of these formats is shorter than one of codes, or has another meaning.
TEST(PackCodes, RefusesFormatsWithoutACodeForEachWeight) {
  Random random;
  const auto below = [&](int32_t end) { return random.below(end); };
  const auto packs = [&](const RecordLayout& layout, Format of_codes) {
    const int32_t group = groups_of(of_codes).front();
    const Codes gate(of_codes, group, layout.intermediate, layout.hidden, below);
    const Codes down(of_codes, group, layout.hidden, layout.intermediate, below);
    ExpertCodes codes;
    codes.gate = codes.up = gate.view();
    codes.down = down.view();
    const Bytes record(layout.bytes, 0x5a), before(layout.bytes, 0x5a);
    try {
      pack_record(layout, codes, record.data());
      return true;
    } catch (const Error& error) {
      EXPECT_EQ(error.kind(), ErrorKind::kInvalid);
      EXPECT_NE(std::string(error.what()).find("allowed for codes: int8, int4, int8_fp16"),
                std::string::npos)
          << error.what();
      EXPECT_TRUE(record == before) << "nothing is written";
      return false;
    }
  };
  for (Format format : kAllFormats) {
    SCOPED_TRACE(format_name(format));
    const bool holds = std::ranges::find(kOfCodes, format) != std::end(kOfCodes);
    EXPECT_EQ(has_codes_of_weights(format), holds);
    const int32_t group = holds ? groups_of(format).front() : 32;
    const auto layout = RecordLayout::make(format, group, 96, 80, true, false);
    EXPECT_EQ(packs(layout, holds ? format : Format::kInt4), holds);
  }
  const RecordFormats two(Format::kTcq2, Format::kTcq3);
  EXPECT_FALSE(packs(RecordLayout::make(two, 32, 96, 80, true, false), Format::kInt4));
  // This record has as much room as one-byte codes need.
  EXPECT_FALSE(packs(RecordLayout::make(Format::kTcq3, 128, 96, 80, true, false), Format::kInt8));
}

TEST(PackCodes, RefusesScalesAndCodesThatAreNotNumbers) {
  const auto first_scale = [](std::initializer_list<int> bytes) {
    return [bytes](Codes& codes, CodesView&) {
      size_t i = 0;
      for (int byte : bytes) codes.scales()[i++] = static_cast<std::byte>(byte);
    };
  };
  const std::string not_finite = "a scale that is not a finite number";
  EXPECT_NE(why_refused(Format::kMxfp4, 32, first_scale({255})).find(not_finite),
            std::string::npos);
  EXPECT_NE(why_refused(Format::kNvfp4, 16, first_scale({0x7f})).find(not_finite),
            std::string::npos);
  EXPECT_NE(why_refused(Format::kNvfp4, 16, first_scale({0x81})).find("a scale below zero"),
            std::string::npos);
  EXPECT_NE(why_refused(Format::kInt4, 32, first_scale({0x80, 0x7f})).find(not_finite),
            std::string::npos);
  EXPECT_NE(why_refused(Format::kInt8Fp16, 32, first_scale({0, 0x7c})).find(not_finite),
            std::string::npos);
  EXPECT_NE(why_refused(Format::kFp8, 128, first_scale({0, 0, 0xc0, 0x7f})).find(not_finite),
            std::string::npos);
  const auto nan_code = [](Codes& codes, CodesView&) { codes.codes()[5] = std::byte{0xff}; };
  EXPECT_NE(why_refused(Format::kFp8, 0, nan_code).find("a weight that is not a number"),
            std::string::npos);
}

TEST(PackCodes, RefusesScalesThatDoNotFitTheGroup) {
  const auto columns = [](Codes&, CodesView& view) { view.scales.columns = 48; };
  EXPECT_NE(why_refused(Format::kInt4, 32, columns).find("in groups of 32"), std::string::npos);
  const auto rows = [](Codes&, CodesView& view) { view.scales.rows = 32; };
  EXPECT_NE(why_refused(Format::kFp8, 128, rows).find("in groups of 128"), std::string::npos);
  const auto type = [](Codes&, CodesView& view) { view.scales.type = ScaleType::kBf16; };
  EXPECT_NE(why_refused(Format::kInt4Fp16, 64, type).find("scales of another type"),
            std::string::npos);
}

TEST(Pack, RefusesToRoundToFormatsOfCodes) {
  Random random;
  const RecordLayout layout = Shape{Format::kMxfp4, 32, 64, 64}.layout();
  Weights weights(layout, random);
  const Bytes record(layout.bytes);
  const std::string error =
      error_of([&] { pack_record(layout, weights.views(), record.data()); }).what();
  EXPECT_NE(error.find("nothing is rounded to mxfp4"), std::string::npos) << error;
  EXPECT_NE(error.find("allowed for other weights: bf16, bf12, int8, int4, lut4, tcq2, tcq3"),
            std::string::npos);
}

TEST(Unpack, Bf16GivesTheRoundedWeights) {
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

// Squared error of a group of `x` when the scale takes its largest magnitude to `high`.
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

// No group is worse than with the scale of its largest value, up to rounding of the search's sums.
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

// At equal size, for weights of realistic spread and skew.
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

// Given the group's scale and zero, every weight takes its nearest level.
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

// Random moments M^T, small enough that errors do not grow.
struct RandomMoments {
  std::vector<float> hidden, hidden_importance, intermediate, intermediate_importance;
  ExpertMoments moments;

  RandomMoments(const RecordLayout& layout, Random& random, float share)
      : hidden(random.normals(int64_t{layout.hidden} * layout.hidden, share)),
        hidden_importance(importance(layout.hidden, random)),
        intermediate(random.normals(int64_t{layout.intermediate} * layout.intermediate, share)),
        intermediate_importance(importance(layout.intermediate, random)),
        moments{{hidden.data(), hidden_importance.data()},
                {intermediate.data(), intermediate_importance.data()}} {}

  static std::vector<float> importance(int32_t count, Random& random) {
    std::vector<float> values = random.normals(count);
    for (float& value : values) value = value * value + 0.01f;
    return values;
  }
};

Bytes pack_by(const Weights& weights, const ExpertMoments& moments, const KernelTable& table,
              int32_t threads = 1) {
  Bytes record(weights.layout.bytes);
  pack_record(weights.layout, weights.views(), moments, record.data(), thread_runtime(), threads,
              table);
  return record;
}

constexpr Format kFedInputByInput[] = {Format::kInt8, Format::kInt4, Format::kLut4};
constexpr Format kCalibratedFormats[] = {Format::kInt8, Format::kInt4, Format::kLut4, Format::kTcq2,
                                         Format::kTcq3};

TEST(PackCalibrated, EveryTableAndThreadPacksTheSameBits) {
  Random random;
  int32_t round = 0;
  for (Format format : kCalibratedFormats) {
    const bool trellis = format == Format::kTcq2 || format == Format::kTcq3;
    for (int32_t group : {32, 64, 128}) {
      // The scalar trellis is slow.
      Shape shape{format, group, trellis ? 130 : 290, 75, true, true};
      if (format == Format::kTcq2 && group == 64) shape.down = Format::kTcq3;
      Weights weights(shape.layout(), random);
      for (int32_t k = 0; k < shape.hidden; ++k) weights.gate[k] = 0;
      const RandomMoments random_moments(shape.layout(), random, 0.05f);
      const auto pack = [&](const KernelTable& table, int32_t threads) {
        return pack_by(weights, random_moments.moments, table, threads);
      };
      const Bytes expected = pack(kScalarTable, 1);
      if (!trellis || group == 32) {
        EXPECT_TRUE(pack(kScalarTable, 3) == expected);
      }
      for (const KernelTable* table : vector_tables()) {
        EXPECT_TRUE(pack(*table, ++round % 2 == 0 ? 1 : 3) == expected)
            << table->name << " " << name_of(shape);
      }
    }
  }
}

TEST(PackCalibrated, WithoutErrorFeedbackItEqualsPlainPacking) {
  Random random;
  for (Format format : kFedInputByInput) {
    for (int32_t group : {32, 64, 128}) {
      for (bool gated : {true, false}) {
        const Shape shape{format, group, 256, 128, gated, true};
        const Weights weights(shape.layout(), random);
        RandomMoments nothing(shape.layout(), random, 0.0f);
        std::fill(nothing.hidden_importance.begin(), nothing.hidden_importance.end(), 1.0f);
        std::fill(nothing.intermediate_importance.begin(), nothing.intermediate_importance.end(),
                  1.0f);
        EXPECT_TRUE(pack_by(weights, nothing.moments, kernel_table()) ==
                    weights.pack(kernel_table()))
            << name_of(shape);
      }
    }
  }
}

TEST(PackCalibrated, RefusesOtherFormats) {
  Random random;
  for (Format format : {Format::kBf16, Format::kBf12, Format::kMxfp4, Format::kFp8}) {
    const Shape shape{format, 32, 64, 64};
    const Weights weights(shape.layout(), random);
    const RandomMoments moments(shape.layout(), random, 0.0f);
    const std::string error =
        error_of([&] { pack_by(weights, moments.moments, kernel_table()); }).what();
    EXPECT_NE(error.find("int8, int4, lut4"), std::string::npos) << error;
  }
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

// Stores on disk have these sizes, so they must not change.
TEST(RecordLayout, SizesOfFormatsOfCodesDoNotChange) {
  const auto block = [](Format format, int32_t group, int32_t depth) {
    return PackedMatrix::make(format, group, 64, depth).block_bytes;
  };
  EXPECT_EQ(block(Format::kMxfp4, 0, 192), 6 * (64 + 1024));
  EXPECT_EQ(block(Format::kNvfp4, 0, 192), 64 + 12 * (64 + 512));
  EXPECT_EQ(block(Format::kInt4Fp16, 64, 192), 3 * (128 + 2048));
  EXPECT_EQ(block(Format::kInt8Fp16, 32, 192), 6 * (128 + 2048));
  EXPECT_EQ(block(Format::kFp8, 0, 192), 256 + 192 * 64);
  EXPECT_EQ(block(Format::kFp8, 32, 192), 6 * 64 + 192 * 64);
  EXPECT_EQ(block(Format::kFp8, 128, 192), 64 + 192 * 64);  // one group covers the whole depth
  EXPECT_EQ(block(Format::kFp8, 128, 2100), 128 + 2112 * 64);
}

TEST(RecordLayout, RefusesInvalidGroupsSizesAndNames) {
  EXPECT_THROW(RecordLayout::make(Format::kInt4, 48, 64, 64, true, false), Error);
  EXPECT_THROW(RecordLayout::make(Format::kBf16, 0, 0, 64, true, false), Error);
  EXPECT_THROW(RecordLayout::make(Format::kBf16, 0, 64, (1 << 20) + 1, true, false), Error);
  EXPECT_THROW(format_from_name("fp6"), Error);
  for (Format format : kAllFormats) EXPECT_EQ(format_from_name(format_name(format)), format);
}

TEST(RecordLayout, HoldsTwoFormats) {
  const RecordFormats formats = RecordFormats::from_name("tcq2+tcq3");
  EXPECT_EQ(formats.gate_up, Format::kTcq2);
  EXPECT_EQ(formats.down, Format::kTcq3);
  const RecordLayout both = RecordLayout::make(formats, 128, 2048, 768, true, false);
  const RecordLayout two = RecordLayout::make(Format::kTcq2, 128, 2048, 768, true, false);
  const RecordLayout three = RecordLayout::make(Format::kTcq3, 128, 2048, 768, true, false);
  EXPECT_EQ(both.gate_up.bytes(), two.gate_up.bytes());
  EXPECT_EQ(both.down.bytes(), three.down.bytes());
  EXPECT_EQ(both.bytes, two.bytes + (three.bytes - two.bytes) / 3);
  for (const char* name : {"tcq2+", "+tcq2", "tcq2+tcq2", "tcq3+tcq2", "tcq2+tcq3+tcq2",
                           "int4+tcq2", "tcq3+bf16", "tcq2+int2", "+"}) {
    EXPECT_THROW(RecordFormats::from_name(name), Error) << name;
  }
}

}  // namespace
}  // namespace torch_mesh::testing
