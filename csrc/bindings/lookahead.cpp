#include "bindings/lookahead.h"

#include <ATen/core/Tensor.h>
#include <ATen/ops/mm.h>
#include <ATen/ops/topk.h>
#include <torch/library.h>

#include <optional>
#include <tuple>
#include <vector>

#include "bindings/tensors.h"

namespace torch_mesh {
namespace {

// Decode steps only: a prompt of more rows needs most experts of every layer anyway.
constexpr int64_t kMostRows = 4;

void lookahead(const at::Tensor& x, const at::Tensor& router_weight, at::Tensor& handle,
               int64_t top_k, const std::optional<at::Tensor>& /*after*/) {
  Lookahead(x, router_weight, handle, top_k).prefetch();
}

}  // namespace

Lookahead::Lookahead(const at::Tensor& x, const at::Tensor& router_weight, const at::Tensor& handle,
                     int64_t top_k)
    : x_(x), router_weight_(router_weight), next_(resolve(handle)), top_k_(top_k) {
  const int32_t experts = next_.engine().pool().experts();
  TORCH_CHECK_VALUE(x.dim() == 2 && router_weight.dim() == 2 && router_weight.size(0) == experts &&
                        router_weight.size(1) == x.size(1),
                    "x must be [tokens, hidden] and router_weight [experts=", experts,
                    ", hidden]; got ", x.sizes(), " and ", router_weight.sizes());
  TORCH_CHECK_VALUE(top_k >= 1 && top_k <= experts, "top_k is ", top_k, "; allowed: 1 to ",
                    experts);
}

// The residual stream changes little from one layer to the next, so the next layer's router, asked
// with this layer's hidden states, names most of the experts that it will choose (FATE, arXiv
// 2502.12224). A wrong guess costs a read.
void Lookahead::prefetch() const {
  Pool& pool = next_.engine().pool();
  const bool all_resident = pool.slots() == pool.layers() * pool.experts();
  if (x_.size(0) == 0 || x_.size(0) > kMostRows || all_resident) return;
  const at::Tensor scores = at::mm(x_.to(router_weight_.scalar_type()), router_weight_.t());
  // By rank: the likeliest first, whatever row it is of.
  const at::Tensor ranked = std::get<1>(at::topk(scores, top_k_)).t();
  std::vector<int32_t> likely = distinct_ids(ranked, pool.experts());
  if (fallback_) {
    const std::vector<SlotState> states = states_of(next_);
    std::erase_if(likely, [&](int32_t expert) { return states[expert] != SlotState::kEmpty; });
    fallback_->engine().pool().expect(next_.layer, likely, Phase::kDecode);
  } else {
    pool.expect(next_.layer, likely, Phase::kDecode);
  }
}

}  // namespace torch_mesh

TORCH_LIBRARY_IMPL(torch_mesh, CPU, m) { m.impl("lookahead", torch_mesh::lookahead); }
// On the device that has the router: only the ids it names come over.
TORCH_LIBRARY_IMPL(torch_mesh, CUDA, m) { m.impl("lookahead", torch_mesh::lookahead); }
