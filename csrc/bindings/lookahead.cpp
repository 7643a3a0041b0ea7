// lookahead.
#include <ATen/core/Tensor.h>
#include <ATen/ops/mm.h>
#include <ATen/ops/topk.h>
#include <torch/library.h>

#include <optional>
#include <tuple>
#include <vector>

#include "bindings/registry.h"
#include "bindings/tensors.h"

namespace torch_mesh {
namespace {

// Decode steps only: a prompt of more rows needs most experts of every layer anyway.
constexpr int64_t kMostRows = 4;

// The residual stream changes little from one layer to the next, so the next layer's router, asked
// with this layer's hidden states, names most of the experts that it will choose (FATE, arXiv
// 2502.12224). A wrong guess costs a read.
void lookahead(const at::Tensor& x, const at::Tensor& router_weight, at::Tensor& handle,
               int64_t top_k, const std::optional<at::Tensor>& /*after*/) {
  const LayerHandle next = resolve(handle);
  Pool& pool = next.engine().pool();
  TORCH_CHECK_VALUE(x.dim() == 2 && router_weight.dim() == 2 &&
                        router_weight.size(0) == pool.experts() &&
                        router_weight.size(1) == x.size(1),
                    "x must be [tokens, hidden] and router_weight [experts=", pool.experts(),
                    ", hidden]; got ", x.sizes(), " and ", router_weight.sizes());
  TORCH_CHECK_VALUE(top_k >= 1 && top_k <= pool.experts(), "top_k is ", top_k, "; allowed: 1 to ",
                    pool.experts());
  const bool all_resident = pool.slots() == pool.layers() * pool.experts();
  if (x.size(0) == 0 || x.size(0) > kMostRows || all_resident) return;
  const at::Tensor scores = at::mm(x.to(router_weight.scalar_type()), router_weight.t());
  pool.prefetch(next.layer, distinct_ids(std::get<1>(at::topk(scores, top_k)), pool.experts()));
}

}  // namespace
}  // namespace torch_mesh

TORCH_LIBRARY_IMPL(torch_mesh, CPU, m) { m.impl("lookahead", torch_mesh::lookahead); }
// On the device that has the router: only the ids it names come over.
TORCH_LIBRARY_IMPL(torch_mesh, CUDA, m) { m.impl("lookahead", torch_mesh::lookahead); }
