#include "bindings/lookahead.h"

#include <ATen/Parallel.h>
#include <ATen/TensorOperators.h>
#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/mm.h>
#include <ATen/ops/sigmoid.h>
#include <ATen/ops/softmax.h>
#include <ATen/ops/softplus.h>
#include <ATen/ops/topk.h>
#include <torch/library.h>

#include <optional>
#include <string_view>
#include <tuple>
#include <utility>
#include <vector>

#include "bindings/errors.h"
#include "bindings/process.h"
#include "bindings/runtime.h"
#include "bindings/tensors.h"
#include "engine/dense_linear.h"
#include "store/record.h"

namespace torch_mesh {
namespace {

void lookahead(const at::Tensor& x, const at::Tensor& router_weight, at::Tensor& handle,
               int64_t top_k, const std::optional<at::Tensor>& /*after*/,
               const std::optional<at::Tensor>& bias, c10::string_view scoring) {
  Lookahead(x, {router_weight, bias, parse_scoring(scoring)}, handle, top_k).prefetch();
}

// Whether the kernel for unpacked rows multiplies these.
bool kernel_takes(const at::Tensor& x, const at::Tensor& weight) {
  return x.is_cpu() && x.scalar_type() != at::kDouble && weight.is_cpu() &&
         weight.scalar_type() == at::kBFloat16 && weight.stride(1) == 1;
}

// Returns x · weight^T, [tokens, experts] in fp32.
at::Tensor logits_of(const at::Tensor& x, const at::Tensor& weight) {
  if (!kernel_takes(x, weight)) {
    return at::mm(x.to(weight.scalar_type()), weight.t()).to(at::kFloat);
  }
  // torch's product of so few rows takes as long as a small layer's experts.
  const at::Tensor rows = with_contiguous_rows(x);
  at::Tensor logits = at::empty({x.size(0), weight.size(0)}, x.options().dtype(at::kFloat));
  const PackedMatrix matrix = PackedMatrix::make(Format::kBf16, 0, clamped_to_int32(weight.size(0)),
                                                 clamped_to_int32(weight.size(1)));
  unpacked_linear(matrix, weight.const_data_ptr(), weight.stride(0) * 2,
                  {.x = const_rows(rows, "x"),
                   .rows = rows.size(0),
                   .bias = nullptr,
                   .bias_type = ScalarType::kFloat32,
                   .out = mutable_rows(logits, "logits")},
                  torch_runtime(), at::get_num_threads(), process_workspaces());
  return logits;
}

// Returns [tokens, experts], larger for experts that the router prefers.
at::Tensor ranking(const at::Tensor& x, const RouterTensors& router) {
  const at::Tensor logits = logits_of(x, router.weight);
  // No scoring changes the order of a token's logits, so it matters only with a bias.
  if (!router.bias) return logits;
  const at::Tensor bias = router.bias->to(at::kFloat);
  switch (router.scoring) {
    case Scoring::kLogits:
      return logits + bias;
    case Scoring::kSigmoid:
      return at::sigmoid(logits) + bias;
    case Scoring::kSoftmax:
      return at::softmax(logits, -1) + bias;
    case Scoring::kSqrtSoftplus:
      return at::softplus(logits).sqrt() + bias;
  }
  TORCH_INTERNAL_ASSERT(false, "unknown scoring");
}

}  // namespace

Scoring parse_scoring(std::string_view name) {
  if (name == "logits") return Scoring::kLogits;
  if (name == "sigmoid") return Scoring::kSigmoid;
  if (name == "softmax") return Scoring::kSoftmax;
  TORCH_CHECK_VALUE(name == "sqrtsoftplus", "scoring is '", name,
                    "'; allowed: logits, sigmoid, softmax, sqrtsoftplus");
  return Scoring::kSqrtSoftplus;
}

Lookahead::Lookahead(const at::Tensor& x, RouterTensors router, const at::Tensor& handle,
                     int64_t top_k)
    : x_(x), router_(std::move(router)), next_(resolve(handle)), top_k_(top_k) {
  const int32_t experts = next_.engine().pool().routed_experts();
  const at::Tensor& weight = router_.weight;
  TORCH_CHECK_VALUE(
      x.dim() == 2 && weight.dim() == 2 && weight.size(0) == experts && weight.size(1) == x.size(1),
      "x must be [tokens, hidden] and router_weight [experts=", experts, ", hidden]; got ",
      x.sizes(), " and ", weight.sizes());
  TORCH_CHECK_VALUE(!router_.bias || (router_.bias->dim() == 1 && router_.bias->size(0) == experts),
                    "the router's bias must be [experts=", experts, "]; got ",
                    router_.bias->sizes());
  TORCH_CHECK_VALUE(top_k >= 1 && top_k <= experts, "top_k is ", top_k, "; allowed: 1 to ",
                    experts);
}

// The residual stream changes little from one layer to the next. So the next layer's router,
// applied to this layer's hidden states, predicts most of the experts that it will choose (FATE,
// arXiv 2502.12224). A wrong prediction costs a read.
void Lookahead::prefetch() const {
  Pool& pool = next_.engine().pool();
  // Decode steps only: a prompt needs most experts of every layer anyway.
  if (x_.size(0) == 0 || phase_of(x_.size(0)) != Phase::kDecode || pool.covers_all()) return;
  // Ordered by rank: the first choices of all rows come before any second choice.
  const at::Tensor ranked = std::get<1>(at::topk(ranking(x_, router_), top_k_)).t();
  std::vector<int32_t> likely = distinct_ids(ranked, pool.routed_experts());
  // Other ranks read their own experts.
  const int32_t first = pool.first_expert();
  std::erase_if(likely, [&](int32_t id) { return id < first || id >= first + pool.experts(); });
  for (int32_t& id : likely) id -= first;
  if (fallback_) {
    const std::vector<SlotState> states = states_of(next_);
    std::erase_if(likely, [&](int32_t expert) { return states[expert] != SlotState::kEmpty; });
    fallback_->engine().pool().expect(next_.layer, likely, Phase::kDecode);
  } else {
    pool.expect(next_.layer, likely, Phase::kDecode);
  }
}

}  // namespace torch_mesh

TORCH_LIBRARY_IMPL(torch_mesh, CPU, m) {
  m.impl("lookahead", torch_mesh::op<torch_mesh::lookahead>);
}
// Runs on the router's device; only the ids that it selects are copied to the CPU.
TORCH_LIBRARY_IMPL(torch_mesh, CUDA, m) {
  m.impl("lookahead", torch_mesh::op<torch_mesh::lookahead>);
}
