// promote, prefetch, evict, observe and residency.
#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/softmax.h>
#include <torch/library.h>

#include <vector>

#include "bindings/errors.h"
#include "bindings/registry.h"
#include "bindings/tensors.h"

namespace torch_mesh {
namespace {

void promote(at::Tensor& handle, const at::Tensor& ids) {
  const LayerHandle layer = resolve(handle);
  Pool& pool = layer.engine().pool();
  pool.promote(layer.layer, distinct_ids(ids, pool.experts()));
}

void prefetch(at::Tensor& handle, const at::Tensor& ids) {
  const LayerHandle layer = resolve(handle);
  Pool& pool = layer.engine().pool();
  pool.prefetch(layer.layer, distinct_ids(ids, pool.experts()));
}

void evict(at::Tensor& handle, const at::Tensor& ids) {
  const LayerHandle layer = resolve(handle);
  Pool& pool = layer.engine().pool();
  pool.evict(layer.layer, distinct_ids(ids, pool.experts()));
}

void observe(at::Tensor& handle, const at::Tensor& router_logits) {
  const LayerHandle layer = resolve(handle);
  Pool& pool = layer.engine().pool();
  TORCH_CHECK_VALUE(router_logits.dim() == 2 && router_logits.size(1) == pool.experts(),
                    "router_logits must be [tokens, experts=", pool.experts(), "]; got ",
                    router_logits.sizes());
  // A token with NaN logits counts as zeros: a NaN would stay in the policy's heat for ever.
  const at::Tensor scores =
      at::softmax(router_logits.to(at::kFloat), -1).nan_to_num(0.0).contiguous();
  const float* data = scores.const_data_ptr<float>();
  for (int64_t token = 0; token < scores.size(0); ++token) {
    pool.observe(layer.layer, {data + token * pool.experts(), static_cast<size_t>(pool.experts())});
  }
}

at::Tensor residency(at::Tensor& handle) {
  const LayerHandle layer = resolve(handle);
  Pool& pool = layer.engine().pool();
  at::Tensor states = at::empty({pool.experts()}, at::TensorOptions().dtype(at::kChar));
  int8_t* data = states.mutable_data_ptr<int8_t>();
  const std::vector<SlotState> snapshot = states_of(layer);
  for (size_t expert = 0; expert < snapshot.size(); ++expert) {
    data[expert] = static_cast<int8_t>(snapshot[expert]);
  }
  return states;
}

}  // namespace
}  // namespace torch_mesh

TORCH_LIBRARY_IMPL(torch_mesh, CPU, m) {
  m.impl("promote", torch_mesh::op<torch_mesh::promote>);
  m.impl("prefetch", torch_mesh::op<torch_mesh::prefetch>);
  m.impl("evict", torch_mesh::op<torch_mesh::evict>);
  m.impl("observe", torch_mesh::op<torch_mesh::observe>);
  m.impl("residency", torch_mesh::op<torch_mesh::residency>);
}
