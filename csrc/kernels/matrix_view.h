// Weights as a checkpoint or a tensor holds them, before packing; and rows of activations.
#pragma once

#include <cstddef>
#include <cstdint>

#include "store/record.h"

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

// The order of a checkpoint's codes. kBytes: one in each byte. kPairs: two, the first in the lower
// nibble. kHalves: the first half of a run in the lower nibbles, the second in the upper ones.
// kBlocks: blocks of the record's own GGUF type, scales included; `data` and `row_bytes` describe
// them.
enum class CodeOrder : uint8_t { kBytes, kPairs, kHalves, kBlocks };

// Scales, one for each `rows` x `columns` weights.
struct ScalesView {
  const std::byte* data = nullptr;
  ScaleType type = ScaleType::kBf16;
  int32_t rows = 1;
  int32_t columns = 1;
  int64_t row_bytes = 0;  // from one scale to that of the next rows
  int64_t column_bytes = 0;
};

// A matrix in codes and scales, as a checkpoint holds it. data == nullptr: there is none.
struct CodesView {
  const std::byte* data = nullptr;  // of its first row
  CodeOrder order = CodeOrder::kBytes;
  uint8_t flip = 0;       // bits of each byte that records have inverted
  int32_t run = 0;        // input features whose codes are contiguous
  int64_t run_bytes = 0;  // from one run to the next
  int64_t row_bytes = 0;  // from one output feature to the next
  int32_t first_row = 0;  // index of the first output here among those of `scales`
  ScalesView scales = {};
  const std::byte* factor = nullptr;   // a float that multiplies all scales; nullptr: 1
  const std::byte* divisor = nullptr;  // one that divides them
  // Zero points; nullptr: there are none. They are refused unless every byte is `zero`, for which
  // codes are symmetric.
  const std::byte* zeros = nullptr;
  int64_t zeros_bytes = 0;
  uint8_t zero = 0;
  // int32: the group of each input (GPTQ's g_idx); refused unless it is input / group size.
  const std::byte* group_index = nullptr;
};

// One expert. `gate` is absent in a record that is not gated. A bias is a matrix of one column.
struct ExpertViews {
  MatrixView gate, up, down;
  MatrixView gate_bias, up_bias, down_bias;
};

// The same, quantized.
struct ExpertCodes {
  CodesView gate, up, down;
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
