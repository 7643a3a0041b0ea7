// Converts fp32 results to the dtype of the caller's tensor.
#pragma once

#include <cstdint>

#include "kernels/matrix_view.h"

namespace torch_mesh {

// Rounds to nearest even. `to` points at the first element; a NaN stays a NaN.
void store_row(const float* from, int64_t count, void* to, ScalarType type);

// Returns a pointer to row `row` of a matrix of `type` whose rows are `stride` elements apart.
inline void* row_pointer(void* data, ScalarType type, int64_t stride, int64_t row) {
  return static_cast<char*>(data) + row * stride * scalar_bytes(type);
}
inline const void* row_pointer(const void* data, ScalarType type, int64_t stride, int64_t row) {
  return static_cast<const char*>(data) + row * stride * scalar_bytes(type);
}

}  // namespace torch_mesh
