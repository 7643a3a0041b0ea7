// promote, prefetch, evict and residency.
#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>
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
  m.impl("residency", torch_mesh::op<torch_mesh::residency>);
}
