// Tensors as the engine sees them.
#pragma once

#include <ATen/core/Tensor.h>

#include "engine/engine.h"

namespace torch_mesh {

// bf16, fp16 or fp32; else ValueError naming `what`.
ScalarType scalar_type(const at::Tensor& tensor, const char* what);

// A 2-d tensor whose rows are contiguous; a copy only where they are not.
at::Tensor with_contiguous_rows(const at::Tensor& tensor);

// A copy only where dtype or layout differ.
at::Tensor contiguous_as(const at::Tensor& tensor, at::ScalarType type);

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

// A size as layouts take it; beyond what any of them takes, so that narrowing cannot make a wrong
// size a right one.
int32_t narrowed(int64_t size);

// 1-d int64 ids, each inside [0, experts), without repeats, in order of first appearance.
std::vector<int32_t> distinct_ids(const at::Tensor& ids, int32_t experts);

}  // namespace torch_mesh
