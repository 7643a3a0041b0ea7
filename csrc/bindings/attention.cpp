// attention: decode steps over a cache of keys and values.
#include "engine/attention.h"

#include <ATen/Parallel.h>
#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>
#include <torch/library.h>

#include <optional>

#include "bindings/errors.h"
#include "bindings/process.h"
#include "bindings/runtime.h"
#include "bindings/tensors.h"
#include "kernels/kernel_table.h"

namespace torch_mesh {
namespace {

void check_heads(const at::Tensor& query, const at::Tensor& key, const at::Tensor& value) {
  const auto usable = [](int64_t dim) {
    return dim >= kHeadDimStep && dim <= kMaxHeadDim && dim % kHeadDimStep == 0;
  };
  TORCH_CHECK_VALUE(
      query.dim() == 4 && key.dim() == 4 && value.dim() == 4 && key.size(0) == query.size(0) &&
          value.size(0) == query.size(0) && key.size(1) >= 1 && key.size(1) == value.size(1) &&
          query.size(1) % key.size(1) == 0 && key.size(2) == value.size(2) &&
          key.size(3) == query.size(3) && usable(key.size(3)) && usable(value.size(3)),
      "query must be [batch, heads, tokens, key_dim], key [batch, key_value_heads, keys, key_dim] "
      "and value [batch, key_value_heads, keys, value_dim], with key_value_heads a divisor of "
      "heads and dimensions that are multiples of ",
      kHeadDimStep, " up to ", kMaxHeadDim, "; got ", query.sizes(), ", ", key.sizes(), " and ",
      value.sizes());
}

// Copies only if the last dimension is not contiguous.
at::Tensor with_contiguous_last(const at::Tensor& tensor) {
  return tensor.stride(-1) == 1 || tensor.size(-1) == 1 ? tensor : tensor.contiguous();
}

HeadRows head_rows(const at::Tensor& tensor, const char* what) {
  return {tensor.const_data_ptr(), scalar_type(tensor, what), tensor.stride(0), tensor.stride(1),
          tensor.stride(2)};
}

AttentionMask attention_mask(const at::Tensor& mask) {
  const bool boolean = mask.scalar_type() == at::kBool;
  return {mask.const_data_ptr(), boolean,
          boolean ? ScalarType::kFloat32 : scalar_type(mask, "mask"), mask.stride(0),
          mask.stride(2)};
}

at::Tensor attention(const at::Tensor& query, const at::Tensor& key, const at::Tensor& value,
                     const OptionalTensor& mask, double scale) {
  check_process();
  check_heads(query, key, value);
  const int64_t batch = query.size(0), heads = query.size(1), tokens = query.size(2);
  const int64_t keys = key.size(2);
  at::Tensor out = at::empty({batch, tokens, heads, value.size(3)}, query.options());
  if (out.numel() == 0) return out;
  if (keys == 0) return out.zero_();

  const at::Tensor q = with_contiguous_last(query), k = with_contiguous_last(key),
                   v = with_contiguous_last(value);
  at::Tensor m;
  if (mask) {
    TORCH_CHECK_VALUE(mask->dim() == 4 && (mask->size(0) == batch || mask->size(0) == 1) &&
                          mask->size(1) == 1 && (mask->size(2) == tokens || mask->size(2) == 1) &&
                          mask->size(3) == keys,
                      "mask must be [batch or 1, 1, tokens or 1, keys], here [", batch, ", 1, ",
                      tokens, ", ", keys, "]; got ", mask->sizes());
    m = with_contiguous_last(mask->expand({batch, 1, tokens, keys}));
  }
  decode_attention(AttentionCall{.batch = clamped_to_int32(batch),
                                 .tokens = clamped_to_int32(tokens),
                                 .heads = clamped_to_int32(heads),
                                 .key_value_heads = clamped_to_int32(key.size(1)),
                                 .keys = clamped_to_int32(keys),
                                 .key_dim = clamped_to_int32(key.size(3)),
                                 .value_dim = clamped_to_int32(value.size(3)),
                                 .query = head_rows(q, "query"),
                                 .key = head_rows(k, "key"),
                                 .value = head_rows(v, "value"),
                                 .mask = mask ? attention_mask(m) : AttentionMask{},
                                 .scale = static_cast<float>(scale),
                                 .out = out.mutable_data_ptr(),
                                 .out_type = scalar_type(out, "query")},
                   torch_runtime(), at::get_num_threads(), process_workspaces());
  return out;
}

}  // namespace
}  // namespace torch_mesh

TORCH_LIBRARY_IMPL(torch_mesh, CPU, m) {
  m.impl("attention", torch_mesh::op<torch_mesh::attention>);
}
