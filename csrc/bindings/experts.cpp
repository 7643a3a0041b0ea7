// experts, experts_adapted, experts_deferred and experts_fallback.
#include "bindings/experts.h"

#include <ATen/EmptyTensor.h>
#include <ATen/core/Tensor.h>
#include <ATen/ops/full_like.h>
#include <torch/library.h>

#include <functional>
#include <optional>
#include <utility>
#include <vector>

#include "bindings/adapters.h"
#include "bindings/errors.h"
#include "bindings/lookahead.h"
#include "bindings/registry.h"
#include "bindings/tensors.h"
#include "engine/grouping.h"
#include "residency/lossy_choices.h"

namespace torch_mesh {
namespace {

// Optional parts of a call of run_experts.
struct Extras {
  // As in ExpertsCall; empty: not called.
  std::function<void()> reads_queued = {};
  Deferral deferral = {};
  bool deferred = false;
  Adapters adapters = {};
  std::optional<at::ScalarType> out = {};  // none: that of x
};

void call_reads_queued(void* extras) { static_cast<const Extras*>(extras)->reads_queued(); }

at::Tensor run_experts(const LayerHandle& handle, const at::Tensor& x, const at::Tensor& topk_ids,
                       const at::Tensor& topk_weights, bool sentinels, Extras extras) {
  check_experts_inputs(x, topk_ids, topk_weights, handle.engine());
  at::Tensor out =
      at::detail::empty_cpu(x.sizes(), x.options().dtype(extras.out.value_or(x.scalar_type())));
  if (topk_ids.numel() == 0) return out.zero_();
  const at::Tensor rows = with_contiguous_rows(x);
  const at::Tensor ids = contiguous_as(topk_ids, at::kLong);
  const at::Tensor weights = contiguous_as(topk_weights, at::kFloat);
  handle.engine().experts(
      ExpertsCall{.layer = handle.layer,
                  .tokens = static_cast<int32_t>(x.size(0)),
                  .top_k = static_cast<int32_t>(ids.size(1)),
                  .x = const_rows(rows, "x"),
                  .ids = ids.const_data_ptr<int64_t>(),
                  .weights = weights.const_data_ptr<float>(),
                  .sentinels = sentinels,
                  .out = mutable_rows(out, "x"),
                  .adapters = extras.adapters,
                  .backwards = in_backward_pass(),
                  .deferral = extras.deferral,
                  .deferred = extras.deferred,
                  .reads_queued = extras.reads_queued ? call_reads_queued : nullptr,
                  .context = &extras});
  if (const auto error = handle.engine().pool().take_wrong_copy()) warn_of(*error);
  return out;
}

std::optional<Lookahead> lookahead_for(const at::Tensor& x, const NextLayer& next) {
  TORCH_CHECK_VALUE(next.router.has_value() == next.handle.has_value(),
                    "next_router and next_handle belong together; got one of them");
  std::optional<Lookahead> lookahead;
  if (next.router && !in_backward_pass()) {
    lookahead.emplace(x, RouterTensors{*next.router, next.bias, parse_scoring(next.scoring)},
                      *next.handle, next.top_k);
  }
  return lookahead;
}

// The reads_queued of Extras; `lookahead` has to outlive it.
std::function<void()> prefetch_of(const std::optional<Lookahead>& lookahead) {
  if (!lookahead) return {};
  return [&lookahead] { lookahead->prefetch(); };
}

at::Tensor experts(const at::Tensor& x, const at::Tensor& topk_ids, const at::Tensor& topk_weights,
                   const at::Tensor& handle, bool sentinels, const OptionalTensor& next_router,
                   const OptionalTensor& next_handle, int64_t next_top_k,
                   const OptionalTensor& next_bias, c10::string_view next_scoring) {
  const auto lookahead =
      lookahead_for(x, {next_router, next_handle, next_top_k, next_bias, next_scoring});
  return run_experts(resolve(handle), x, topk_ids, topk_weights, sentinels,
                     {.reads_queued = prefetch_of(lookahead)});
}

at::Tensor experts_adapted(const at::Tensor& x, const at::Tensor& topk_ids,
                           const at::Tensor& topk_weights, const at::Tensor& handle,
                           const OptionalTensor& gate_up_a, const OptionalTensor& gate_up_b,
                           double gate_up_scaling, const OptionalTensor& down_a,
                           const OptionalTensor& down_b, double down_scaling, bool sentinels,
                           const OptionalTensor& next_router, const OptionalTensor& next_handle,
                           int64_t next_top_k, const OptionalTensor& next_bias,
                           c10::string_view next_scoring) {
  const LayerHandle layer = resolve(handle);
  check_experts_inputs(x, topk_ids, topk_weights, layer.engine());
  const AdapterArguments arguments{gate_up_a, gate_up_b, gate_up_scaling,
                                   down_a,    down_b,    down_scaling};
  check_adapters(arguments, layer.engine());
  const EngineAdapters adapters(arguments, topk_ids, layer.engine());
  const auto lookahead =
      lookahead_for(x, {next_router, next_handle, next_top_k, next_bias, next_scoring});
  return run_experts(layer, x, topk_ids, topk_weights, sentinels,
                     {.reads_queued = prefetch_of(lookahead), .adapters = adapters.of_engine()});
}

// -- deferred -------------------------------------------------------------------------------------

// The choices that the previous layer deferred. One per thread, since forwards of several threads
// interleave. It has the handle in place of the engine, so that it keeps no closed pool alive.
struct Remainder {
  HandleIds handle;
  at::Tensor x, ids, weights;
};
thread_local std::optional<Remainder> remainder;

// False for the remainder of an aborted forward: of other rows, another model or another layer.
bool follows(const Remainder& carried, const LayerHandle& layer, const at::Tensor& x) {
  const HandleIds& from = carried.handle;
  const HandleIds here = layer.ids();
  return from.pool == here.pool && from.layer + 1 == here.layer && carried.x.sizes() == x.sizes();
}

// Choices [tokens][k] of this call, and those that it leaves to the next layer's or to another
// pool. Each has the sentinel `experts` where the other has a choice.
struct Split {
  at::Tensor now, left_out;
  SplitChoices choices;  // views of both, and lists of experts
};

// Leaves out what `split(choices)` does.
template <typename Function>
Split split_choices(const LayerHandle& layer, const at::Tensor& ids, const Function& split) {
  at::Tensor now = ids.clone(), left_out = at::full_like(ids, layer.engine().pool().experts());
  SplitChoices choices{.now = values_of<int64_t>(now), .left_out = values_of<int64_t>(left_out)};
  split(choices);
  return {std::move(now), std::move(left_out), std::move(choices)};
}

Split split_cold(const LayerHandle& layer, const at::Tensor& ids, const at::Tensor& weights,
                 int64_t max_deferred) {
  return split_choices(layer, ids, [&](SplitChoices& choices) {
    torch_mesh::split_cold(states_of(layer), const_values_of<float>(weights),
                           static_cast<int32_t>(ids.size(1)), max_deferred, choices);
  });
}

at::Tensor experts_deferred(const at::Tensor& x, const at::Tensor& topk_ids,
                            const at::Tensor& topk_weights, at::Tensor& handle, int64_t deferred,
                            bool last_layer, bool sentinels, const OptionalTensor& next_router,
                            const OptionalTensor& next_handle, int64_t next_top_k,
                            const OptionalTensor& next_bias, c10::string_view next_scoring) {
  // Taken before anything can throw, so that a forward that fails leaves no remainder.
  const std::optional<Remainder> carried = std::exchange(remainder, std::nullopt);
  const LayerHandle layer = resolve(handle);
  Pool& pool = layer.engine().pool();
  check_experts_inputs(x, topk_ids, topk_weights, layer.engine());
  TORCH_CHECK(!at::GradMode::is_enabled() || !(x.requires_grad() || topk_weights.requires_grad()),
              "experts_deferred has no gradient; call experts, or experts_deferred under no_grad");
  TORCH_CHECK_VALUE(deferred >= 0 && deferred <= topk_ids.size(1), "deferred is ", deferred,
                    "; allowed: 0 to k = ", topk_ids.size(1));
  const at::Tensor ids = contiguous_as(topk_ids, at::kLong);
  const at::Tensor weights = contiguous_as(topk_weights, at::kFloat);
  check_expert_ids(ids.const_data_ptr<int64_t>(), static_cast<int32_t>(ids.size(0)),
                   static_cast<int32_t>(ids.size(1)), pool.experts(), sentinels);
  const bool defers = deferred > 0 && !last_layer && phase_of(x.size(0)) == Phase::kDecode;
  const Split split = defers ? split_cold(layer, ids, weights, deferred)
                             : Split{.now = ids, .left_out = {}, .choices = {}};
  const std::vector<int32_t>& later = split.choices.experts;
  const auto lookahead =
      lookahead_for(x, {next_router, next_handle, next_top_k, next_bias, next_scoring});
  at::Tensor out =
      run_experts(layer, x, split.now, weights, /*sentinels=*/true,
                  {.reads_queued = prefetch_of(lookahead), .deferral = {.experts = later}});
  if (carried && follows(*carried, layer, x)) {
    out.add_(run_experts(resolve(carried->handle), carried->x, carried->ids, carried->weights,
                         /*sentinels=*/true, {.deferred = true}));
  }
  if (!later.empty()) {
    remainder = Remainder{layer.ids(), x.clone(), split.left_out, weights.clone()};
  }
  return out;
}

// -- fallback -------------------------------------------------------------------------------------

void check_fallback(const LayerHandle& layer, const LayerHandle& low) {
  const RecordLayout &layout = layer.engine().layout(), &low_layout = low.engine().layout();
  const int32_t experts = layer.engine().pool().experts(),
                low_experts = low.engine().pool().experts();
  TORCH_CHECK_VALUE(low.layer == layer.layer && low_experts == experts &&
                        low_layout.hidden == layout.hidden && low.live != layer.live,
                    "fallback must be layer ", layer.layer, " of ", experts,
                    " experts of hidden size ", layout.hidden, " in another pool; got layer ",
                    low.layer, " of ", low_experts, " experts of hidden size ", low_layout.hidden);
}

at::Tensor experts_fallback(const at::Tensor& x, const at::Tensor& topk_ids,
                            const at::Tensor& topk_weights, at::Tensor& handle,
                            const at::Tensor& fallback, bool sentinels,
                            const OptionalTensor& next_router, const OptionalTensor& next_handle,
                            int64_t next_top_k, const OptionalTensor& next_bias,
                            c10::string_view next_scoring) {
  const LayerHandle layer = resolve(handle), low = resolve(fallback);
  check_fallback(layer, low);
  check_experts_inputs(x, topk_ids, topk_weights, layer.engine());
  TORCH_CHECK(!at::GradMode::is_enabled() || !(x.requires_grad() || topk_weights.requires_grad()),
              "experts_fallback has no gradient; call experts, or experts_fallback under no_grad");
  const at::Tensor ids = contiguous_as(topk_ids, at::kLong);
  const at::Tensor weights = contiguous_as(topk_weights, at::kFloat);
  check_expert_ids(ids.const_data_ptr<int64_t>(), static_cast<int32_t>(ids.size(0)),
                   static_cast<int32_t>(ids.size(1)), layer.engine().pool().experts(), sentinels);
  auto lookahead =
      lookahead_for(x, {next_router, next_handle, next_top_k, next_bias, next_scoring});
  if (lookahead) lookahead->read_into_fallback(low);
  Split split{.now = ids, .left_out = {}, .choices = {}};
  if (phase_of(x.size(0)) == Phase::kDecode) {
    split = split_choices(layer, ids, [&](SplitChoices& choices) {
      split_by_pool(states_of(layer), states_of(low), choices);
    });
  }
  const SplitChoices& choices = split.choices;
  // Experts that both pools have are evicted from the fallback pool, so that together the pools
  // hold more experts. With a slot for every expert nothing would be gained.
  Pool& fallback_pool = low.engine().pool();
  if (!choices.doubles.empty() && !fallback_pool.covers_all()) {
    fallback_pool.evict(low.layer, choices.doubles);
  }
  const auto compute_exact = [&](std::optional<at::ScalarType> out) {
    return run_experts(layer, x, split.now, weights, /*sentinels=*/true,
                       {.reads_queued = prefetch_of(lookahead),
                        .deferral = {.experts = choices.experts, .fallback = true},
                        .out = out});
  };
  if (choices.experts.empty()) return compute_exact({});
  // Resident experts are computed while fallback experts are being read.
  at::Tensor exact;
  at::Tensor out =
      run_experts(low, x, split.left_out, weights, /*sentinels=*/true,
                  {.reads_queued = [&] { exact = compute_exact(at::kFloat); }, .out = at::kFloat});
  if (!exact.defined()) exact = compute_exact(at::kFloat);
  return out.add_(exact).to(x.scalar_type());
}

}  // namespace

void check_experts_inputs(const at::Tensor& x, const at::Tensor& ids, const at::Tensor& weights,
                          const Engine& engine) {
  TORCH_CHECK_VALUE(x.dim() == 2 && x.size(1) == engine.layout().hidden,
                    "x must be [tokens, hidden=", engine.layout().hidden, "]; got ", x.sizes());
  TORCH_CHECK_VALUE(ids.dim() == 2 && ids.size(0) == x.size(0),
                    "topk_ids must be [tokens=", x.size(0), ", k]; got ", ids.sizes());
  check_ids_dtype(ids);
  TORCH_CHECK_VALUE(weights.sizes() == ids.sizes(),
                    "topk_weights must have the shape of topk_ids, ", ids.sizes(), "; got ",
                    weights.sizes());
  TORCH_CHECK_VALUE(at::isFloatingType(weights.scalar_type()), "topk_weights has dtype ",
                    weights.scalar_type(), "; allowed: a floating dtype");
}

}  // namespace torch_mesh

TORCH_LIBRARY_IMPL(torch_mesh, CPU, m) {
  m.impl("experts", torch_mesh::op<torch_mesh::experts>);
  m.impl("experts_adapted", torch_mesh::op<torch_mesh::experts_adapted>);
  m.impl("experts_deferred", torch_mesh::op<torch_mesh::experts_deferred>);
  m.impl("experts_fallback", torch_mesh::op<torch_mesh::experts_fallback>);
}
