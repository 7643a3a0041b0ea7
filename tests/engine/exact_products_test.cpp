// Products in fp32 on packed weights, against float64 on the output of unpack_record.
#include "kernels/exact_products.h"

#include <cmath>
#include <vector>

#include "kernels_fixture.h"

namespace torch_mesh::testing {
namespace {

std::vector<Shape> shapes() {
  std::vector<Shape> all;
  int32_t n = 0;
  for (Format format : kAllFormats) {
    for (int32_t group : {32, 64, 128}) {
      const int32_t hidden[] = {1, 200, 256, 63}, intermediate[] = {100, 1, 192};
      all.push_back({format, group, hidden[n % 4], intermediate[n % 3], n % 2 == 0});
      ++n;
    }
  }
  for (Format format : kGgufFormats) all.push_back({format, 32, 256, 512, n++ % 2 == 0});
  return all;
}

constexpr int32_t kRowCounts[] = {0, 1, 2, 5, 33, 300};  // 300 is more than one pass takes

// Rows with NaN between them.
struct Matrix {
  Matrix(int32_t rows, int32_t columns, Random& random)
      : columns(columns),
        stride(columns + 3),
        values(static_cast<size_t>(rows * stride), std::numeric_limits<float>::quiet_NaN()) {
    for (int32_t r = 0; r < rows; ++r) {
      for (int32_t c = 0; c < columns; ++c) at(r, c) = random.normal();
    }
  }
  float& at(int32_t row, int32_t column) {
    return values[static_cast<size_t>(row * stride + column)];
  }
  FloatRows rows(int32_t count) const { return {values.data(), stride, count}; }

  int32_t columns;
  int64_t stride;
  std::vector<float> values;
};

// One projection of a packed expert, and its unpacked weights [outputs][inputs].
struct Projection {
  PackedMatrix matrix;
  int32_t halves;
  const std::byte* blocks;
  const std::vector<float>* weights;

  int32_t outputs() const { return halves * matrix.columns; }
  float weight(int32_t output, int32_t input) const {
    return (*weights)[static_cast<size_t>(output) * matrix.depth + input];
  }
};

enum class Way { kOutputs, kInputs };

std::vector<float> run(const KernelTable& table, const Projection& projection, Way way,
                       const FloatRows& rows) {
  const ExactProducts products(table, projection.matrix, projection.halves, projection.blocks);
  const int32_t columns = way == Way::kOutputs ? projection.outputs() : projection.matrix.depth;
  std::vector<float> out(static_cast<size_t>(rows.count * columns), NAN);
  if (way == Way::kOutputs) {
    for (int32_t t = 0; t < products.output_tasks(); ++t) {
      products.outputs(t, rows, out.data(), columns);
    }
  } else {
    for (int32_t t = 0; t < products.input_tasks(); ++t) {
      products.inputs(t, rows, out.data(), columns);
    }
  }
  return out;
}

// Checks each element against the error bound of an fp32 sum of its terms.
void expect_close(const std::vector<float>& found, const Projection& projection, Way way, Matrix& x,
                  int32_t rows) {
  const bool forwards = way == Way::kOutputs;
  const int32_t columns = forwards ? projection.outputs() : projection.matrix.depth;
  for (int32_t r = 0; r < rows; ++r) {
    for (int32_t c = 0; c < columns; ++c) {
      double sum = 0, size = 0;
      for (int32_t k = 0; k < x.columns; ++k) {
        const double weight = forwards ? projection.weight(c, k) : projection.weight(k, c);
        sum += x.at(r, k) * weight;
        size += std::abs(x.at(r, k) * weight);
      }
      ASSERT_NEAR(found[static_cast<size_t>(r * columns + c)], sum, 1e-5 * size + 1e-30)
          << "row " << r << ", column " << c;
    }
  }
}

void test_projection(const Projection& projection, Random& random) {
  for (Way way : {Way::kOutputs, Way::kInputs}) {
    SCOPED_TRACE(way == Way::kOutputs ? "outputs" : "inputs");
    const int32_t count = kRowCounts[random.below(std::size(kRowCounts))];
    const int32_t columns = way == Way::kOutputs ? projection.matrix.depth : projection.outputs();
    Matrix x(count, columns, random);
    const auto expected = run(kScalarTable, projection, way, x.rows(count));
    expect_close(expected, projection, way, x, std::min(count, 5));
    for (const KernelTable* table : all_tables()) {
      const auto found = run(*table, projection, way, x.rows(count));
      EXPECT_TRUE(same_bits(found, expected)) << table->name;
    }
    if (count < 2) continue;
    // NaN in one row affects no other row, and a row computed alone has the same bits as among
    // others.
    for (int32_t c = 0; c < columns; ++c) x.at(0, c) = NAN;
    const auto spoilt = run(kernel_table(), projection, way, x.rows(count));
    const auto width = static_cast<std::ptrdiff_t>(expected.size() / static_cast<size_t>(count));
    for (std::ptrdiff_t i = 0; i < width; ++i) EXPECT_TRUE(std::isnan(spoilt[i]));
    EXPECT_TRUE(std::equal(spoilt.begin() + width, spoilt.end(), expected.begin() + width));
    const FloatRows last{x.values.data() + (count - 1) * x.stride, x.stride, 1};
    const auto alone = run(kernel_table(), projection, way, last);
    EXPECT_TRUE(std::equal(alone.begin(), alone.end(), expected.end() - width));
  }
}

TEST(ExactProducts, AgreeWithFloat64AndAcrossTables) {
  Random random;
  for (const Shape& shape : shapes()) {
    SCOPED_TRACE(name_of(shape));
    const RecordLayout layout = shape.layout();
    const Weights weights(layout, random);
    const Bytes record = weights.pack(kernel_table());
    const Unpacked unpacked(layout, record);
    test_projection(
        {layout.gate_up, layout.halves(), record.data() + layout.gate_up_offset, &unpacked.gate_up},
        random);
    test_projection({layout.down, 1, record.data() + layout.down_offset, &unpacked.down}, random);
  }
}

// A row with a single 1 selects the weights of one input exactly.
TEST(ExactProducts, OneHotRowsGiveTheExactWeights) {
  Random random;
  for (Format format : kAllFormats) {
    const Shape shape{format, 32, 130, 70};
    SCOPED_TRACE(name_of(shape));
    const RecordLayout layout = shape.layout();
    const Bytes record = Weights(layout, random).pack(kScalarTable);
    const Unpacked unpacked(layout, record);
    const Projection gate_up{layout.gate_up, layout.halves(), record.data() + layout.gate_up_offset,
                             &unpacked.gate_up};
    for (const KernelTable* table : all_tables()) {
      Matrix ones(130, 130, random);
      for (int32_t r = 0; r < 130; ++r) {
        for (int32_t c = 0; c < 130; ++c) ones.at(r, c) = r == c ? 1.0f : 0.0f;
      }
      const auto columns = run(*table, gate_up, Way::kOutputs, ones.rows(130));
      for (int32_t input = 0; input < 130; ++input) {
        for (int32_t output = 0; output < 140; ++output) {
          // 2^-127, the smallest E8M0 scale, counts as zero.
          const float weight = gate_up.weight(output, input);
          const float known = std::abs(weight) < 0x1p-120f ? 0.0f : weight;
          ASSERT_EQ(columns[static_cast<size_t>(input * 140 + output)], known) << table->name;
        }
      }
    }
  }
}

}  // namespace
}  // namespace torch_mesh::testing
