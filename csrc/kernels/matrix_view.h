// Weights as they stand in a checkpoint or a tensor, before packing; and rows of activations.
#pragma once

#include <cstdint>

namespace torch_mesh {

enum class ScalarType : uint8_t { kBf16, kFloat16, kFloat32 };

constexpr int64_t scalar_bytes(ScalarType type) { return type == ScalarType::kFloat32 ? 4 : 2; }

// Element (output feature r, input feature c) is data[r * row_stride + c * column_stride]; strides
// count elements. data == nullptr: there is none.
struct MatrixView {
  const void* data = nullptr;
  ScalarType type = ScalarType::kBf16;
  int64_t row_stride = 0;
  int64_t column_stride = 0;
};

// One expert. `gate` is absent in a record that is not gated. A bias is a matrix of one column.
struct ExpertViews {
  MatrixView gate, up, down;
  MatrixView gate_bias, up_bias, down_bias;
};

// Rows of activations, `row_stride` elements apart.
struct ConstRows {
  const void* data;
  ScalarType type;
  int64_t row_stride;
};

struct MutableRows {
  void* data;
  ScalarType type;
  int64_t row_stride;
};

}  // namespace torch_mesh
