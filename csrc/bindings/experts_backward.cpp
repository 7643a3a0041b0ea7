// experts_backward and experts_adapted_backward: the gradients for hidden states, routing weights
// and adapters of the same layer with exact activations.
#include <ATen/Parallel.h>
#include <ATen/TensorOperators.h>
#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/core/Tensor.h>
#include <ATen/ops/clamp.h>
#include <ATen/ops/clamp_max.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/from_blob.h>
#include <ATen/ops/gelu.h>
#include <ATen/ops/gelu_backward.h>
#include <ATen/ops/mm.h>
#include <ATen/ops/mv.h>
#include <ATen/ops/ones.h>
#include <ATen/ops/relu.h>
#include <ATen/ops/sigmoid.h>
#include <ATen/ops/tanh.h>
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
#include "bindings/errors.h"
#include "bindings/experts.h"
#include "bindings/registry.h"
#include "bindings/runtime.h"
#include "bindings/tensors.h"
#include "engine/grouping.h"
#include "kernels/exact_products.h"

namespace torch_mesh {
namespace {

// The input of the down product, and its derivatives by gate and up, in fp32.
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
      // As for torch's clamp, the gradient passes at a limit and is 0 beyond it.
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

// One projection's adapter of one expert, in fp32, and the gradients that it adds to. A default
// one, which converts to false, means that there is no adapter.
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
  // products += scaling * (x · a^T) · b. Returns x · a^T.
  at::Tensor add_to(at::Tensor& products, const at::Tensor& x) const {
    const at::Tensor inner = inner_of(x);
    products.addmm_(inner, b_, 1, scaling_);
    return inner;
  }
  // The same for the gradient: x_grad += scaling * (grad · b^T) · a. Returns grad · b^T.
  at::Tensor add_back(at::Tensor& x_grad, const at::Tensor& grad) const {
    const at::Tensor inner = at::mm(grad, b_.t());
    x_grad.addmm_(inner, a_, 1, scaling_);
    return inner;
  }
  // Adds to the gradients, from arguments and results of `inner_of` and `add_back`. If rows have
  // factors, such as routing weights, both inner products have to include them.
  void learn(const at::Tensor& inner, const at::Tensor& inner_grad, const at::Tensor& x,
             const at::Tensor& grad) const {
    a_grad_.add_(at::mm(inner_grad.t(), x).mul_(scaling_));
    b_grad_.add_(at::mm(inner.t(), grad).mul_(scaling_).view(b_grad_.sizes()));
  }

 private:
  double scaling_ = 1;
  at::Tensor a_, b_;  // [rank, in], [rank, out]
  at::Tensor a_grad_, b_grad_;
};

struct Gradients {
  at::Tensor x;                                     // [tokens, hidden], fp32
  at::Tensor weights;                               // [tokens * k], fp32
  at::Tensor gate_up_a, gate_up_b, down_a, down_b;  // shaped as the adapters'; empty: no adapter
};

FloatRows rows_of(const at::Tensor& matrix) {
  return {matrix.const_data_ptr<float>(), matrix.stride(0), static_cast<int32_t>(matrix.size(0))};
}

at::Tensor new_matrix(int64_t rows, int64_t columns) {
  return at::empty({rows, columns}, at::TensorOptions().dtype(at::kFloat));
}

// The backward pass for some rows of one expert, in this order: begin, first, between, last, end.
// `first` and `last` are products with its weights, divided into tasks. Integer weights count as
// the values that they stand for. The rounding of activations has a straight-through gradient.
class ExpertRun {
 public:
  ExpertRun(const RecordLayout& layout, const std::byte* record)
      : layout_(layout),
        record_(record),
        gate_up_(kernel_table(), layout.gate_up, layout.halves(), record + layout.gate_up_offset),
        down_(kernel_table(), layout.down, 1, record + layout.down_offset) {}

  ExpertAdapter gate_up_adapter, down_adapter;

  // x and grad [rows, hidden], weights [rows, 1] of the routing. `grad` does not include weights.
  void begin(const at::Tensor& x, const at::Tensor& grad, const at::Tensor& weights) {
    x_ = x;
    grad_ = grad;
    weights_ = weights;
    const int64_t rows = x.size(0);
    products_ = new_matrix(rows, int64_t{layout_.halves()} * layout_.intermediate);
    hidden_grad_ = new_matrix(rows, layout_.intermediate);
  }

  int32_t first_tasks() const { return gate_up_.output_tasks() + down_.input_tasks(); }
  void first(int32_t task) {
    if (task < gate_up_.output_tasks()) {
      gate_up_.outputs(task, rows_of(x_), products_.mutable_data_ptr<float>(), products_.size(1));
    } else {
      down_.inputs(task - gate_up_.output_tasks(), rows_of(grad_),
                   hidden_grad_.mutable_data_ptr<float>(), hidden_grad_.size(1));
    }
  }

  void between(const Activation& activation) {
    if (layout_.bias) products_.add_(bias(layout_.gate_up_bias_offset, products_.size(1)));
    if (gate_up_adapter) gate_up_inner_ = gate_up_adapter.add_to(products_, x_);
    const at::Tensor gate = products_.narrow(1, 0, layout_.intermediate);
    const at::Tensor up = layout_.gated
                              ? products_.narrow(1, layout_.intermediate, layout_.intermediate)
                              : at::ones({}, products_.options());
    const Activated activated = activate(activation, gate, up);

    // hidden_grad_ is the gradient by the hidden activations, still without the routing weights.
    // The gradients of those follow from it: (down · h) · grad is h · (down^T · grad).
    at::Tensor inner_grad;
    if (down_adapter) inner_grad = down_adapter.add_back(hidden_grad_, grad_);
    weights_grad = (hidden_grad_ * activated.value).sum(1);
    if (layout_.bias)
      weights_grad.add_(at::mv(grad_, bias(layout_.down_bias_offset, layout_.hidden)));
    if (down_adapter) {
      const at::Tensor inner = down_adapter.inner_of(activated.value);
      down_adapter.learn(inner.mul(weights_), inner_grad.mul_(weights_), activated.value, grad_);
    }
    hidden_grad_.mul_(weights_);
    gate.copy_(hidden_grad_ * activated.by_gate);
    if (layout_.gated) up.copy_(hidden_grad_ * activated.by_up);
    hidden_grad_.reset();
    x_grad = new_matrix(x_.size(0), layout_.hidden);
  }

  int32_t last_tasks() const { return gate_up_.input_tasks(); }
  void last(int32_t task) {
    gate_up_.inputs(task, rows_of(products_), x_grad.mutable_data_ptr<float>(), layout_.hidden);
  }

  void end() {
    if (!gate_up_adapter) return;
    const at::Tensor inner_grad = gate_up_adapter.add_back(x_grad, products_);
    gate_up_adapter.learn(gate_up_inner_, inner_grad, x_, products_);
  }

  at::Tensor x_grad;        // [rows, hidden]
  at::Tensor weights_grad;  // [rows]

  // Bytes of all tensors for one row, including those in `activate`.
  static int64_t bytes_per_row(const RecordLayout& layout) {
    return int64_t{sizeof(float)} * (3 * layout.hidden + 10 * int64_t{layout.intermediate});
  }

 private:
  at::Tensor bias(int64_t offset, int64_t size) const {
    // ATen only reads it.
    return at::from_blob(const_cast<std::byte*>(record_) + offset, {size}, at::kFloat);
  }

  const RecordLayout& layout_;
  const std::byte* record_;
  ExactProducts gate_up_, down_;
  at::Tensor x_, grad_, weights_;
  at::Tensor products_;  // then their gradients
  at::Tensor hidden_grad_;
  at::Tensor gate_up_inner_;
};

at::Tensor zeros_for(const OptionalTensor& factor) {
  return factor ? at::zeros_like(*factor) : at::empty({0});
}

// Some rows of an expert: their tokens, and their indices among all (token, choice) pairs.
struct Part {
  ExpertRun* run;
  at::Tensor tokens, out_rows;
};

at::Tensor indices(std::vector<int32_t>& values, int64_t first, int64_t count) {
  return at::from_blob(values.data() + first, {count}, at::kInt).to(at::kLong);
}

// Runs in torch's own parallel region, where each of torch's products uses one thread. In a team
// that torch does not know of, each would use several, and add in another order.
template <typename Body>
void for_each(std::vector<Part>& parts, int32_t threads, const Body& body) {
  const int64_t count = std::ssize(parts);
  const int64_t grain = std::max<int64_t>(1, (count + threads - 1) / threads);
  at::parallel_for(0, count, grain, [&](int64_t begin, int64_t end) {
    const at::AutoDispatchBelowAutograd guard;  // a thread has its own state
    for (int64_t i = begin; i < end; ++i) body(parts[i]);
  });
}

// Runs the tasks of all parts at once, so that one expert of many rows keeps all threads busy.
void for_each_task(std::vector<Part>& parts, int32_t threads, int32_t (ExpertRun::*tasks)() const,
                   void (ExpertRun::*run)(int32_t)) {
  const int64_t each = (parts.front().run->*tasks)();  // the same for all: they have one layout
  parallel_for(torch_runtime(), std::ssize(parts) * each, threads, [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) {
      (parts[i / each].run->*run)(static_cast<int32_t>(i % each));
    }
  });
}

// sums[token] += row, where each thread adds columns of its own.
void add_rows(const at::Tensor& rows, const at::Tensor& tokens, float* sums, int32_t threads) {
  const int64_t width = rows.size(1);
  const float* from = rows.const_data_ptr<float>();
  const auto to = const_values_of<int64_t>(tokens);
  parallel_for(torch_runtime(), width, threads, [&](int64_t begin, int64_t end) {
    for (size_t r = 0; r < to.size(); ++r) {
      const float* row = from + static_cast<int64_t>(r) * width;
      float* sum = sums + to[r] * width;
      for (int64_t c = begin; c < end; ++c) sum[c] += row[c];
    }
  });
}

Gradients backward(const at::Tensor& grad, const ExpertsArguments& arguments,
                   const AdapterArguments& adapters) {
  const auto& [x, topk_ids, topk_weights, handle, sentinels] = arguments;
  // Disables autocast, which would give the products its dtype. Other threads never have it on.
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
  const auto adapter_of = [](const OptionalTensor& a, const OptionalTensor& b, double scaling,
                             const at::Tensor& a_grad, const at::Tensor& b_grad, int64_t expert) {
    return a ? ExpertAdapter(*a, *b, scaling, a_grad, b_grad, expert) : ExpertAdapter();
  };
  const auto run_of = [&](int32_t index, const std::byte* record) {
    const int64_t expert = grouping.experts[index];
    ExpertRun run(engine.layout(layer.layer), record);
    run.gate_up_adapter =
        adapter_of(adapters.gate_up_a, adapters.gate_up_b, adapters.gate_up_scaling,
                   gradients.gate_up_a, gradients.gate_up_b, expert);
    run.down_adapter = adapter_of(adapters.down_a, adapters.down_b, adapters.down_scaling,
                                  gradients.down_a, gradients.down_b, expert);
    return run;
  };

  const int32_t threads = std::min(at::get_num_threads(), engine.options().threads);
  const auto at_once =
      static_cast<int32_t>(std::clamp<int64_t>(std::ssize(grouping.experts), 1, threads));
  const int64_t room = engine.options().workspace / at_once;
  const int64_t rows_at_once =
      std::max<int64_t>(room / ExpertRun::bytes_per_row(engine.layout()), 1);
  float* x_grad = gradients.x.mutable_data_ptr<float>();
  const auto visit = [&](int32_t first, std::span<const std::byte* const> records) {
    std::vector<ExpertRun> all;
    for (size_t i = 0; i < records.size(); ++i) {
      all.push_back(run_of(first + static_cast<int32_t>(i), records[i]));
    }
    const auto rows_left = [&](int64_t i, int64_t begin) {
      return std::min(rows_at_once, grouping.rows(first + static_cast<int32_t>(i)) - begin);
    };
    for (int64_t begin = 0;; begin += rows_at_once) {
      std::vector<Part> parts;
      for (size_t i = 0; i < all.size(); ++i) {
        const int64_t rows = rows_left(static_cast<int64_t>(i), begin);
        if (rows <= 0) continue;
        const int64_t pair = grouping.first[first + static_cast<int32_t>(i)] + begin;
        parts.push_back({&all[i], indices(grouping.tokens, pair, rows),
                         indices(grouping.out_rows, pair, rows)});
      }
      if (parts.empty()) return;
      for_each(parts, threads, [&](Part& part) {
        part.run->begin(x32.index_select(0, part.tokens), grad32.index_select(0, part.tokens),
                        routing.index_select(0, part.out_rows).unsqueeze(1));
      });
      for_each_task(parts, threads, &ExpertRun::first_tasks, &ExpertRun::first);
      for_each(parts, threads, [&](Part& part) { part.run->between(activation); });
      for_each_task(parts, threads, &ExpertRun::last_tasks, &ExpertRun::last);
      for_each(parts, threads, [](Part& part) { part.run->end(); });
      // In the order of the experts, so that the bits of the sums do not depend on what was
      // resident.
      for (const Part& part : parts) {
        add_rows(part.run->x_grad, part.tokens, x_grad, threads);
        gradients.weights.index_copy_(0, part.out_rows, part.run->weights_grad);
      }
    }
  };
  engine.visit_in_order(layer.layer, grouping.experts, at_once, visit);
  gradients.x = gradients.x.to(x.scalar_type());
  gradients.weights =
      gradients.weights.reshape(topk_weights.sizes()).to(topk_weights.scalar_type());
  return gradients;
}

std::tuple<at::Tensor, at::Tensor> experts_backward(const at::Tensor& grad, const at::Tensor& x,
                                                    const at::Tensor& topk_ids,
                                                    const at::Tensor& topk_weights,
                                                    const at::Tensor& handle, bool sentinels) {
  const OptionalTensor none;
  const Gradients gradients = backward(grad, {x, topk_ids, topk_weights, handle, sentinels},
                                       {none, none, 1, none, none, 1});
  return {gradients.x, gradients.weights};
}

std::tuple<at::Tensor, at::Tensor, at::Tensor, at::Tensor, at::Tensor, at::Tensor>
experts_adapted_backward(const at::Tensor& grad, const at::Tensor& x, const at::Tensor& topk_ids,
                         const at::Tensor& topk_weights, const at::Tensor& handle,
                         const OptionalTensor& gate_up_a, const OptionalTensor& gate_up_b,
                         double gate_up_scaling, const OptionalTensor& down_a,
                         const OptionalTensor& down_b, double down_scaling, bool sentinels) {
  const Gradients gradients =
      backward(grad, {x, topk_ids, topk_weights, handle, sentinels},
               {gate_up_a, gate_up_b, gate_up_scaling, down_a, down_b, down_scaling});
  return {gradients.x,         gradients.weights, gradients.gate_up_a,
          gradients.gate_up_b, gradients.down_a,  gradients.down_b};
}

}  // namespace
}  // namespace torch_mesh

TORCH_LIBRARY_IMPL(torch_mesh, CPU, m) {
  m.impl("experts_backward", torch_mesh::op<torch_mesh::experts_backward>);
  m.impl("experts_adapted_backward", torch_mesh::op<torch_mesh::experts_adapted_backward>);
}
