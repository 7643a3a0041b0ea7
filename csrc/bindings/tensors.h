// Checks tensors and converts them to views for the engine.
#pragma once

#include <ATen/core/Tensor.h>

#include <optional>

#include "engine/engine.h"

namespace torch_mesh {

using OptionalTensor = std::optional<at::Tensor>;

// Returns bf16, fp16 or fp32. Raises ValueError, naming `what`, for another dtype.
ScalarType scalar_type(const at::Tensor& tensor, const char* what);

// Returns the 2-d tensor, or a copy if its rows are not contiguous.
at::Tensor with_contiguous_rows(const at::Tensor& tensor);

// Returns the tensor, or a copy if its dtype or layout differs.
at::Tensor contiguous_as(const at::Tensor& tensor, at::ScalarType type);

// Raises ValueError unless a router's choices, topk_ids, are int64 or int32.
void check_ids_dtype(const at::Tensor& ids);

ConstRows const_rows(const at::Tensor& tensor, const char* what);
MutableRows mutable_rows(const at::Tensor& tensor, const char* what);

// The values of a contiguous tensor.
template <typename T>
std::span<const T> const_values_of(const at::Tensor& tensor) {
  return {tensor.const_data_ptr<T>(), static_cast<size_t>(tensor.numel())};
}
template <typename T>
std::span<T> values_of(const at::Tensor& tensor) {
  return {tensor.mutable_data_ptr<T>(), static_cast<size_t>(tensor.numel())};
}

// Clamps a size to int32. Layouts refuse the limits of int32, so that a wrong size stays wrong.
int32_t clamped_to_int32(int64_t size);

// Returns distinct ids in order of first appearance. Raises ValueError for an id outside [0,
// experts) and for a dtype that is not an integer.
std::vector<int32_t> distinct_ids(const at::Tensor& ids, int32_t experts);

}  // namespace torch_mesh
