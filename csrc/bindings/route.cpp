// route: biases the selection among a token's experts towards resident ones.
#include <ATen/core/Tensor.h>
#include <torch/library.h>

#include "bindings/errors.h"
#include "bindings/registry.h"
#include "bindings/tensors.h"
#include "engine/grouping.h"
#include "residency/lossy_choices.h"

namespace torch_mesh {
namespace {

at::Tensor route(const at::Tensor& scores, const at::Tensor& topk_ids, at::Tensor& handle,
                 double bias, int64_t kept) {
  const LayerHandle layer = resolve(handle);
  Pool& pool = layer.engine().pool();
  TORCH_CHECK_VALUE(scores.dim() == 2 && scores.size(1) == pool.experts(),
                    "scores must be [tokens, experts=", pool.experts(), "]; got ", scores.sizes());
  TORCH_CHECK_VALUE(topk_ids.dim() == 2 && topk_ids.size(0) == scores.size(0),
                    "topk_ids must be [tokens=", scores.size(0), ", k]; got ", topk_ids.sizes());
  check_ids_dtype(topk_ids);
  TORCH_CHECK_VALUE(bias >= 0 && bias <= 1, "bias is ", bias, "; allowed: 0 to 1");
  TORCH_CHECK_VALUE(kept >= 0 && kept <= topk_ids.size(1), "kept is ", kept,
                    "; allowed: 0 to k = ", topk_ids.size(1));
  at::Tensor ids = contiguous_as(topk_ids, at::kLong).clone();
  const int64_t tokens = ids.size(0), k = ids.size(1);
  check_expert_ids(ids.const_data_ptr<int64_t>(), static_cast<int32_t>(tokens),
                   static_cast<int32_t>(k), pool.experts(),
                   /*sentinels=*/false);
  if (bias == 0 || phase_of(tokens) != Phase::kDecode) return ids;
  const at::Tensor rows = contiguous_as(scores, at::kFloat);
  const int64_t replaced =
      reroute(states_of(layer), const_values_of<float>(rows), static_cast<float>(bias), kept,
              values_of<int64_t>(ids), static_cast<int32_t>(k));
  pool.count_rerouted(layer.layer, replaced);
  return ids;
}

}  // namespace
}  // namespace torch_mesh

TORCH_LIBRARY_IMPL(torch_mesh, CPU, m) { m.impl("route", torch_mesh::op<torch_mesh::route>); }
