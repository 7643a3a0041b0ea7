// One expert with random weights, and a reference for its output.
#pragma once

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <limits>
#include <memory>
#include <optional>
#include <random>
#include <string>
#include <vector>

#include "codes_fixture.h"
#include "kernels/expert_ffn.h"
#include "kernels/kernel_table.h"
#include "kernels/pack.h"
#include "kernels/task_products.h"
#include "seed.h"

namespace torch_mesh {

extern const KernelTable kEmulatedAvxVnniTable;
extern const KernelTable kEmulatedVnniTable;
extern const KernelTable kEmulatedBf16Table;
extern const KernelTable kEmulatedZen4Bf16Table;
extern const KernelTable kEmulatedAmxTable;

namespace testing {

class Random {
 public:
  Random() : engine_(seed()) {}
  float normal() { return normal_(engine_); }
  int32_t below(int32_t end) { return std::uniform_int_distribution<int32_t>(0, end - 1)(engine_); }
  std::vector<float> normals(int64_t count, float scale = 1.0f) {
    std::vector<float> values(static_cast<size_t>(count));
    for (float& value : values) value = normal() * scale;
    return values;
  }
  std::vector<int32_t> permutation(int32_t count) {
    std::vector<int32_t> order(static_cast<size_t>(count));
    for (int32_t i = 0; i < count; ++i) order[static_cast<size_t>(i)] = i;
    std::shuffle(order.begin(), order.end(), engine_);
    return order;
  }

 private:
  std::mt19937_64 engine_;
  std::normal_distribution<float> normal_;
};

// Memory aligned to 64 bytes, filled with a byte that reads as NaN in floats and as a meaningless
// value in integers.
class Bytes {
 public:
  explicit Bytes(int64_t count, uint8_t fill = 0xff)
      : count_(count),
        data_(static_cast<std::byte*>(
            std::aligned_alloc(64, static_cast<size_t>(round_up(count + 1, 64))))) {
    std::memset(data_.get(), fill, static_cast<size_t>(count));
  }
  std::byte* data() const { return data_.get(); }
  int64_t size() const { return count_; }
  bool operator==(const Bytes& other) const {
    return count_ == other.count_ &&
           std::memcmp(data(), other.data(), static_cast<size_t>(count_)) == 0;
  }

 private:
  struct Free {
    void operator()(std::byte* data) const { std::free(data); }
  };
  int64_t count_;
  std::unique_ptr<std::byte, Free> data_;
};

inline constexpr Activation kClamped{Activation::kSwiglu, 1.0f, 0.0f, 3.0f, 2.0f};
inline constexpr Activation kSoftcapped{Activation::kSoftcap, 1.0f, 0.0f, 4.0f, 25.0f};
inline constexpr Activation kActivations[] = {
    Activation::kSilu, Activation::kGelu, Activation::kGeluTanh, Activation::kRelu2, kSwigluOai,
    kClamped,          kSoftcapped};

inline constexpr Format kRoundedFormats[] = {Format::kBf16, Format::kBf12, Format::kInt8,
                                             Format::kInt4, Format::kLut4, Format::kTcq2,
                                             Format::kTcq3};
inline constexpr Format kAllFormats[] = {Format::kBf16,     Format::kBf12,  Format::kInt8,
                                         Format::kInt4,     Format::kLut4,  Format::kInt8Fp16,
                                         Format::kInt4Fp16, Format::kMxfp4, Format::kNvfp4,
                                         Format::kFp8,      Format::kTcq2,  Format::kTcq3};

inline constexpr Format kGgufFormats[] = {
    Format::kQ4_1,   Format::kQ5_0,  Format::kQ5_1,  Format::kQ2K,   Format::kQ3K,    Format::kQ4K,
    Format::kQ5K,    Format::kQ6K,   Format::kIq4Nl, Format::kIq4Xs, Format::kIq3Xxs, Format::kIq3S,
    Format::kIq2Xxs, Format::kIq2Xs, Format::kIq2S,  Format::kIq1S,  Format::kIq1M};

struct Shape {
  Format format = Format::kBf16;
  int32_t group = 64;
  int32_t hidden = 192;
  int32_t intermediate = 100;
  bool gated = true;
  bool bias = false;
  Activation activation = Activation::kSilu;
  std::optional<Format> down = {};  // if it differs from `format`

  RecordLayout layout() const {
    const int32_t known = format == Format::kFp8 && group == 64 ? 0 : group;
    return RecordLayout::make({format, down.value_or(format)}, known, hidden, intermediate, gated,
                              bias);
  }
};

inline std::string name_of(const Shape& shape) {
  return std::string(format_name(shape.format)) +
         (shape.down ? std::string("+") + format_name(*shape.down) : "") + " g" +
         std::to_string(shape.group) + " " + std::to_string(shape.hidden) + "x" +
         std::to_string(shape.intermediate) + (shape.gated ? " gated" : "") +
         (shape.bias ? " bias" : "") + " activation " + std::to_string(shape.activation.kind);
}

// Weights in fp32, row-major, as a checkpoint would hold them.
struct Weights {
  Weights(const RecordLayout& layout, Random& random)
      : layout(layout),
        gate(random.normals(int64_t{layout.hidden} * layout.intermediate, 0.05f)),
        up(random.normals(int64_t{layout.hidden} * layout.intermediate, 0.05f)),
        down(random.normals(int64_t{layout.hidden} * layout.intermediate, 0.05f)),
        gate_bias(random.normals(layout.intermediate)),
        up_bias(random.normals(layout.intermediate)),
        down_bias(random.normals(layout.hidden)) {
    if (!is_made_of_codes(layout.down.format)) return;
    const auto below = [&](int32_t end) { return random.below(end); };
    const auto matrix = [&](const PackedMatrix& of, int32_t rows, int32_t depth) {
      codes.emplace_back(of.format, of.group_size, rows, depth, below);
    };
    matrix(layout.gate_up, layout.intermediate, layout.hidden);
    matrix(layout.gate_up, layout.intermediate, layout.hidden);
    matrix(layout.down, layout.hidden, layout.intermediate);
  }

  ExpertViews views() const {
    const auto matrix = [](const std::vector<float>& values, int64_t columns) {
      return MatrixView{values.data(), ScalarType::kFloat32, columns, 1};
    };
    ExpertViews views;
    if (layout.gated) views.gate = matrix(gate, layout.hidden);
    views.up = matrix(up, layout.hidden);
    views.down = matrix(down, layout.intermediate);
    if (!layout.bias) return views;
    if (layout.gated) views.gate_bias = matrix(gate_bias, 1);
    views.up_bias = matrix(up_bias, 1);
    views.down_bias = matrix(down_bias, 1);
    return views;
  }

  Bytes pack(const KernelTable& table) const {
    Bytes record(layout.bytes);
    if (codes.empty()) {
      pack_record(layout, views(), record.data(), table);
      return record;
    }
    const ExpertViews floats = views();
    ExpertCodes all;
    all.up = codes[1].view();
    all.down = codes[2].view();
    all.gate_bias = floats.gate_bias;
    all.up_bias = floats.up_bias;
    all.down_bias = floats.down_bias;
    if (layout.gated) all.gate = codes[0].view();
    pack_record(layout, all, record.data());
    return record;
  }

  RecordLayout layout;
  std::vector<float> gate, up, down, gate_bias, up_bias, down_bias;
  std::vector<Codes> codes;  // gate, up and down, if the format holds codes
};

// The output of unpack_record.
struct Unpacked {
  Unpacked(const RecordLayout& layout, const Bytes& record)
      : gate_up(static_cast<size_t>(layout.halves()) * layout.intermediate * layout.hidden),
        down(static_cast<size_t>(layout.intermediate) * layout.hidden),
        gate_up_bias(static_cast<size_t>(layout.halves()) * layout.intermediate),
        down_bias(static_cast<size_t>(layout.hidden)) {
    unpack_record(layout, record.data(), gate_up.data(), down.data(), gate_up_bias.data(),
                  down_bias.data());
  }
  std::vector<float> gate_up, down, gate_up_bias, down_bias;
};

// x in rows `stride` apart with NaN between them, and the rows that one expert computes.
struct Rows {
  Rows(const RecordLayout& layout, int32_t count, Random& random)
      : layout(layout),
        tokens(random.permutation(count + 3)),
        out_rows(random.permutation(count + 3)),
        weights(random.normals(count)),
        stride(layout.hidden + 3),
        x(static_cast<size_t>((count + 3) * stride), std::numeric_limits<float>::quiet_NaN()) {
    tokens.resize(static_cast<size_t>(count));
    for (int32_t r = 0; r < count + 3; ++r) {
      for (int32_t k = 0; k < layout.hidden; ++k) row(r)[k] = random.normal();
    }
  }
  int32_t count() const { return static_cast<int32_t>(tokens.size()); }
  int32_t all() const { return static_cast<int32_t>(out_rows.size()); }
  float* row(int32_t r) { return x.data() + r * stride; }
  const float* row(int32_t r) const { return x.data() + r * stride; }

  RecordLayout layout;
  std::vector<int32_t> tokens, out_rows;  // three rows belong to no expert
  std::vector<float> weights;
  int64_t stride;
  std::vector<float> x;
};

// Runs the whole expert. Returns its products in fp32, NaN where nothing was written.
inline std::vector<float> run_ffn(const KernelTable& table, const Shape& shape, const Bytes& record,
                                  const Rows& rows, const Runtime& runtime = {},
                                  bool backwards = false) {
  const ExpertFfn ffn(shape.layout(), shape.activation, runtime, table);
  Bytes prepared(ffn.prepared_bytes(rows.all()));
  ffn.prepare(rows.x.data(), ScalarType::kFloat32, rows.stride, 0, rows.all(), prepared.data());
  Bytes scratch(ffn.scratch_bytes(rows.count()));
  std::vector<float> products(static_cast<size_t>(rows.all()) * shape.hidden,
                              std::numeric_limits<float>::quiet_NaN());
  const ExpertRows expert{record.data(),       rows.count(),         rows.tokens.data(),
                          rows.weights.data(), rows.out_rows.data(), products.data(),
                          scratch.data()};
  const auto in_order = [backwards](int32_t task, int32_t tasks) {
    return backwards ? tasks - 1 - task : task;
  };
  for (int32_t t = 0; t < ffn.gate_up_tasks(); ++t) {
    ffn.gate_up(in_order(t, ffn.gate_up_tasks()), prepared.data(), expert);
  }
  const int32_t tasks = ffn.down_tasks(), at_once = blocks_at_once(rows.count());
  for (int32_t t = 0; t < tasks; t += at_once) {
    const int32_t count = std::min(at_once, tasks - t);
    ffn.down(backwards ? tasks - t - count : t, count, expert);
  }
  return products;
}

// Gate and up combined; an expert without a gate has up = 1.
inline double activation_reference(const Activation& activation, double x, double up) {
  const double gate_limit = activation.gate_limit, up_limit = activation.up_limit;
  switch (activation.kind) {
    case Activation::kSilu:
      return x / (1 + std::exp(-x)) * up;
    case Activation::kGelu:
      return x * 0.5 * std::erfc(-x / std::sqrt(2.0)) * up;
    case Activation::kGeluTanh:
      return x / (1 + std::exp(-2 * std::sqrt(2 / M_PI) * (x + 0.044715 * x * x * x))) * up;
    case Activation::kRelu2:
      return x > 0 ? x * x * up : 0;
    case Activation::kSwiglu: {
      const double gate = x > gate_limit ? gate_limit : x;
      const double limited = up > up_limit ? up_limit : up < -up_limit ? -up_limit : up;
      return (limited + activation.offset) * gate / (1 + std::exp(-activation.alpha * gate));
    }
    case Activation::kSoftcap:
      return gate_limit * std::tanh(x / gate_limit) / (1 + std::exp(-x)) * up_limit *
             std::tanh(up / up_limit);
  }
  return 0;
}

// weight * (combined(x gate + b, x up + b) down + b) in float64: [all rows][hidden], at the rows'
// `out_rows`.
inline std::vector<double> ffn_reference(const Shape& shape, const Unpacked& weights,
                                         const Rows& rows) {
  const int32_t intermediate = shape.intermediate, hidden = shape.hidden;
  const auto dot = [](const float* a, const auto* b, int32_t count) {
    double sum = 0;
    for (int32_t k = 0; k < count; ++k) sum += double{a[k]} * double{b[k]};
    return sum;
  };
  std::vector<double> products(static_cast<size_t>(rows.all()) * hidden, 0.0);
  std::vector<double> h(static_cast<size_t>(intermediate));
  for (int32_t r = 0; r < rows.count(); ++r) {
    const float* x = rows.row(rows.tokens[r]);
    const auto project = [&](int32_t row) {
      const float* w = weights.gate_up.data() + int64_t{row} * hidden;
      return dot(w, x, hidden) + (shape.bias ? weights.gate_up_bias[row] : 0.0f);
    };
    for (int32_t i = 0; i < intermediate; ++i) {
      const double up = shape.gated ? project(intermediate + i) : 1;
      h[i] = activation_reference(shape.activation, project(i), up);
    }
    for (int32_t c = 0; c < hidden; ++c) {
      const double sum =
          dot(weights.down.data() + int64_t{c} * intermediate, h.data(), intermediate);
      const double bias = shape.bias ? weights.down_bias[c] : 0.0f;
      products[int64_t{rows.out_rows[r]} * hidden + c] = rows.weights[r] * (sum + bias);
    }
  }
  return products;
}

// |a - b| / |b| over the rows that the expert wrote.
inline double relative_error(const std::vector<float>& a, const std::vector<double>& b,
                             const Rows& rows) {
  double difference = 0, norm = 0;
  for (int32_t r = 0; r < rows.count(); ++r) {
    for (int32_t c = 0; c < rows.layout.hidden; ++c) {
      const int64_t i = int64_t{rows.out_rows[r]} * rows.layout.hidden + c;
      difference += (a[i] - b[i]) * (a[i] - b[i]);
      norm += b[i] * b[i];
    }
  }
  return std::sqrt(difference / norm);
}

// Bitwise equal; any two NaNs count as equal.
inline ::testing::AssertionResult same_bits(const std::vector<float>& a,
                                            const std::vector<float>& b) {
  if (a.size() != b.size()) return ::testing::AssertionFailure() << "sizes differ";
  for (size_t i = 0; i < a.size(); ++i) {
    if (std::isnan(a[i]) && std::isnan(b[i])) continue;
    if (std::memcmp(&a[i], &b[i], sizeof(float)) != 0) {
      return ::testing::AssertionFailure() << "at " << i << ": " << a[i] << " and " << b[i];
    }
  }
  return ::testing::AssertionSuccess();
}

// Every table that this processor can run, with those for processors of another maker, and the
// emulated ones where it has the instructions they are written in.
inline std::vector<const KernelTable*> all_tables() {
  std::vector<const KernelTable*> tables;
  for (std::string_view name : kernel_tables()) {
    tables.push_back(&kernel_table(name));
    if (name == "avx2") {
      tables.push_back(tables.back() == &kAvx2Table ? &kAmdAvx2Table : &kAvx2Table);
      tables.push_back(&kEmulatedAvxVnniTable);
    }
    if (name == "avx512") {
      tables.push_back(&kEmulatedVnniTable);
      tables.push_back(&kEmulatedBf16Table);
      tables.push_back(&kEmulatedZen4Bf16Table);
      tables.push_back(&kEmulatedAmxTable);
    }
  }
  return tables;
}

// All tables but the scalar one, the reference for the others.
inline std::vector<const KernelTable*> vector_tables() {
  std::vector<const KernelTable*> tables = all_tables();
  std::erase(tables, &kScalarTable);
  return tables;
}

}  // namespace testing
}  // namespace torch_mesh
