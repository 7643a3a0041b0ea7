// experts_backward and experts_adapted_backward: the gradients for hidden states, routing weights
// and adapters of the same layer with exact activations.
#include <ATen/Parallel.h>
#include <ATen/TensorOperators.h>
#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/core/Tensor.h>
#include <ATen/ops/cat.h>
#include <ATen/ops/clamp.h>
#include <ATen/ops/clamp_max.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/from_blob.h>
#include <ATen/ops/gelu.h>
#include <ATen/ops/gelu_backward.h>
#include <ATen/ops/mm.h>
#include <ATen/ops/mv.h>
#include <ATen/ops/ones.h>
#include <ATen/ops/sigmoid.h>
#include <ATen/ops/where.h>
#include <ATen/ops/zeros_like.h>
#include <c10/core/impl/LocalDispatchKeySet.h>
#include <torch/library.h>

#include <algorithm>
#include <cstddef>
#include <span>
#include <tuple>
#include <vector>

#include "bindings/adapters.h"
#include "bindings/experts.h"
#include "bindings/registry.h"
#include "bindings/tensors.h"
#include "engine/grouping.h"
#include "kernels/pack.h"

namespace torch_mesh {
namespace {

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

// What one expert's record holds, in fp32. The memory serves one expert after another.
class UnpackedExpert {
 public:
  explicit UnpackedExpert(const RecordLayout& layout) : layout_(&layout) {}

  static int64_t bytes(const RecordLayout& layout) {
    const int64_t weights = int64_t{layout.halves() + 1} * layout.intermediate * layout.hidden;
    return weights * static_cast<int64_t>(sizeof(float)) + layout.bytes;
  }

  // The record is another's by the time that it is unpacked.
  void keep(const std::byte* record) { record_.assign(record, record + layout_->bytes); }

  void unpack() {
    const RecordLayout& layout = *layout_;
    if (!gate_up.defined()) {
      const auto options = at::TensorOptions().dtype(at::kFloat);
      gate_up = at::empty({int64_t{layout.halves()} * layout.intermediate, layout.hidden}, options);
      down = at::empty({layout.hidden, layout.intermediate}, options);
      if (layout.bias) {
        gate_up_bias = at::empty({gate_up.size(0)}, options);
        down_bias = at::empty({layout.hidden}, options);
      }
    }
    unpack_record(layout, record_.data(), gate_up.mutable_data_ptr<float>(),
                  down.mutable_data_ptr<float>(),
                  layout.bias ? gate_up_bias.mutable_data_ptr<float>() : nullptr,
                  layout.bias ? down_bias.mutable_data_ptr<float>() : nullptr);
  }

  at::Tensor gate_up, down;
  at::Tensor gate_up_bias, down_bias;  // undefined where there are none

 private:
  const RecordLayout* layout_;
  std::vector<std::byte> record_;
};

// A thread for each, and no more than the workspace has room for.
int32_t experts_at_once(const Engine& engine, int32_t count) {
  const int64_t room = engine.options().workspace / UnpackedExpert::bytes(engine.layout());
  const int64_t threads = std::min(at::get_num_threads(), engine.options().threads);
  return static_cast<int32_t>(std::max<int64_t>(std::min({room, threads, int64_t{count}}), 1));
}

// One projection's adapter of one expert, in fp32, and where its gradients go. Undefined where it
// has none.
class ExpertAdapter {
 public:
  ExpertAdapter() = default;
  ExpertAdapter(const at::Tensor& a, const at::Tensor& b, double scaling, const at::Tensor& a_grad,
                const at::Tensor& b_grad, int64_t expert)
      : scaling_(scaling),
        a_(a.select(0, expert).to(at::kFloat)),
        b_(b.select(0, expert).to(at::kFloat).flatten(1)),
        a_grad_(a_grad.select(0, expert)),
        b_grad_(b_grad.select(0, expert)) {}

  explicit operator bool() const { return a_.defined(); }

  at::Tensor inner_of(const at::Tensor& x) const { return at::mm(x, a_.t()); }
  // products += scaling * (x · a^T) · b, and x · a^T.
  at::Tensor add_to(at::Tensor& products, const at::Tensor& x) const {
    const at::Tensor inner = inner_of(x);
    products.addmm_(inner, b_, 1, scaling_);
    return inner;
  }
  // The same in the other direction: x_grad += scaling * (grad · b^T) · a, and grad · b^T.
  at::Tensor add_back(at::Tensor& x_grad, const at::Tensor& grad) const {
    const at::Tensor inner = at::mm(grad, b_.t());
    x_grad.addmm_(inner, a_, 1, scaling_);
    return inner;
  }
  // Given what `inner_of` and `add_back` returned and had. A factor of each row belongs to both
  // inner products.
  void store(const at::Tensor& inner, const at::Tensor& inner_grad, const at::Tensor& x,
             const at::Tensor& grad) const {
    a_grad_.copy_(at::mm(inner_grad.t(), x).mul_(scaling_));
    b_grad_.copy_(at::mm(inner.t(), grad).mul_(scaling_).view(b_grad_.sizes()));
  }

 private:
  double scaling_ = 1;
  at::Tensor a_, b_;  // [rank, in], [rank, out]
  at::Tensor a_grad_, b_grad_;
};

// Of one expert's rows.
struct ExpertGradients {
  at::Tensor x, weights;
};

struct Gradients {
  at::Tensor x;                                     // [tokens, hidden], fp32
  at::Tensor weights;                               // [tokens * k], fp32
  at::Tensor gate_up_a, gate_up_b, down_a, down_b;  // as the adapters; empty where there are none
};

// The pairs of one expert.
struct Rows {
  at::Tensor x, grad;  // [rows, hidden], fp32; `grad` without the routing weights
  at::Tensor weights;  // [rows, 1]
};

// Integer weights stand for their values: the gradient goes straight through the rounding of
// activations.
ExpertGradients expert_backward(const RecordLayout& layout, const Activation& activation,
                                const UnpackedExpert& expert, const ExpertAdapter& gate_up_adapter,
                                const ExpertAdapter& down_adapter, const Rows& rows) {
  at::Tensor products = at::mm(rows.x, expert.gate_up.t());
  if (layout.bias) products.add_(expert.gate_up_bias);
  at::Tensor gate_up_inner;
  if (gate_up_adapter) gate_up_inner = gate_up_adapter.add_to(products, rows.x);
  const at::Tensor gate = products.narrow(1, 0, layout.intermediate);
  const at::Tensor up = layout.gated ? products.narrow(1, layout.intermediate, layout.intermediate)
                                     : at::ones({}, products.options());
  const Activated activated = activate(activation, gate, up);

  // By the hidden activations, without the routing weights, for which it holds the gradients, too:
  // (down · h) · grad is h · (down^T · grad).
  at::Tensor hidden_grad = at::mm(rows.grad, expert.down);
  at::Tensor down_inner_grad;
  if (down_adapter) down_inner_grad = down_adapter.add_back(hidden_grad, rows.grad);
  at::Tensor weights_grad = (hidden_grad * activated.value).sum(1);
  if (layout.bias) weights_grad.add_(at::mv(rows.grad, expert.down_bias));
  if (down_adapter) {
    const at::Tensor inner = down_adapter.inner_of(activated.value);
    down_adapter.store(inner.mul(rows.weights), down_inner_grad.mul_(rows.weights), activated.value,
                       rows.grad);
  }

  hidden_grad.mul_(rows.weights);
  const at::Tensor gate_grad = hidden_grad * activated.by_gate;
  const at::Tensor product_grad =
      layout.gated ? at::cat({gate_grad, hidden_grad * activated.by_up}, 1) : gate_grad;
  at::Tensor x_grad = at::mm(product_grad, expert.gate_up);
  if (gate_up_adapter) {
    const at::Tensor inner_grad = gate_up_adapter.add_back(x_grad, product_grad);
    gate_up_adapter.store(gate_up_inner, inner_grad, rows.x, product_grad);
  }
  return {x_grad, weights_grad};
}

at::Tensor zeros_for(const OptionalTensor& factor) {
  return factor ? at::zeros_like(*factor) : at::empty({0});
}

Gradients backward(const at::Tensor& grad, const at::Tensor& x, const at::Tensor& topk_ids,
                   const at::Tensor& topk_weights, const at::Tensor& handle,
                   const AdapterTensors& adapters, bool sentinels) {
  // Under autocast the products would be in its dtype. Other threads never have it.
  const c10::impl::ExcludeDispatchKeyGuard exact(c10::autocast_dispatch_keyset);
  const LayerHandle layer = resolve(handle);
  Engine& engine = layer.engine();
  check_experts_inputs(x, topk_ids, topk_weights, engine);
  check_adapters(adapters, engine);
  TORCH_CHECK_VALUE(grad.sizes() == x.sizes(), "grad must have the shape of x, ", x.sizes(),
                    "; got ", grad.sizes());
  const Activation& activation = engine.activation(layer.layer);

  const at::Tensor ids = contiguous_as(topk_ids, at::kLong);
  const at::Tensor routing = contiguous_as(topk_weights, at::kFloat).reshape({-1});
  const at::Tensor x32 = x.to(at::kFloat);
  const at::Tensor grad32 = grad.to(at::kFloat);
  Gradients gradients{.x = at::zeros_like(x32, at::MemoryFormat::Contiguous),
                      .weights = at::zeros_like(routing),
                      .gate_up_a = zeros_for(adapters.gate_up_a),
                      .gate_up_b = zeros_for(adapters.gate_up_b),
                      .down_a = zeros_for(adapters.down_a),
                      .down_b = zeros_for(adapters.down_b)};

  Grouping grouping;
  group_by_expert(ids.const_data_ptr<int64_t>(), routing.const_data_ptr<float>(),
                  static_cast<int32_t>(x.size(0)), static_cast<int32_t>(ids.size(1)),
                  engine.pool().experts(), sentinels, grouping);
  const auto pairs = [&](std::vector<int32_t>& values, int32_t index) {
    return at::from_blob(values.data() + grouping.first[index], {grouping.rows(index)}, at::kInt)
        .to(at::kLong);
  };
  const auto adapter_of = [](const OptionalTensor& a, const OptionalTensor& b, double scaling,
                             const at::Tensor& a_grad, const at::Tensor& b_grad, int64_t expert) {
    return a ? ExpertAdapter(*a, *b, scaling, a_grad, b_grad, expert) : ExpertAdapter();
  };
  const auto compute = [&](int32_t index, UnpackedExpert& unpacked) {
    const at::AutoDispatchBelowAutograd guard;  // a thread of its own has its own state
    const int64_t expert = grouping.experts[index];
    const at::Tensor tokens = pairs(grouping.tokens, index);
    const at::Tensor places = pairs(grouping.places, index);
    const Rows rows{.x = x32.index_select(0, tokens),
                    .grad = grad32.index_select(0, tokens),
                    .weights = routing.index_select(0, places).unsqueeze(1)};
    unpacked.unpack();
    return expert_backward(
        engine.layout(), activation, unpacked,
        adapter_of(adapters.gate_up_a, adapters.gate_up_b, adapters.gate_up_scaling,
                   gradients.gate_up_a, gradients.gate_up_b, expert),
        adapter_of(adapters.down_a, adapters.down_b, adapters.down_scaling, gradients.down_a,
                   gradients.down_b, expert),
        rows);
  };

  const auto count = static_cast<int32_t>(grouping.experts.size());
  const int32_t at_once = experts_at_once(engine, count);
  std::vector<UnpackedExpert> unpacked(at_once, UnpackedExpert(engine.layout()));
  std::vector<ExpertGradients> found(at_once);
  engine.pool().prefetch(layer.layer, grouping.experts);  // reads run while experts are computed
  for (int32_t begin = 0; begin < count; begin += at_once) {
    const int32_t batch = std::min(at_once, count - begin);
    const std::span<const int32_t> experts(&grouping.experts[begin], batch);
    engine.visit(layer.layer, experts, [&](int32_t expert, const std::byte* record) {
      unpacked[std::find(experts.begin(), experts.end(), expert) - experts.begin()].keep(record);
    });
    at::parallel_for(0, batch, 1, [&](int64_t first, int64_t end) {
      for (int64_t i = first; i < end; ++i) {
        found[i] = compute(begin + static_cast<int32_t>(i), unpacked[i]);
      }
    });
    // In the order of the experts, so that the bits of the sums do not depend on what was resident.
    for (int32_t i = 0; i < batch; ++i) {
      gradients.x.index_add_(0, pairs(grouping.tokens, begin + i), found[i].x);
      gradients.weights.index_copy_(0, pairs(grouping.places, begin + i), found[i].weights);
    }
  }
  gradients.x = gradients.x.to(x.scalar_type());
  gradients.weights =
      gradients.weights.reshape(topk_weights.sizes()).to(topk_weights.scalar_type());
  return gradients;
}

std::tuple<at::Tensor, at::Tensor> experts_backward(const at::Tensor& grad, const at::Tensor& x,
                                                    const at::Tensor& topk_ids,
                                                    const at::Tensor& topk_weights,
                                                    const at::Tensor& handle, bool sentinels) {
  const Gradients gradients = backward(grad, x, topk_ids, topk_weights, handle, {}, sentinels);
  return {gradients.x, gradients.weights};
}

std::tuple<at::Tensor, at::Tensor, at::Tensor, at::Tensor, at::Tensor, at::Tensor>
experts_adapted_backward(const at::Tensor& grad, const at::Tensor& x, const at::Tensor& topk_ids,
                         const at::Tensor& topk_weights, const at::Tensor& handle,
                         const OptionalTensor& gate_up_a, const OptionalTensor& gate_up_b,
                         double gate_up_scaling, const OptionalTensor& down_a,
                         const OptionalTensor& down_b, double down_scaling, bool sentinels) {
  const AdapterTensors adapters{gate_up_a, gate_up_b, gate_up_scaling,
                                down_a,    down_b,    down_scaling};
  const Gradients gradients =
      backward(grad, x, topk_ids, topk_weights, handle, adapters, sentinels);
  return {gradients.x,         gradients.weights, gradients.gate_up_a,
          gradients.gate_up_b, gradients.down_a,  gradients.down_b};
}

}  // namespace

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

}  // namespace torch_mesh

TORCH_LIBRARY_IMPL(torch_mesh, CPU, m) {
  m.impl("experts_backward", torch_mesh::experts_backward);
  m.impl("experts_adapted_backward", torch_mesh::experts_adapted_backward);
}
