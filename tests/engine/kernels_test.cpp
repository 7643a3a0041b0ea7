#include <algorithm>
#include <cmath>
#include <cstring>
#include <span>
#include <utility>
#include <vector>

#include "base/error.h"
#include "kernels_fixture.h"

namespace torch_mesh::testing {
namespace {

std::vector<Shape> shapes() {
  std::vector<Shape> all;
  const int32_t hiddens[] = {1, 63, 65, 192, 200};
  const int32_t intermediates[] = {1, 64, 100, 330};
  const int32_t groups[] = {32, 64, 128};
  int32_t n = 0;
  for (Format format : kAllFormats) {
    for (int32_t hidden : hiddens) {
      for (int32_t intermediate : intermediates) {
        // The periods of groups, halves, biases and activations give all combinations. Some
        // activations need both halves.
        const Activation activation = kActivations[n / 2 % std::size(kActivations)];
        const bool gated = n % 2 == 0 || activation.needs_gate();
        all.push_back({format, groups[n % 3], hidden, intermediate, gated, n % 5 < 2, activation});
        ++n;
      }
    }
  }
  // Blocks that one row may read as streams: 16 KiB and more.
  for (Format format : kAllFormats) {
    all.push_back({format, groups[n % 3], 1024, 70, n % 2 == 0, n % 5 < 2});
    ++n;
  }
  for (int32_t group : groups) {
    const bool gated = group != 64;
    all.push_back({Format::kTcq2, group, 321, 190, gated, true, Activation::kGelu, Format::kTcq3});
    all.push_back({Format::kTcq2, group, 190, 321, gated, false, Activation::kSilu, Format::kTcq3});
  }
  // One and several super-blocks of 256 inputs for GGUF's types.
  for (Format format : kGgufFormats) {
    all.push_back({format, 32, 256, 512, n % 2 == 0, n % 3 == 0});
    all.push_back({format, 32, 768, 256, n % 2 == 1, n % 3 == 1, Activation::kGelu});
    all.push_back({format, 32, 1536, 256, n % 2 == 0, n % 3 == 2});
    ++n;
  }
  all.push_back({Format::kQ4K, 32, 512, 256, true, true, Activation::kSilu, Format::kQ6K});
  all.push_back({Format::kIq4Xs, 32, 256, 96, true, false, Activation::kSilu, Format::kQ5_0});
  all.push_back({Format::kQ5K, 32, 256, 128, true, false, Activation::kSilu, Format::kInt8Fp16});
  return all;
}

constexpr int32_t kRowCounts[] = {0, 1, 2, 3, 4, 5, 7, 8, 17, 33};

// bf16 on AVX512-BF16 and floats in tiles have the rounding of their instructions. Everything else
// agrees to the bit.
bool rounds_alike(const KernelTable& table, Format format, int32_t rows) {
  if (is_bf16(format) && std::string_view(table.name) == "avx512_bf16") return false;
  const FormatKernels& kernels = table.of(format);
  const bool tiles = kernels.tiles != nullptr && rows >= kernels.tile_rows;
  return !has_float_products(format) || !tiles;
}

double typical_error(Format format) { return has_float_products(format) ? 0.009 : 0.04; }

TEST(ExpertFfn, EveryTableAgreesWithScalar) {
  Random random;
  for (const Shape& shape : shapes()) {
    SCOPED_TRACE(name_of(shape));
    const Weights weights(shape.layout(), random);
    const Bytes record = weights.pack(kernel_table());
    const Rows rows(shape.layout(), kRowCounts[random.below(std::size(kRowCounts))], random);
    const auto expected = run_ffn(kScalarTable, shape, record, rows);
    EXPECT_TRUE(same_bits(run_ffn(kScalarTable, shape, record, rows, for_few_rows({})), expected));
    for (const KernelTable* table : vector_tables()) {
      SCOPED_TRACE(table->name);
      const auto products = run_ffn(*table, shape, record, rows);
      if (rounds_alike(*table, shape.format, rows.count())) {
        EXPECT_TRUE(same_bits(products, expected));
      } else if (rows.count() > 0) {
        const std::vector<double> wide(expected.begin(), expected.end());
        EXPECT_LT(relative_error(products, wide, rows), 2e-3);
      }
      if (rounds_alike(*table, shape.format, 1)) {
        EXPECT_TRUE(same_bits(run_ffn(*table, shape, record, rows, for_few_rows({})), expected));
      }
    }
  }
}

// Expects run(table, rows) to have the same bits with every table, for rows of ones and of minus
// ones.
template <typename Run>
void expect_alike(const Shape& shape, Random& random, const Run& run) {
  for (int32_t count : {1, 4, 40}) {
    Rows rows(shape.layout(), count, random);
    for (int32_t r = 0; r < rows.all(); ++r) {
      std::fill_n(rows.row(r), shape.hidden, r % 2 == 0 ? 1.0f : -1.0f);
    }
    const auto expected = run(kScalarTable, rows);
    for (const KernelTable* table : all_tables()) {
      EXPECT_TRUE(same_bits(run(*table, rows), expected)) << table->name;
    }
  }
}

// Sums of 8 and 16 bits reach their limits; none may saturate.
TEST(ExpertFfn, SumsOfTheLargestOperandsAreExact) {
  Random random;
  for (Format format : {Format::kInt8, Format::kInt4}) {
    for (int32_t group : {32, 64, 128}) {
      const Shape shape{format, group, 256, 128};
      SCOPED_TRACE(name_of(shape));
      for (float sign : {1.0f, -1.0f}) {
        Weights weights(shape.layout(), random);
        for (auto* matrix : {&weights.gate, &weights.up, &weights.down}) {
          std::fill(matrix->begin(), matrix->end(), 0.01f * sign);
        }
        const Bytes record = weights.pack(kernel_table());
        expect_alike(shape, random, [&](const KernelTable& table, const Rows& rows) {
          return run_ffn(table, shape, record, rows);
        });
      }
    }
  }
}

// Makes all codes of a packed matrix of a GGUF type `code`.
void set_gguf_codes(const PackedMatrix& matrix, int32_t code, std::byte* blocks) {
  constexpr int32_t kLine = 16 * 4;  // words of 16 columns
  const GgufType type = gguf_type(matrix.format);
  const int64_t steps = int64_t{kBlockColumns} * type.step_bytes() * type.part_groups();
  std::byte* const end = blocks + matrix.bytes();
  for (std::byte* stretch = blocks; stretch < end; stretch += type.stretch_bytes()) {
    std::byte* to = stretch + type.header_bytes();
    for (int32_t part = 0; part < type.depth / kGgufPart; ++part) {
      to += steps;
      for (int32_t column = 0; column < kBlockColumns; column += 16) {
        int32_t rest = code;
        const auto put = [&](int32_t words, int32_t bits, int32_t ones) {
          std::memset(to, (rest & ((1 << bits) - 1)) * ones, words * kLine);
          to += words * kLine;
          rest >>= bits;
        };
        if (type.bits >= 4) put(4, 4, 0x11);
        if (type.bits % 4 >= 2) put(2, 2, 0x55);
        if (type.bits % 2 == 1) put(1, 1, 0xff);
      }
    }
  }
}

// Levels at their limits: bytes of a file may not reach them, since its codes name several.
TEST(ExpertFfn, SumsOfTheLargestLevelsOfGgufAreExact) {
  Random random;
  for (Format format : kGgufFormats) {
    const GgufType type = gguf_type(format);
    if (type.levels == nullptr) continue;
    const Shape shape{format, 32, 256, 256};
    SCOPED_TRACE(name_of(shape));
    const auto* end = type.levels + (1 << type.bits);
    for (const auto* level :
         {std::min_element(type.levels, end), std::max_element(type.levels, end)}) {
      Bytes record = Weights(shape.layout(), random).pack(kernel_table());
      const RecordLayout layout = shape.layout();
      const auto code = static_cast<uint8_t>(level - type.levels);
      set_gguf_codes(layout.gate_up, code, record.data() + layout.gate_up_offset);
      set_gguf_codes(layout.down, code, record.data() + layout.down_offset);
      expect_alike(shape, random, [&](const KernelTable& table, const Rows& rows) {
        return run_ffn(table, shape, record, rows);
      });
    }
  }
}

// Codes and steps at their limits.
TEST(ExpertFfn, SumsOfTheLargestCodesOfGgufAreExact) {
  Random random;
  for (Format format : kGgufFormats) {
    const Shape shape{format, 32, 256, 256};
    SCOPED_TRACE(name_of(shape));
    for (uint8_t byte : {0x00, 0x7f, 0x80, 0xff, 0x77, 0x88, 0x0f, 0xf0}) {
      Weights weights(shape.layout(), random);
      for (Codes& codes : weights.codes) {
        std::fill(codes.codes().begin(), codes.codes().end(), std::byte{byte});
        const auto [d, min] = codes.half_places();
        codes.set_halves(d, 0x2000);
        if (min >= 0) codes.set_halves(min, 0x9c00);
      }
      const Bytes record = weights.pack(kernel_table());
      expect_alike(shape, random, [&](const KernelTable& table, const Rows& rows) {
        return run_ffn(table, shape, record, rows);
      });
    }
  }
}

// fp8's tables may lose products below 2^-70, as of hidden activations next to zero.
std::vector<float> without_lost_products(std::vector<float> products) {
  for (float& value : products) {
    if (std::abs(value) < 0x1p-50f) value = 0;
  }
  return products;
}

// The same with formats of codes, whose range is larger by one.
TEST(ExpertFfn, SumsOfTheLargestCodesAreExact) {
  Random random;
  for (Format format : kAllFormats) {
    if (!is_made_of_codes(format)) continue;
    // fp8's tiles scale 128 inputs at once, others 64. With a single scale both agree.
    const Shape shape{format, 128, format == Format::kFp8 ? 128 : 256, 128};
    SCOPED_TRACE(name_of(shape));
    for (uint8_t code : {0x80, 0x7f, 0xff, 0x77, 0x88, 0x00, 0x7e, 0xfe}) {
      if (format == Format::kFp8 && (code & 0x7f) == 0x7f) continue;
      Weights weights(shape.layout(), random);
      for (Codes& codes : weights.codes) {
        std::fill(codes.codes().begin(), codes.codes().end(), std::byte{code});
      }
      const Bytes record = weights.pack(kernel_table());
      expect_alike(shape, random, [&](const KernelTable& table, const Rows& rows) {
        auto products = run_ffn(table, shape, record, rows);
        return format == Format::kFp8 ? without_lost_products(std::move(products)) : products;
      });
    }
  }
}

TEST(ExpertFfn, AgreesWithFloat64) {
  Random random;
  for (const Shape& shape : shapes()) {
    if (shape.hidden == 1 || shape.intermediate == 1) continue;  // one rounding is all
    SCOPED_TRACE(name_of(shape));
    const Weights weights(shape.layout(), random);
    const Bytes record = weights.pack(kernel_table());
    const Unpacked unpacked(shape.layout(), record);
    const Rows rows(shape.layout(), 1 + random.below(9), random);
    const auto expected = ffn_reference(shape, unpacked, rows);
    for (const KernelTable* table : all_tables()) {
      SCOPED_TRACE(table->name);
      const auto products = run_ffn(*table, shape, record, rows);
      EXPECT_LT(relative_error(products, expected, rows), typical_error(shape.format));
    }
  }
}

// About half of the gate and up values are beyond swigluoai's limits, on both sides.
TEST(ExpertFfn, ClampsValuesBeyondTheLimit) {
  Random random;
  for (Format format : kRoundedFormats) {
    const Shape shape{format, 32, 200, 100, true, true, kSwigluOai};
    SCOPED_TRACE(name_of(shape));
    Weights weights(shape.layout(), random);
    for (auto* matrix : {&weights.gate, &weights.up}) {
      for (float& weight : *matrix) weight *= 14;
    }
    const Bytes record = weights.pack(kernel_table());
    const Rows rows(shape.layout(), 1 + random.below(9), random);
    const auto expected = ffn_reference(shape, Unpacked(shape.layout(), record), rows);
    const auto scalar = run_ffn(kScalarTable, shape, record, rows);
    for (const KernelTable* table : all_tables()) {
      const auto products = run_ffn(*table, shape, record, rows);
      EXPECT_LT(relative_error(products, expected, rows), typical_error(format)) << table->name;
      if (rounds_alike(*table, format, rows.count())) {
        EXPECT_TRUE(same_bits(products, scalar)) << table->name;
      }
    }
  }
}

TEST(ExpertFfn, RefusesAnActivationOfGateAndUpWithoutAGate) {
  for (const Activation& activation : {kSwigluOai, kSoftcapped}) {
    const Shape shape{Format::kBf16, 64, 64, 64, false, false, activation};
    EXPECT_THROW(ExpertFfn(shape.layout(), shape.activation, {}, kernel_table()), Error);
  }
}

// Row counts cover every tile shape. Few rows and many add in the same order, except floats in a
// table's tiles, which forwards of few rows do not use.
TEST(ExpertFfn, ARowDoesNotDependOnTheOthers) {
  Random random;
  for (Format format : kAllFormats) {
    const Shape shape{format, 64, 200, 100};
    const Bytes record = Weights(shape.layout(), random).pack(kernel_table());
    const Rows rows(shape.layout(), 40, random);
    for (const KernelTable* table : all_tables()) {
      const FormatKernels& kernels = table->of(format);
      const bool tiles = has_float_products(format) && kernels.tiles != nullptr;
      for (const Runtime& runtime : {Runtime{}, for_few_rows({})}) {
        const auto together = run_ffn(*table, shape, record, rows, runtime);
        const bool alone = runtime.few_rows || !tiles;
        for (int32_t count = alone ? 1 : kernels.tile_rows; count <= 17; ++count) {
          Rows few = rows;
          few.tokens.resize(static_cast<size_t>(count));
          const auto products = run_ffn(*table, shape, record, few, runtime);
          for (int32_t r = 0; r < count; ++r) {
            const int64_t at = int64_t{rows.out_rows[r]} * shape.hidden;
            ASSERT_EQ(0, std::memcmp(&together[at], &products[at], 4 * shape.hidden))
                << table->name;
          }
        }
      }
    }
  }
}

TEST(ExpertFfn, TheOrderOfTasksDoesNotMatter) {
  Random random;
  for (Format format : kAllFormats) {
    const Shape shape{format, 128, 200, 300};
    const Bytes record = Weights(shape.layout(), random).pack(kernel_table());
    const Rows rows(shape.layout(), 5, random);
    EXPECT_TRUE(same_bits(run_ffn(kernel_table(), shape, record, rows, {}, false),
                          run_ffn(kernel_table(), shape, record, rows, {}, true)));
  }
}

TEST(ExpertFfn, WritesOnlyTheRowsInItsPlaces) {
  Random random;
  const Shape shape{Format::kInt4, 32, 65, 100};
  const Bytes record = Weights(shape.layout(), random).pack(kernel_table());
  const Rows rows(shape.layout(), 6, random);
  for (const KernelTable* table : all_tables()) {
    const auto products = run_ffn(*table, shape, record, rows);
    std::vector<bool> written(static_cast<size_t>(rows.all()));
    for (int32_t r = 0; r < rows.count(); ++r) written[rows.out_rows[r]] = true;
    for (int32_t place = 0; place < rows.all(); ++place) {
      for (int32_t c = 0; c < shape.hidden; ++c) {
        EXPECT_EQ(written[place], !std::isnan(products[place * shape.hidden + c]));
      }
    }
  }
}

void expect_spoils_itself_alone(const Shape& shape, Random& random) {
  SCOPED_TRACE(name_of(shape));
  const Bytes record = Weights(shape.layout(), random).pack(kernel_table());
  Rows rows(shape.layout(), 7, random);
  const auto clean = run_ffn(kScalarTable, shape, record, rows);
  rows.row(rows.tokens[2])[random.below(shape.hidden)] = std::numeric_limits<float>::quiet_NaN();
  rows.row(rows.tokens[5])[random.below(shape.hidden)] = std::numeric_limits<float>::infinity();
  for (const KernelTable* table : all_tables()) {
    SCOPED_TRACE(table->name);
    const auto products = run_ffn(*table, shape, record, rows);
    for (int32_t r = 0; r < rows.count(); ++r) {
      for (int32_t c = 0; c < shape.hidden; ++c) {
        const int64_t i = int64_t{rows.out_rows[r]} * shape.hidden + c;
        if (r == 2 || r == 5) {
          EXPECT_TRUE(std::isnan(products[i]) || (r == 5 && std::isinf(products[i])));
        } else if (rounds_alike(*table, shape.format, rows.count())) {
          EXPECT_EQ(products[i], clean[i]);
        } else {
          EXPECT_TRUE(std::isfinite(products[i]));
        }
      }
    }
  }
}

TEST(ExpertFfn, ANonFiniteRowAffectsNoOtherRow) {
  Random random;
  for (Format format : kAllFormats) {
    // Softcap is left out: it makes infinities finite.
    for (const Activation& activation :
         {Activation(Activation::kSilu), Activation(Activation::kRelu2), kSwigluOai, kClamped}) {
      expect_spoils_itself_alone({format, 64, 200, 100, true, false, activation}, random);
    }
  }
}

TEST(ExpertFfn, ANonFiniteWeightReachesTheOutput) {
  Random random;
  for (Format format : kRoundedFormats) {
    for (float bad : {std::numeric_limits<float>::quiet_NaN(), HUGE_VALF}) {
      const Shape shape{format, 32, 100, 70};
      Weights weights(shape.layout(), random);
      const int32_t column = random.below(shape.hidden);
      weights.down[column * shape.intermediate + random.below(shape.intermediate)] = bad;
      const Rows rows(shape.layout(), 3, random);
      for (const KernelTable* table : all_tables()) {
        const auto products = run_ffn(*table, shape, weights.pack(*table), rows);
        for (int32_t r = 0; r < rows.count(); ++r) {
          for (int32_t c = 0; c < shape.hidden; ++c) {
            const float value = products[rows.out_rows[r] * shape.hidden + c];
            EXPECT_EQ(std::isfinite(value), c != column) << table->name;
          }
        }
      }
    }
  }
}

// Padding columns may hold anything: their sums are dropped, and hidden groups exclude them.
TEST(ExpertFfn, PaddingColumnsAreNotData) {
  Random random;
  const Shape shape{Format::kBf16, 64, 100, 70};
  const RecordLayout layout = shape.layout();
  const Bytes record = Weights(layout, random).pack(kernel_table());
  const Rows rows(layout, 5, random);
  const auto clean = run_ffn(kScalarTable, shape, record, rows);
  const auto poison = [&](const PackedMatrix& matrix, int64_t offset, int32_t first_block) {
    const int32_t used = matrix.columns % kBlockColumns;
    for (int32_t b = first_block; b < matrix.blocks; ++b) {
      for (int32_t word = 0; word < matrix.depth_padded / 2; ++word) {
        std::byte* words = record.data() + offset + b * matrix.block_bytes + word * 256;
        std::memset(words + used * 4, 0x7f, static_cast<size_t>(kBlockColumns - used) * 4);
      }
    }
  };
  poison(layout.gate_up, layout.gate_up_offset, layout.gate_up.blocks - 2);
  poison(layout.down, layout.down_offset, layout.down.blocks - 1);
  for (const KernelTable* table : all_tables()) {
    const auto products = run_ffn(*table, shape, record, rows);
    if (rounds_alike(*table, shape.format, rows.count())) {
      EXPECT_TRUE(same_bits(products, clean)) << table->name;
    } else {
      for (int32_t r = 0; r < rows.count(); ++r) {
        EXPECT_TRUE(std::isfinite(products[rows.out_rows[r] * shape.hidden])) << table->name;
      }
    }
  }
}

TEST(ExpertFfn, TakesEveryTypeOfActivation) {
  Random random;
  const Shape shape{Format::kInt8, 64, 100, 64};
  for (const KernelTable* table : all_tables()) {
    const ExpertFfn ffn(shape.layout(), shape.activation, {}, *table);
    // Small integers are exact in all three types; an odd byte offset makes them unaligned.
    Bytes wide(4 * shape.hidden + 1), half(2 * shape.hidden + 1), brain(2 * shape.hidden + 1);
    for (int32_t k = 0; k < shape.hidden; ++k) {
      const int32_t value = k % 17 - 8;
      const auto single = static_cast<float>(value);
      const auto float16 = static_cast<_Float16>(value);
      uint32_t bits;
      std::memcpy(&bits, &single, 4);
      const auto bfloat = static_cast<uint16_t>(bits >> 16);
      std::memcpy(wide.data() + 1 + 4 * k, &single, 4);
      std::memcpy(half.data() + 1 + 2 * k, &float16, 2);
      std::memcpy(brain.data() + 1 + 2 * k, &bfloat, 2);
    }
    Bytes from_wide(ffn.prepared_bytes(1)), from_half(ffn.prepared_bytes(1)),
        from_brain(ffn.prepared_bytes(1));
    const auto prepare = [&](const Bytes& x, ScalarType type, const Bytes& to) {
      ffn.prepare(x.data() + 1, type, 0, 0, 1, to.data());
    };
    prepare(wide, ScalarType::kFloat32, from_wide);
    prepare(half, ScalarType::kFloat16, from_half);
    prepare(brain, ScalarType::kBf16, from_brain);
    EXPECT_TRUE(from_wide == from_half) << table->name;
    EXPECT_TRUE(from_wide == from_brain) << table->name;
  }
}

TEST(Linear, AgreesWithFloat64) {
  Random random;
  for (const Shape& shape : shapes()) {
    SCOPED_TRACE(name_of(shape));
    const RecordLayout layout = shape.layout();
    const Bytes record = Weights(layout, random).pack(kernel_table());
    const Unpacked weights(layout, record);
    for (int32_t projection : {0, 1}) {
      const int32_t depth = projection == 0 ? shape.hidden : shape.intermediate;
      const int32_t columns = projection == 0 ? layout.halves() * shape.intermediate : shape.hidden;
      const auto& matrix = projection == 0 ? weights.gate_up : weights.down;
      const auto& bias = projection == 0 ? weights.gate_up_bias : weights.down_bias;
      const int32_t rows = 1 + random.below(6), first = 2;
      const auto x = random.normals(int64_t{rows + first} * depth);
      for (const KernelTable* table : all_tables()) {
        const ExpertFfn ffn(layout, shape.activation, {}, *table);
        const int64_t stride = columns + 5;
        std::vector<float> out(static_cast<size_t>(rows * stride), -1.0f);
        Bytes prepared(projection == 0 ? ffn.prepared_bytes(rows + first)
                                       : ffn.prepared_hidden_bytes(rows + first));
        const auto prepare = projection == 0 ? &ExpertFfn::prepare : &ExpertFfn::prepare_hidden;
        (ffn.*prepare)(x.data(), ScalarType::kFloat32, depth, 0, rows + first, prepared.data());
        for (int32_t task = 0; task < ffn.linear_tasks(projection); ++task) {
          ffn.linear(projection, task, 1, prepared.data(), record.data(), first, rows, out.data(),
                     stride);
        }
        for (int32_t r = 0; r < rows; ++r) {
          const float* row = x.data() + int64_t{r + first} * depth;
          double amax = 0;
          for (int32_t k = 0; k < depth; ++k) amax = std::max(amax, std::abs(double{row[k]}));
          for (int32_t c = 0; c < columns; ++c) {
            double sum = shape.bias ? bias[c] : 0.0f, rounding = 1e-5;
            for (int32_t k = 0; k < depth; ++k) {
              const double weight = matrix[int64_t{c} * depth + k];
              sum += weight * row[k];
              // The bound on the rounding of an activation: half a bf16 ulp, or half a
              // quantization step.
              rounding +=
                  std::abs(weight) * (has_float_products(shape.format) ? std::abs(row[k]) * 0x1p-8
                                                                       : amax / 127 * 0.51);
            }
            ASSERT_NEAR(out[r * stride + c], sum, rounding) << table->name;
          }
          for (int64_t c = columns; c < stride; ++c) ASSERT_EQ(out[r * stride + c], -1.0f);
        }
      }
    }
  }
}

// One row: all blocks one at a time, or two at a time from the first or the second on.
TEST(Linear, TwoBlocksAtOnceHaveTheBitsOfEachAlone) {
  Random random;
  for (const Shape& shape : shapes()) {
    SCOPED_TRACE(name_of(shape));
    const RecordLayout layout = shape.layout();
    const Bytes record = Weights(layout, random).pack(kernel_table());
    for (int32_t projection : {0, 1}) {
      const int32_t depth = projection == 0 ? shape.hidden : shape.intermediate;
      const int32_t columns = projection == 0 ? layout.halves() * shape.intermediate : shape.hidden;
      const auto x = random.normals(depth);
      for (const KernelTable* table : all_tables()) {
        const ExpertFfn ffn(layout, shape.activation, {}, *table);
        const int32_t tasks = ffn.linear_tasks(projection);
        Bytes prepared(projection == 0 ? ffn.prepared_bytes(1) : ffn.prepared_hidden_bytes(1));
        const auto prepare = projection == 0 ? &ExpertFfn::prepare : &ExpertFfn::prepare_hidden;
        (ffn.*prepare)(x.data(), ScalarType::kFloat32, depth, 0, 1, prepared.data());
        const auto run = [&](int32_t first, int32_t at_once) {
          std::vector<float> out(static_cast<size_t>(columns), -1.0f);
          for (int32_t task = 0, count = first; task < tasks; task += count, count = at_once) {
            count = std::min(count, tasks - task);
            ffn.linear(projection, task, count, prepared.data(), record.data(), 0, 1, out.data(),
                       columns);
          }
          return out;
        };
        const auto alone = run(1, 1);
        EXPECT_TRUE(same_bits(alone, run(2, 2))) << table->name;
        EXPECT_TRUE(same_bits(alone, run(1, 2))) << table->name;
      }
    }
  }
}

// Numbers of rows at which a task has several passes, and the last one fewer rows than tiles take.
TEST(ExpertFfn, ManyRowsAgreeWithTheProductsOfFew) {
  Random random;
  std::vector<Shape> cases;
  for (int32_t group : {32, 64, 128}) {
    for (Format format : {Format::kInt8, Format::kInt4, Format::kLut4, Format::kInt8Fp16,
                          Format::kInt4Fp16, Format::kFp8}) {
      cases.push_back({format, group, 200, 300});
    }
  }
  cases.push_back({Format::kMxfp4, 32, 200, 300});
  cases.push_back({Format::kNvfp4, 16, 200, 300});
  cases.push_back({Format::kTcq2, 64, 200, 300});
  cases.push_back({Format::kTcq3, 128, 200, 300});
  cases.push_back(
      {.format = Format::kTcq2, .hidden = 200, .intermediate = 300, .down = Format::kTcq3});
  cases.push_back({Format::kFp8, 0, 200, 300});
  cases.push_back({Format::kBf16, 64, 2100, 65});
  cases.push_back({Format::kBf12, 64, 2100, 65});
  for (Format format : kGgufFormats) cases.push_back({format, 32, 256, 256});
  for (const Shape& shape : cases) {
    SCOPED_TRACE(name_of(shape));
    const Bytes record = Weights(shape.layout(), random).pack(kernel_table());
    for (const KernelTable* table : all_tables()) {
      SCOPED_TRACE(table->name);
      KernelTable few = *table;
      few.panel_rows = kNoRows;
      for (FormatKernels& kernels : few.formats) kernels.tiles = nullptr;
      std::vector<int32_t> counts{20, 45, 100};
      const FormatKernels& kernels = table->of(shape.format);
      if (kernels.tiles != nullptr) {
        counts.insert(counts.end(), {kernels.tile_rows - 1, kernels.tile_rows});
      }
      for (int32_t count : counts) {
        const Rows rows(shape.layout(), count, random);
        const auto products = run_ffn(*table, shape, record, rows);
        const auto expected = run_ffn(few, shape, record, rows);
        if (has_float_products(shape.format) && kernels.tiles != nullptr) {
          const std::vector<double> wide(expected.begin(), expected.end());
          EXPECT_LT(relative_error(products, wide, rows), 2e-3);
        } else {
          EXPECT_TRUE(same_bits(products, expected));
        }
      }
    }
  }
}

// Gaussian weights and activations, of Qwen3-30B-A3B's sizes, against float64.
TEST(Accuracy, ErrorOfOneExpertIsWithinItsLimit) {
  Random random;
  const struct {
    Format format;
    int32_t group;
    double limit;
  } promises[] = {{Format::kBf16, 64, 0.005}, {Format::kBf12, 64, 0.005},
                  {Format::kInt8, 64, 0.018}, {Format::kInt4, 64, 0.165},
                  {Format::kInt4, 32, 0.145}, {Format::kLut4, 64, 0.14},
                  {Format::kLut4, 32, 0.125}};
  for (const auto& promise : promises) {
    const Shape shape{promise.format, promise.group, 2048, 768};
    Weights weights(shape.layout(), random);
    const Bytes record = weights.pack(kernel_table());
    Unpacked exact(shape.layout(), record);
    exact.gate_up = weights.gate;
    exact.gate_up.insert(exact.gate_up.end(), weights.up.begin(), weights.up.end());
    exact.down = weights.down;
    Rows rows(shape.layout(), 48, random);
    std::fill(rows.weights.begin(), rows.weights.end(), 1.0f);  // all rows count the same
    const auto products = run_ffn(kernel_table(), shape, record, rows);
    const double error = relative_error(products, ffn_reference(shape, exact, rows), rows);
    std::printf("%s: error %.2f %%, promised %.1f %%\n", name_of(shape).c_str(), 100 * error,
                100 * promise.limit);
    EXPECT_LT(error, promise.limit) << name_of(shape);
  }
}

double ulps(float value, double exact) {
  if (std::abs(exact) < 3e-37) return std::abs(value - exact) < 3e-37 ? 0 : HUGE_VAL;
  int exponent;
  std::frexp(exact, &exponent);
  return std::abs(value - exact) / std::ldexp(1.0, exponent - 24);
}

TEST(Activations, StayWithinTheirErrorAndAgreeToTheBit) {
  const struct {
    Activation activation;
    double limit;
    float low;
  } limits[] = {{Activation::kSilu, 3, -200},
                {Activation::kGelu, 4, -40},
                {Activation::kGeluTanh, 15, -4},
                {Activation::kRelu2, 1, -200},
                {kSwigluOai, 14, -9},
                {kClamped, 5, -80},
                {kSoftcapped, 8, -80},
                {{Activation::kSwiglu, 1, 0, HUGE_VALF, HUGE_VALF}, 3, -80}};
  for (const auto& limit : limits) {
    std::vector<float> x;
    for (float value = limit.low; value < 40; value += 0x1p-11f * 1.37f) x.push_back(value);
    for (float tiny = 1; tiny > 1e-30f; tiny /= 3) x.insert(x.end(), {tiny, -tiny});
    x.resize(static_cast<size_t>(round_up(static_cast<int64_t>(x.size()), 64)), 0.0f);
    const auto count = static_cast<int32_t>(x.size());
    // Activations that only multiply by up get up = 1, so that only their own error remains.
    std::vector<float> up(x.size(), 1.0f);
    if (limit.activation.needs_gate()) {
      for (size_t i = 0; i < up.size(); ++i) up[i] = static_cast<float>(i % 1009) * 0.0171f - 8.6f;
    }
    std::vector<float> oracle = x;
    kScalarTable.activate(limit.activation, oracle.data(), up.data(), count);
    double worst = 0;
    for (size_t i = 0; i < x.size(); ++i) {
      worst = std::max(worst, ulps(oracle[i], activation_reference(limit.activation, x[i], up[i])));
    }
    std::printf("activation %d: %.2f ulp\n", limit.activation.kind, worst);
    EXPECT_LT(worst, limit.limit);
    for (const KernelTable* table : all_tables()) {
      std::vector<float> values = x;
      table->activate(limit.activation, values.data(), up.data(), count);
      EXPECT_TRUE(same_bits(values, oracle)) << table->name;
      if (limit.activation.needs_gate()) continue;
      values = x;
      table->activate(limit.activation, values.data(), nullptr, count);
      EXPECT_TRUE(same_bits(values, oracle)) << table->name;
    }
  }
}

TEST(Activations, KeepNanAndInfinity) {
  for (const KernelTable* table : all_tables()) {
    for (const Activation::Kind activation :
         {Activation::kSilu, Activation::kGelu, Activation::kGeluTanh, Activation::kRelu2}) {
      std::vector<float> x(64, std::numeric_limits<float>::quiet_NaN());
      x[1] = HUGE_VALF;
      table->activate(activation, x.data(), nullptr, 64);
      EXPECT_TRUE(std::isnan(x[0]));
      EXPECT_EQ(x[1], HUGE_VALF);
    }
  }
}

struct Activated {
  float gate, up;
  double expected;  // NaN: any NaN
};

// Takes at most 64 cases.
void expect_activated(const Activation& activation, std::span<const Activated> cases) {
  for (const KernelTable* table : all_tables()) {
    SCOPED_TRACE(table->name);
    std::vector<float> gate(64), up(64);
    for (size_t i = 0; i < cases.size(); ++i) {
      gate[i] = cases[i].gate;
      up[i] = cases[i].up;
    }
    table->activate(activation, gate.data(), up.data(), 64);
    for (size_t i = 0; i < cases.size(); ++i) {
      SCOPED_TRACE(i);
      if (std::isnan(cases[i].expected)) {
        EXPECT_TRUE(std::isnan(gate[i])) << gate[i];
      } else {
        EXPECT_LE(ulps(gate[i], cases[i].expected), 4) << gate[i];
      }
    }
  }
}

// As in torch: clamp keeps NaN and makes infinities finite. A gate of -inf is not clamped and gives
// -inf * 0.
TEST(Activations, SwigluoaiTreatsNonFiniteValuesAsTorchDoes) {
  constexpr float kNan = std::numeric_limits<float>::quiet_NaN();
  const double highest = activation_reference(kSwigluOai, 7, 7);
  const double lowest = activation_reference(kSwigluOai, 7, -7);
  const Activated cases[] = {
      {kNan, 1, kNan},         {1, kNan, kNan},         {kNan, kNan, kNan},
      {kNan, -1, kNan},        {0, kNan, kNan},         {HUGE_VALF, 7, highest},
      {7, HUGE_VALF, highest}, {1e30f, 1e30f, highest}, {HUGE_VALF, -HUGE_VALF, lowest},
      {7, -1e30f, lowest},     {-HUGE_VALF, 1, kNan},   {-HUGE_VALF, kNan, kNan},
      {-1e30f, 1, -0.0},       {-1e30f, -1e30f, 0.0},   {7.5f, -1, 0.0}};
  expect_activated(kSwigluOai, cases);
}

TEST(Activations, SoftcapTreatsNonFiniteValuesAsTorchDoes) {
  constexpr float kNan = std::numeric_limits<float>::quiet_NaN();
  const Activated cases[] = {{kNan, 1, kNan},       {1, kNan, kNan},  {HUGE_VALF, HUGE_VALF, 100},
                             {1e30f, -1e30f, -100}, {-1e30f, 1, 0.0}, {HUGE_VALF, 0, 0}};
  expect_activated(kSoftcapped, cases);
}

TEST(Activations, AreFoundByName) {
  EXPECT_EQ(activation_from_name("gelu_tanh"), Activation(Activation::kGeluTanh));
  EXPECT_EQ(activation_from_name("relu2"), Activation(Activation::kRelu2));
  EXPECT_EQ(activation_from_name("swigluoai"), kSwigluOai);
  EXPECT_EQ(activation_from_name("swiglu(alpha=1.702,offset=1,gate=7,up=7)"), kSwigluOai);
  EXPECT_EQ(activation_from_name("swiglu(gate=3.0,up=2.0)"), kClamped);
  EXPECT_EQ(activation_from_name("swiglu()"), Activation(Activation::kSwiglu));
  EXPECT_EQ(activation_from_name("softcap(gate=4,up=25)"), kSoftcapped);
  for (const char* name : {"swish9",
                           "",
                           "(",
                           ")",
                           "swiglu",
                           "swiglu(",
                           "silu()",
                           "swiglu(gate)",
                           "swiglu(gate=)",
                           "swiglu(gate=0)",
                           "swiglu(gate=-1)",
                           "swiglu(gate=nan)",
                           "swiglu(up=inf)",
                           "swiglu(gate=1x)",
                           "swiglu(beta=1)",
                           "swiglu(gate=1 ,up=2)",
                           "swiglu(alpha=0)",
                           "softcap(gate=4)",
                           "softcap(gate=4,up=25,alpha=1)",
                           "softcap(gate=1e99,up=1)"}) {
    EXPECT_THROW(activation_from_name(name), Error) << name;
  }
}

TEST(KernelTables, AreFoundByName) {
  EXPECT_EQ(kernel_tables().front(), "scalar");
  for (std::string_view name : kernel_tables()) {
    EXPECT_EQ(name, kernel_table_name(kernel_table(name)));
  }
  EXPECT_THROW(kernel_table("sse9"), Error);
}

void exit_with_the_table_that(const char* isa, const char* expected) {
  ::setenv("TORCH_MESH_ISA", isa, 1);
  std::exit(std::strcmp(kernel_table_name(kernel_table()), expected) == 0 ? 0 : 1);
}

TEST(KernelTables, TheEnvironmentVariableChoosesTheTable) {
  GTEST_FLAG_SET(death_test_style, "threadsafe");  // a new process has not chosen a table yet
  EXPECT_EXIT(exit_with_the_table_that("scalar", "scalar"), ::testing::ExitedWithCode(0), "");
  EXPECT_EXIT(exit_with_the_table_that("", kernel_tables().back().data()),
              ::testing::ExitedWithCode(0), "");
}

}  // namespace
}  // namespace torch_mesh::testing
