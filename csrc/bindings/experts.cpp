// experts, experts_backward, experts_deferred and experts_fallback.
#include <ATen/EmptyTensor.h>
#include <ATen/TensorOperators.h>
#include <ATen/core/Tensor.h>
#include <ATen/ops/cat.h>
#include <ATen/ops/clamp.h>
#include <ATen/ops/clamp_max.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/from_blob.h>
#include <ATen/ops/full_like.h>
#include <ATen/ops/gelu.h>
#include <ATen/ops/gelu_backward.h>
#include <ATen/ops/mm.h>
#include <ATen/ops/ones.h>
#include <ATen/ops/sigmoid.h>
#include <ATen/ops/where.h>
#include <ATen/ops/zeros_like.h>
#include <torch/library.h>

#include <algorithm>
#include <functional>
#include <optional>
#include <span>
#include <utility>
#include <vector>

#include "bindings/lookahead.h"
#include "bindings/registry.h"
#include "bindings/tensors.h"
#include "engine/grouping.h"
#include "kernels/pack.h"

namespace torch_mesh {
namespace {

using OptionalTensor = std::optional<at::Tensor>;

void check_experts_inputs(const at::Tensor& x, const at::Tensor& ids, const at::Tensor& weights,
                          const Engine& engine) {
  TORCH_CHECK_VALUE(x.dim() == 2 && x.size(1) == engine.layout().hidden,
                    "x must be [tokens, hidden=", engine.layout().hidden, "]; got ", x.sizes());
  TORCH_CHECK_VALUE(ids.dim() == 2 && ids.size(0) == x.size(0),
                    "topk_ids must be [tokens=", x.size(0), ", k]; got ", ids.sizes());
  TORCH_CHECK_VALUE(ids.scalar_type() == at::kLong || ids.scalar_type() == at::kInt,
                    "topk_ids has dtype ", ids.scalar_type(), "; allowed: int64, int32");
  TORCH_CHECK_VALUE(weights.sizes() == ids.sizes(),
                    "topk_weights must have the shape of topk_ids, ", ids.sizes(), "; got ",
                    weights.sizes());
  TORCH_CHECK_VALUE(at::isFloatingType(weights.scalar_type()), "topk_weights has dtype ",
                    weights.scalar_type(), "; allowed: a floating dtype");
}

// What makes a call more than the experts of its layer for x.
struct Extras {
  // As in ExpertsCall. Empty: never.
  std::function<void()> reads_queued = {};
  Deferral deferral = {};
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
                  .deferral = extras.deferral,
                  .reads_queued = extras.reads_queued ? call_reads_queued : nullptr,
                  .context = &extras});
  return out;
}

std::optional<Lookahead> lookahead_for(const at::Tensor& x, const OptionalTensor& next_router,
                                       const OptionalTensor& next_handle, int64_t next_top_k,
                                       const OptionalTensor& next_bias,
                                       c10::string_view next_scoring) {
  TORCH_CHECK_VALUE(next_router.has_value() == next_handle.has_value(),
                    "next_router and next_handle belong together; got one of them");
  std::optional<Lookahead> lookahead;
  if (next_router) {
    lookahead.emplace(x, RouterTensors{*next_router, next_bias, parse_scoring(next_scoring)},
                      *next_handle, next_top_k);
  }
  return lookahead;
}

// For Extras; `lookahead` outlives them.
std::function<void()> prefetch_of(const std::optional<Lookahead>& lookahead) {
  if (!lookahead) return {};
  return [&lookahead] { lookahead->prefetch(); };
}

at::Tensor experts(const at::Tensor& x, const at::Tensor& topk_ids, const at::Tensor& topk_weights,
                   const at::Tensor& handle, bool sentinels, const OptionalTensor& next_router,
                   const OptionalTensor& next_handle, int64_t next_top_k,
                   const OptionalTensor& next_bias, c10::string_view next_scoring) {
  const auto lookahead =
      lookahead_for(x, next_router, next_handle, next_top_k, next_bias, next_scoring);
  return run_experts(resolve(handle), x, topk_ids, topk_weights, sentinels,
                     {.reads_queued = prefetch_of(lookahead)});
}

// -- backward -------------------------------------------------------------------------------------

// What the down product takes, and its derivatives by gate and up, in fp32.
struct Activated {
  at::Tensor value, by_gate, by_up;
};

// `up` is ones for experts without a gate.
Activated activate(const Activation& activation, const at::Tensor& gate, const at::Tensor& up) {
  switch (activation.kind) {
    case Activation::kSilu: {
      const at::Tensor sigmoid = at::sigmoid(gate);
      const at::Tensor silu = gate * sigmoid;
      return {silu * up, sigmoid * (1 + gate * (1 - sigmoid)) * up, silu};
    }
    case Activation::kGelu:
    case Activation::kGeluTanh: {
      const char* approximate = activation.kind == Activation::kGelu ? "none" : "tanh";
      const at::Tensor gelu = at::gelu(gate, approximate);
      return {gelu * up, at::gelu_backward(up.expand_as(gate), gate, approximate), gelu};
    }
    case Activation::kRelu2: {
      const at::Tensor relu = at::relu(gate);
      const at::Tensor square = relu * relu;
      return {square * up, 2 * relu * up, square};
    }
    case Activation::kSwiglu: {
      // As torch differentiates clamp: at a limit the gradient passes, beyond it there is none.
      const float alpha = activation.alpha;
      const at::Tensor g = at::clamp_max(gate, activation.gate_limit);
      const at::Tensor sigmoid = at::sigmoid(g * alpha);
      const at::Tensor swish = g * sigmoid;
      const at::Tensor factor =
          at::clamp(up, -activation.up_limit, activation.up_limit) + activation.offset;
      const at::Tensor by_gate = factor * sigmoid * (1 + alpha * g * (1 - sigmoid));
      return {factor * swish, at::where(gate <= activation.gate_limit, by_gate, 0.0f),
              at::where(up.abs() <= activation.up_limit, swish, 0.0f)};
    }
    case Activation::kSoftcap: {
      const at::Tensor sigmoid = at::sigmoid(gate);
      const at::Tensor gate_tanh = at::tanh(gate / activation.gate_limit);
      const at::Tensor up_tanh = at::tanh(up / activation.up_limit);
      const at::Tensor capped_gate = gate_tanh * activation.gate_limit;
      const at::Tensor capped_up = up_tanh * activation.up_limit;
      const at::Tensor by_gate =
          sigmoid * (1 - gate_tanh * gate_tanh + capped_gate * (1 - sigmoid)) * capped_up;
      return {capped_gate * sigmoid * capped_up, by_gate,
              capped_gate * sigmoid * (1 - up_tanh * up_tanh)};
    }
  }
  TORCH_INTERNAL_ASSERT(false, "unknown activation");
}

struct Gradients {
  at::Tensor x;        // [tokens, hidden], fp32
  at::Tensor weights;  // [tokens * k], fp32
};

// One expert's share. Integer weights stand for their values: the gradient goes straight through
// the rounding of activations.
void expert_backward(const RecordLayout& layout, const Activation& activation,
                     const std::byte* record, const at::Tensor& grad, const at::Tensor& x,
                     const at::Tensor& routing, const at::Tensor& tokens, const at::Tensor& places,
                     Gradients& gradients) {
  const auto options = at::TensorOptions().dtype(at::kFloat);
  const at::Tensor gate_up =
      at::empty({int64_t{layout.halves()} * layout.intermediate, layout.hidden}, options);
  const at::Tensor down = at::empty({layout.hidden, layout.intermediate}, options);
  const at::Tensor up_bias = at::empty({layout.bias ? gate_up.size(0) : 0}, options);
  const at::Tensor down_bias = at::empty({layout.bias ? layout.hidden : 0}, options);
  unpack_record(layout, record, gate_up.mutable_data_ptr<float>(), down.mutable_data_ptr<float>(),
                layout.bias ? up_bias.mutable_data_ptr<float>() : nullptr,
                layout.bias ? down_bias.mutable_data_ptr<float>() : nullptr);

  const at::Tensor rows = x.index_select(0, tokens);
  at::Tensor products = at::mm(rows, gate_up.t());
  if (layout.bias) products = products + up_bias;
  const at::Tensor gate = products.narrow(1, 0, layout.intermediate);
  const at::Tensor up = layout.gated ? products.narrow(1, layout.intermediate, layout.intermediate)
                                     : at::ones({}, options);
  const Activated activated = activate(activation, gate, up);
  at::Tensor y = at::mm(activated.value, down.t());
  if (layout.bias) y = y + down_bias;

  const at::Tensor row_grad = grad.index_select(0, tokens);
  gradients.weights.index_copy_(0, places, (row_grad * y).sum(1));

  const at::Tensor weight = routing.index_select(0, places).unsqueeze(1);
  const at::Tensor hidden_grad = at::mm(row_grad * weight, down);
  const at::Tensor gate_grad = hidden_grad * activated.by_gate;
  const at::Tensor product_grad =
      layout.gated ? at::cat({gate_grad, hidden_grad * activated.by_up}, 1) : gate_grad;
  gradients.x.index_add_(0, tokens, at::mm(product_grad, gate_up));
}

std::tuple<at::Tensor, at::Tensor> experts_backward(const at::Tensor& grad, const at::Tensor& x,
                                                    const at::Tensor& topk_ids,
                                                    const at::Tensor& topk_weights,
                                                    const at::Tensor& handle, bool sentinels) {
  const LayerHandle layer = resolve(handle);
  Engine& engine = layer.engine();
  check_experts_inputs(x, topk_ids, topk_weights, engine);
  TORCH_CHECK_VALUE(grad.sizes() == x.sizes(), "grad must have the shape of x, ", x.sizes(),
                    "; got ", grad.sizes());
  const Activation& activation = engine.activation(layer.layer);

  const at::Tensor ids = contiguous_as(topk_ids, at::kLong);
  const at::Tensor routing = contiguous_as(topk_weights, at::kFloat).reshape({-1});
  const at::Tensor x32 = x.to(at::kBFloat16).to(at::kFloat);
  const at::Tensor grad32 = grad.to(at::kFloat);
  Gradients gradients{at::zeros_like(x32, at::MemoryFormat::Contiguous), at::zeros_like(routing)};

  Grouping grouping;
  group_by_expert(ids.const_data_ptr<int64_t>(), routing.const_data_ptr<float>(),
                  static_cast<int32_t>(x.size(0)), static_cast<int32_t>(ids.size(1)),
                  engine.pool().experts(), sentinels, grouping);
  const auto pairs = [&](std::vector<int32_t>& values, int32_t index) {
    return at::from_blob(values.data() + grouping.first[index], {grouping.rows(index)}, at::kInt)
        .to(at::kLong);
  };
  // Sums in x's gradient follow the order of experts, so each expert waits for the ones before it
  // and the bits do not depend on what was resident. The hint lets the reads of later ones run
  // meanwhile.
  engine.pool().prefetch(layer.layer, grouping.experts);
  for (size_t i = 0; i < grouping.experts.size(); ++i) {
    const auto index = static_cast<int32_t>(i);
    engine.visit(layer.layer, {&grouping.experts[i], 1}, [&](int32_t, const std::byte* record) {
      expert_backward(engine.layout(), activation, record, grad32, x32, routing,
                      pairs(grouping.tokens, index), pairs(grouping.places, index), gradients);
    });
  }
  return {gradients.x.to(x.scalar_type()),
          gradients.weights.reshape(topk_weights.sizes()).to(topk_weights.scalar_type())};
}

// -- deferred -------------------------------------------------------------------------------------

// What the last layer left for this one. Per thread, since forwards of several threads interleave;
// by handle and not by engine, so that it keeps no closed pool alive.
struct Remainder {
  HandleIds handle;
  at::Tensor x, ids, weights;
};
thread_local std::optional<Remainder> remainder;

// A remainder of other rows, another model or another layer is what an aborted forward left behind.
bool follows(const Remainder& carried, const LayerHandle& layer, const at::Tensor& x) {
  const HandleIds& from = carried.handle;
  const HandleIds here = layer.ids();
  return from.pool == here.pool && from.layer + 1 == here.layer &&
         from.generation == here.generation && carried.x.sizes() == x.sizes();
}

// Choices [tokens][k] of this call and of a later one; the sentinel `experts` stands where the
// other has a choice.
struct Split {
  at::Tensor now, later;
  std::vector<int32_t> deferred;  // the distinct experts of `later`
};

Split split_cold(const LayerHandle& layer, const at::Tensor& ids, const at::Tensor& weights,
                 int64_t most) {
  Pool& pool = layer.engine().pool();
  Split split{ids.clone(), at::full_like(ids, pool.experts()), {}};
  SplitChoices choices{.now = values_of<int64_t>(split.now),
                       .elsewhere = values_of<int64_t>(split.later)};
  pool.split_cold(layer.layer, const_values_of<float>(weights), static_cast<int32_t>(ids.size(1)),
                  most, choices);
  split.deferred = std::move(choices.experts);
  return split;
}

at::Tensor experts_deferred(const at::Tensor& x, const at::Tensor& topk_ids,
                            const at::Tensor& topk_weights, at::Tensor& handle, int64_t deferred,
                            bool last_layer, bool sentinels, const OptionalTensor& next_router,
                            const OptionalTensor& next_handle, int64_t next_top_k,
                            const OptionalTensor& next_bias, c10::string_view next_scoring) {
  // First of all: a forward that ends in an error leaves nothing behind.
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
                             : Split{.now = ids, .later = {}, .deferred = {}};
  const auto lookahead =
      lookahead_for(x, next_router, next_handle, next_top_k, next_bias, next_scoring);
  at::Tensor out = run_experts(
      layer, x, split.now, weights, /*sentinels=*/true,
      {.reads_queued = prefetch_of(lookahead), .deferral = {.experts = split.deferred}});
  if (carried && follows(*carried, layer, x)) {
    out.add_(run_experts(resolve(carried->handle), carried->x, carried->ids, carried->weights,
                         /*sentinels=*/true, {.deferral = {.late = true}}));
  }
  if (!split.deferred.empty()) {
    remainder = Remainder{layer.ids(), x.clone(), split.later, weights.clone()};
  }
  return out;
}

// -- stand-ins ------------------------------------------------------------------------------------

// Choices [tokens][k] of this pool and of that of the stand-ins; the sentinel `experts` stands
// where the other has a choice.
struct StandIns {
  at::Tensor exact, low;
  std::vector<int32_t> experts;  // the distinct ones of `low`
  std::vector<int32_t> doubles;  // those of `exact` that are READY in both pools
};

StandIns split_by_pool(const LayerHandle& layer, const LayerHandle& low, const at::Tensor& ids) {
  Pool& pool = layer.engine().pool();
  StandIns split{ids.clone(), at::full_like(ids, pool.experts()), {}, {}};
  SplitChoices choices{.now = values_of<int64_t>(split.exact),
                       .elsewhere = values_of<int64_t>(split.low)};
  pool.split_by_pool(layer.layer, low.engine().pool(), choices);
  split.experts = std::move(choices.experts);
  split.doubles = std::move(choices.doubles);
  return split;
}

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
  auto lookahead = lookahead_for(x, next_router, next_handle, next_top_k, next_bias, next_scoring);
  if (lookahead) lookahead->read_stand_ins(low);
  StandIns split{.exact = ids, .low = {}, .experts = {}, .doubles = {}};
  if (phase_of(x.size(0)) == Phase::kDecode) split = split_by_pool(layer, low, ids);
  // Neither pool keeps what the other has: together they hold the more experts. Where each has a
  // slot for its stand-in anyhow, nobody would gain by it.
  Pool& stand_ins = low.engine().pool();
  if (!split.doubles.empty() && stand_ins.slots() < stand_ins.layers() * stand_ins.experts()) {
    stand_ins.evict(low.layer, split.doubles);
  }
  const auto compute_exact = [&](std::optional<at::ScalarType> out) {
    return run_experts(layer, x, split.exact, weights, /*sentinels=*/true,
                       {.reads_queued = prefetch_of(lookahead),
                        .deferral = {.experts = split.experts, .stood_in = true},
                        .out = out});
  };
  if (split.experts.empty()) return compute_exact({});
  // What is resident is computed while the stand-ins that are not are being read.
  at::Tensor exact;
  at::Tensor out =
      run_experts(low, x, split.low, weights, /*sentinels=*/true,
                  {.reads_queued = [&] { exact = compute_exact(at::kFloat); }, .out = at::kFloat});
  if (!exact.defined()) exact = compute_exact(at::kFloat);
  return out.add_(exact).to(x.scalar_type());
}

}  // namespace
}  // namespace torch_mesh

TORCH_LIBRARY_IMPL(torch_mesh, CPU, m) {
  m.impl("experts", torch_mesh::experts);
  m.impl("experts_backward", torch_mesh::experts_backward);
  m.impl("experts_deferred", torch_mesh::experts_deferred);
  m.impl("experts_fallback", torch_mesh::experts_fallback);
}
