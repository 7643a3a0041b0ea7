// A matrix of random codes and scales, as checkpoints hold them, and the weights they represent.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <utility>
#include <vector>

#include "kernels/matrix_view.h"
#include "store/gguf_types.h"
#include "store/record.h"

namespace torch_mesh::testing {

class Codes {
 public:
  // `below(n)` draws an integer in [0, n).
  template <typename Below>
  Codes(Format format, int32_t group, int32_t rows, int32_t depth, const Below& below)
      : format_(format), rows_(rows), depth_(depth) {
    if (is_gguf(format)) {
      make_blocks(below);
      return;
    }
    values_.resize(static_cast<size_t>(rows) * depth);
    make_scales(group, below);
    make_codes(below);
  }

  CodesView view() const {
    CodesView view = view_;
    view.data = codes_.data();
    view.scales.data = scales_.data();
    if (format_ == Format::kNvfp4) {
      view.factor = reinterpret_cast<const std::byte*>(&factor_);
      view.divisor = reinterpret_cast<const std::byte*>(&divisor_);
    }
    return view;
  }

  // The weight in fp32, as the format defines it.
  float weight(int32_t row, int32_t k) const {
    const ScalesView& scales = view_.scales;
    const size_t at = static_cast<size_t>(row / scales.rows) * scale_columns_ + k / scales.columns;
    return scale_values_[at] * values_[static_cast<size_t>(row) * depth_ + k];
  }

  // Sets the fp16 value at byte `at` of every GGUF block.
  void set_halves(int32_t at, uint16_t bits) {
    const GgufType type = gguf_type(format_);
    for (size_t block = 0; block < codes_.size(); block += static_cast<size_t>(type.bytes)) {
      put_half(codes_.data() + block + at, bits);
    }
  }
  // Byte offsets of d, and of dmin or a min, in a block; -1 if it has none.
  std::pair<int32_t, int32_t> half_places() const {
    switch (format_) {
      case Format::kQ2K:
        return {80, 82};
      case Format::kQ3K:
        return {108, -1};
      case Format::kQ6K:
        return {208, -1};
      case Format::kIq1M:
        return {48, -1};
      default:
        return {0, gguf_type(format_).has_half_mins() ? 2 : -1};
    }
  }

  int32_t rows() const { return rows_; }
  int32_t depth() const { return depth_; }
  std::vector<std::byte>& codes() { return codes_; }
  std::vector<std::byte>& scales() { return scales_; }

 private:
  static bool is_nibbles(Format format) {
    return format == Format::kInt4 || format == Format::kInt4Fp16 || format == Format::kMxfp4 ||
           format == Format::kNvfp4;
  }

  // IQ1_M stores its scale in the upper four bits of each of four words.
  void put_half(std::byte* to, uint16_t bits) const {
    if (format_ != Format::kIq1M) {
      std::memcpy(to, &bits, sizeof(bits));
      return;
    }
    for (int i = 0; i < 4; ++i) {
      uint16_t word;
      std::memcpy(&word, to + 2 * i, sizeof(word));
      word = static_cast<uint16_t>((word & 0xfff) | (bits >> 4 * i & 15) << 12);
      std::memcpy(to + 2 * i, &word, sizeof(word));
    }
  }

  // The value of a code, without its scale.
  static float value_of(Format format, uint8_t code) {
    constexpr float kFp4[8] = {0, 0.5f, 1, 1.5f, 2, 3, 4, 6};
    switch (format) {
      case Format::kInt8:
      case Format::kInt8Fp16:
        return static_cast<float>(static_cast<int8_t>(code));
      case Format::kInt4:
      case Format::kInt4Fp16:
        return static_cast<float>(code) - 8;
      case Format::kMxfp4:
      case Format::kNvfp4:
        return code < 8 ? kFp4[code] : -kFp4[code - 8];
      default:
        return e4m3(code);
    }
  }

  static float e4m3(uint8_t code) {
    const int exponent = code >> 3 & 15, mantissa = code & 7;
    const float magnitude = exponent == 0
                                ? std::ldexp(static_cast<float>(mantissa), -9)
                                : std::ldexp(static_cast<float>(8 + mantissa), exponent - 10);
    return code < 128 ? magnitude : -magnitude;
  }

  template <typename T>
  void put_scale(size_t index, T bits, float value) {
    std::memcpy(scales_.data() + index * sizeof(T), &bits, sizeof(T));
    scale_values_[index] = value;
  }

  // Random bytes with scales of 2^-9 to 2^-7, so that weights are below 2.
  template <typename Below>
  void make_blocks(const Below& below) {
    const GgufType type = gguf_type(format_);
    view_.order = CodeOrder::kBlocks;
    view_.row_bytes = int64_t{depth_ / type.depth} * type.bytes;
    codes_.resize(static_cast<size_t>(view_.row_bytes) * rows_);
    for (std::byte& byte : codes_) byte = static_cast<std::byte>(below(256));
    const auto [d, min] = half_places();
    for (size_t block = 0; block < codes_.size(); block += static_cast<size_t>(type.bytes)) {
      for (int32_t at : {d, min}) {
        const auto bits = static_cast<uint16_t>((below(2) << 15) | (0x1000 + below(0x800)));
        if (at >= 0) put_half(codes_.data() + block + at, bits);
      }
    }
  }

  template <typename Below>
  void make_scales(int32_t group, const Below& below) {
    ScalesView& scales = view_.scales;
    scales.type = PackedMatrix::make(format_, group, rows_, depth_).scale_type();
    const bool blocks = format_ == Format::kFp8 && group == 128;
    scales.rows = blocks ? 128 : 1;
    scales.columns = format_ == Format::kMxfp4   ? 32
                     : format_ == Format::kNvfp4 ? 16
                     : group == 0                ? depth_
                                                 : group;
    scale_columns_ = static_cast<size_t>((depth_ + scales.columns - 1) / scales.columns);
    const size_t count =
        scale_columns_ * static_cast<size_t>((rows_ + scales.rows - 1) / scales.rows);
    scales.column_bytes = scale_bytes(scales.type);
    scales.row_bytes = static_cast<int64_t>(scale_columns_) * scales.column_bytes;
    scales_.resize(count * static_cast<size_t>(scales.column_bytes));
    scale_values_.resize(count);
    const float size = format_ == Format::kFp8 ? 0.0005f : 0.01f;
    factor_ = 0.0002f * static_cast<float>(1 + below(100)) / 100;
    divisor_ = 1 + static_cast<float>(below(100)) / 37;
    for (size_t i = 0; i < count; ++i) {
      const float drawn =
          (below(2) == 0 ? 1.0f : -1.0f) * size * static_cast<float>(1 + below(999)) / 500;
      uint32_t bits;
      std::memcpy(&bits, &drawn, 4);
      switch (scales.type) {
        case ScaleType::kBf16: {
          bits &= 0xffff0000;
          float value;
          std::memcpy(&value, &bits, 4);
          put_scale(i, static_cast<uint16_t>(bits >> 16), value);
          break;
        }
        case ScaleType::kFp16: {
          // Some are subnormal.
          const auto half = static_cast<_Float16>(below(20) == 0 ? drawn * 1e-4f : drawn);
          put_scale(i, half, static_cast<float>(half));
          break;
        }
        case ScaleType::kFp32:
          put_scale(i, drawn, drawn);
          break;
        case ScaleType::kE8m0: {
          const auto byte = static_cast<uint8_t>(format_ == Format::kFp8 ? 112 + below(8)
                                                 : below(40) == 0        ? 0
                                                                         : 114 + below(10));
          put_scale(i, byte, std::ldexp(1.0f, byte - 127));
          break;
        }
        case ScaleType::kE4m3: {
          const auto byte = static_cast<uint8_t>(below(20) == 0 ? below(0x7f) : 0x50 + below(0x2f));
          put_scale(i, byte, e4m3(byte) * factor_ / divisor_);
          break;
        }
      }
    }
  }

  template <typename Below>
  void make_codes(const Below& below) {
    if (is_nibbles(format_)) {
      place_nibbles(below(3));
    } else {
      view_.run = std::max(2, depth_);
      view_.run_bytes = view_.row_bytes = depth_;
      view_.flip = format_ != Format::kFp8 && below(2) == 0 ? 0x80 : 0;
    }
    const int64_t runs = (depth_ + view_.run - 1) / view_.run;
    codes_.resize(static_cast<size_t>((rows_ - 1) * view_.row_bytes + (runs - 1) * view_.run_bytes +
                                      view_.run),
                  std::byte{0x5a});
    for (int32_t row = 0; row < rows_; ++row) {
      for (int32_t k = 0; k < depth_; ++k) {
        auto code = static_cast<uint8_t>(below(is_nibbles(format_) ? 16 : 256));
        if (format_ == Format::kFp8 && (code & 0x7f) == 0x7f) code = 0;
        put_code(row, k, code);
        values_[static_cast<size_t>(row) * depth_ + k] = value_of(format_, code);
      }
    }
  }

  // Rows of pairs, blocks of halves, or words down the outputs.
  void place_nibbles(int way) {
    view_.order = way == 1 ? CodeOrder::kHalves : CodeOrder::kPairs;
    view_.run = way == 0 ? static_cast<int32_t>(round_up(depth_, 8)) : way == 1 ? 32 : 8;
    const int64_t runs = (depth_ + view_.run - 1) / view_.run;
    view_.run_bytes = way == 2 ? int64_t{4} * rows_ : way == 1 ? 18 : view_.run / 2;
    view_.row_bytes = way == 2 ? 4 : runs * view_.run_bytes;
  }

  void put_code(int32_t row, int32_t k, uint8_t code) {
    std::byte* run = codes_.data() + row * view_.row_bytes + k / view_.run * view_.run_bytes;
    const int32_t within = k % view_.run;
    if (view_.order == CodeOrder::kBytes) {
      run[within] = static_cast<std::byte>(code ^ view_.flip);
      return;
    }
    const int32_t half = view_.run / 2;
    const bool pairs = view_.order == CodeOrder::kPairs;
    const bool upper = pairs ? within % 2 == 1 : within >= half;
    std::byte& pair = run[pairs ? within / 2 : within % half];
    pair = upper ? (pair & std::byte{0x0f}) | static_cast<std::byte>(code << 4)
                 : (pair & std::byte{0xf0}) | static_cast<std::byte>(code);
  }

  Format format_;
  int32_t rows_, depth_;
  CodesView view_;
  std::vector<std::byte> codes_, scales_;
  std::vector<float> values_, scale_values_;
  size_t scale_columns_ = 0;
  float factor_ = 1, divisor_ = 1;
};

}  // namespace torch_mesh::testing
