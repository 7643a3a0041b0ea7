#include "bindings/tensors.h"

#include <ATen/core/Tensor.h>
#include <c10/util/Exception.h>

#include <algorithm>
#include <cstdint>
#include <vector>

namespace torch_mesh {

ScalarType scalar_type(const at::Tensor& tensor, const char* what) {
  switch (tensor.scalar_type()) {
    case at::kBFloat16:
      return ScalarType::kBf16;
    case at::kHalf:
      return ScalarType::kFloat16;
    case at::kFloat:
      return ScalarType::kFloat32;
    default:
      TORCH_CHECK_VALUE(false, what, " has dtype ", tensor.scalar_type(),
                        "; allowed: bfloat16, float16, float32");
  }
}

at::Tensor with_contiguous_rows(const at::Tensor& tensor) {
  const bool rows_contiguous = tensor.size(1) <= 1 || tensor.stride(1) == 1;
  return rows_contiguous && tensor.stride(0) >= tensor.size(1) ? tensor : tensor.contiguous();
}

at::Tensor contiguous_as(const at::Tensor& tensor, at::ScalarType type) {
  return tensor.scalar_type() == type ? tensor.contiguous() : tensor.to(type).contiguous();
}

ConstRows const_rows(const at::Tensor& tensor, const char* what) {
  return ConstRows{tensor.const_data_ptr(), scalar_type(tensor, what), tensor.stride(0)};
}

MutableRows mutable_rows(const at::Tensor& tensor, const char* what) {
  return MutableRows{tensor.mutable_data_ptr(), scalar_type(tensor, what), tensor.stride(0)};
}

int32_t clamped_to_int32(int64_t size) {
  return static_cast<int32_t>(std::clamp<int64_t>(size, INT32_MIN, INT32_MAX));
}

void check_ids_dtype(const at::Tensor& ids) {
  TORCH_CHECK_VALUE(ids.scalar_type() == at::kLong || ids.scalar_type() == at::kInt,
                    "topk_ids has dtype ", ids.scalar_type(), "; allowed: int64, int32");
}

std::vector<int32_t> distinct_ids(const at::Tensor& ids, int32_t experts) {
  TORCH_CHECK_VALUE(at::isIntegralType(ids.scalar_type(), /*includeBool=*/false),
                    "expert ids have dtype ", ids.scalar_type(), "; allowed: an integer dtype");
  const at::Tensor flat = ids.to(at::kCPU, at::kLong).reshape({-1}).contiguous();
  std::vector<bool> seen(experts, false);
  std::vector<int32_t> distinct;
  const int64_t* data = flat.const_data_ptr<int64_t>();
  for (int64_t i = 0; i < flat.numel(); ++i) {
    TORCH_CHECK_VALUE(data[i] >= 0 && data[i] < experts, "expert id ", data[i], " at position ", i,
                      " is outside [0, ", experts, ")");
    if (seen[data[i]]) continue;
    seen[data[i]] = true;
    distinct.push_back(static_cast<int32_t>(data[i]));
  }
  return distinct;
}

}  // namespace torch_mesh
