// Gradients of experts, experts_adapted, grouped_linear and linear: for hidden states, routing
// weights, adapters and the bias of linear. Packed weights are frozen. The rounding of activations
// has a straight-through gradient (Bengio et al. 2013, arXiv 1308.3432), which is that of the same
// layer with exact activations. If plain_linear needs a gradient, torch's own linear computes it.
// Only plain_linear has derivatives of forward mode, those of torch.
//
// The formulas are in C++ because one in Python costs more per call than the rest of the op, with
// or without a gradient.
#include <ATen/FuncTorchTLS.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/ops/linear.h>
#include <torch/csrc/autograd/autograd_not_implemented_fallback.h>
#include <torch/csrc/autograd/custom_function.h>
#include <torch/csrc/autograd/graph_task.h>
#include <torch/library.h>

#include <numeric>
#include <optional>
#include <string>
#include <tuple>
#include <vector>

#include "bindings/errors.h"
#include "bindings/experts.h"

namespace torch_mesh {

bool in_backward_pass() { return torch::autograd::get_current_graph_task_id() >= 0; }

namespace {

using torch::autograd::AutogradContext;
using torch::autograd::Variable;
using torch::autograd::variable_list;

template <typename Signature>
c10::TypedOperatorHandle<Signature> find_op(const char* name) {
  return c10::Dispatcher::singleton().findSchemaOrThrow(name, "").typed<Signature>();
}

// Whether `input` has a forward-mode tangent. An op that does not check gives zero tangents.
bool has_tangent(const at::Tensor& input) { return input._fw_grad(/*level=*/0).defined(); }

// Refuses tangents for an op without a formula in this file. Runs as ADInplaceOrView, below
// Autograd, for which torch.library registers the formulas of Python.
void refuse_tangents(const c10::OperatorHandle& op, c10::DispatchKeySet keys,
                     torch::jit::Stack* stack) {
  for (const c10::IValue& value : torch::jit::last(*stack, op.schema().arguments().size())) {
    TORCH_CHECK_NOT_IMPLEMENTED(
        !value.isTensor() || !has_tangent(value.toTensor()), op.schema().name(),
        " has no derivatives of forward mode (jvp, jacfwd): enable gradients and take those of "
        "torch.autograd.grad");
  }
  op.redispatchBoxed(keys & c10::after_ADInplaceOrView_keyset, stack);
}

// Refuses torch.func.grad and the like, of which torch says that they exclude C++ autograd
// functions.
void refuse_functorch() {
  const auto& functorch = at::functorch::functorchTLSAccessor();
  if (functorch == nullptr) return;
  try {
    functorch->checkSupportsCppAutogradFunction();
  } catch (const c10::Error&) {
    TORCH_CHECK_NOT_IMPLEMENTED(
        false,
        "torch_mesh's experts and packed layers have no derivatives by torch.func (grad, vjp, "
        "jacrev): call backward(), torch.autograd.grad or torch.autograd.functional.jacobian");
  }
}

template <typename... Tensors>
bool wants_gradient(const Tensors&... inputs) {
  TORCH_CHECK_NOT_IMPLEMENTED(!(has_tangent(inputs) || ...),
                              "torch_mesh's experts and packed layers have no derivatives of "
                              "forward mode (jvp, jacfwd): take those of torch.autograd.grad");
  const bool wanted = at::GradMode::is_enabled() && (inputs.requires_grad() || ...);
  if (wanted) refuse_functorch();
  return wanted;
}

using ExpertsOp = at::Tensor(const at::Tensor&, const at::Tensor&, const at::Tensor&,
                             const at::Tensor&, bool, const OptionalTensor&, const OptionalTensor&,
                             int64_t, const OptionalTensor&, c10::string_view);

at::Tensor experts_below(const ExpertsArguments& arguments, const NextLayer& next) {
  static const auto op = find_op<ExpertsOp>("torch_mesh::experts");
  const at::AutoDispatchBelowADInplaceOrView guard;
  const auto& [x, ids, weights, handle, sentinels] = arguments;
  return op.call(x, ids, weights, handle, sentinels, next.router, next.handle, next.top_k,
                 next.bias, next.scoring);
}

// Autograd tracks only tensors that are arguments of `forward` themselves: those with a gradient.
struct Experts : torch::autograd::Function<Experts> {
  static at::Tensor forward(AutogradContext* context, const at::Tensor& x,
                            const at::Tensor& weights, const ExpertsArguments& arguments,
                            const NextLayer& next) {
    context->save_for_backward({x, arguments.topk_ids, weights, arguments.handle});
    context->saved_data["sentinels"] = arguments.sentinels;
    return experts_below(arguments, next);
  }

  static variable_list backward(AutogradContext* context, const variable_list& grads) {
    static const auto op = find_op<std::tuple<at::Tensor, at::Tensor>(
        const at::Tensor&, const at::Tensor&, const at::Tensor&, const at::Tensor&,
        const at::Tensor&, bool)>("torch_mesh::experts_backward");
    const variable_list saved = context->get_saved_variables();
    auto [x_grad, weights_grad] = op.call(grads[0], saved[0], saved[1], saved[2], saved[3],
                                          context->saved_data["sentinels"].toBool());
    return {x_grad, weights_grad, {}, {}};
  }
};

at::Tensor experts(const at::Tensor& x, const at::Tensor& ids, const at::Tensor& weights,
                   const at::Tensor& handle, bool sentinels, const OptionalTensor& next_router,
                   const OptionalTensor& next_handle, int64_t next_top_k,
                   const OptionalTensor& next_bias, c10::string_view next_scoring) {
  const ExpertsArguments arguments{x, ids, weights, handle, sentinels};
  const NextLayer next{next_router, next_handle, next_top_k, next_bias, next_scoring};
  return wants_gradient(x, weights) ? Experts::apply(x, weights, arguments, next)
                                    : experts_below(arguments, next);
}

using AdaptedOp = at::Tensor(const at::Tensor&, const at::Tensor&, const at::Tensor&,
                             const at::Tensor&, const OptionalTensor&, const OptionalTensor&,
                             double, const OptionalTensor&, const OptionalTensor&, double, bool,
                             const OptionalTensor&, const OptionalTensor&, int64_t,
                             const OptionalTensor&, c10::string_view);

using AdaptedBackwardOp =
    std::tuple<at::Tensor, at::Tensor, at::Tensor, at::Tensor, at::Tensor, at::Tensor>(
        const at::Tensor&, const at::Tensor&, const at::Tensor&, const at::Tensor&,
        const at::Tensor&, const OptionalTensor&, const OptionalTensor&, double,
        const OptionalTensor&, const OptionalTensor&, double, bool);

at::Tensor experts_adapted_below(const ExpertsArguments& arguments,
                                 const AdapterArguments& adapters, const NextLayer& next) {
  static const auto op = find_op<AdaptedOp>("torch_mesh::experts_adapted");
  const at::AutoDispatchBelowADInplaceOrView guard;
  const auto& [x, ids, weights, handle, sentinels] = arguments;
  return op.call(x, ids, weights, handle, adapters.gate_up_a, adapters.gate_up_b,
                 adapters.gate_up_scaling, adapters.down_a, adapters.down_b, adapters.down_scaling,
                 sentinels, next.router, next.handle, next.top_k, next.bias, next.scoring);
}

OptionalTensor if_defined(const at::Tensor& tensor) {
  return tensor.defined() ? OptionalTensor(tensor) : std::nullopt;
}

struct ExpertsAdapted : torch::autograd::Function<ExpertsAdapted> {
  static at::Tensor forward(AutogradContext* context, const at::Tensor& x,
                            const at::Tensor& weights, const OptionalTensor& gate_up_a,
                            const OptionalTensor& gate_up_b, const OptionalTensor& down_a,
                            const OptionalTensor& down_b, const ExpertsArguments& arguments,
                            const AdapterArguments& adapters, const NextLayer& next) {
    const auto saved = [](const OptionalTensor& tensor) { return tensor.value_or(at::Tensor()); };
    context->save_for_backward({x, arguments.topk_ids, weights, arguments.handle, saved(gate_up_a),
                                saved(gate_up_b), saved(down_a), saved(down_b)});
    context->saved_data["gate_up_scaling"] = adapters.gate_up_scaling;
    context->saved_data["down_scaling"] = adapters.down_scaling;
    context->saved_data["sentinels"] = arguments.sentinels;
    return experts_adapted_below(arguments, adapters, next);
  }

  static variable_list backward(AutogradContext* context, const variable_list& grads) {
    static const auto op = find_op<AdaptedBackwardOp>("torch_mesh::experts_adapted_backward");
    const variable_list saved = context->get_saved_variables();
    auto [x, weights, gate_up_a_grad, gate_up_b_grad, down_a_grad, down_b_grad] = op.call(
        grads[0], saved[0], saved[1], saved[2], saved[3], if_defined(saved[4]),
        if_defined(saved[5]), context->saved_data["gate_up_scaling"].toDouble(),
        if_defined(saved[6]), if_defined(saved[7]), context->saved_data["down_scaling"].toDouble(),
        context->saved_data["sentinels"].toBool());
    // handover.cpp copies results to the device of x; the factors may be on the CPU.
    const auto of = [&](const at::Tensor& gradient, size_t factor) {
      return saved[factor].defined() ? gradient.to(saved[factor].device()) : at::Tensor();
    };
    return {x,
            weights,
            of(gate_up_a_grad, 4),
            of(gate_up_b_grad, 5),
            of(down_a_grad, 6),
            of(down_b_grad, 7),
            {},
            {},
            {}};
  }
};

at::Tensor experts_adapted(const at::Tensor& x, const at::Tensor& ids, const at::Tensor& weights,
                           const at::Tensor& handle, const OptionalTensor& gate_up_a,
                           const OptionalTensor& gate_up_b, double gate_up_scaling,
                           const OptionalTensor& down_a, const OptionalTensor& down_b,
                           double down_scaling, bool sentinels, const OptionalTensor& next_router,
                           const OptionalTensor& next_handle, int64_t next_top_k,
                           const OptionalTensor& next_bias, c10::string_view next_scoring) {
  const ExpertsArguments arguments{x, ids, weights, handle, sentinels};
  const AdapterArguments adapters{gate_up_a, gate_up_b, gate_up_scaling,
                                  down_a,    down_b,    down_scaling};
  const NextLayer next{next_router, next_handle, next_top_k, next_bias, next_scoring};
  bool wanted = wants_gradient(x, weights);
  for (const OptionalTensor* factor : {&gate_up_a, &gate_up_b, &down_a, &down_b}) {
    wanted = wanted || (*factor && wants_gradient(**factor));
  }
  return wanted ? ExpertsAdapted::apply(x, weights, gate_up_a, gate_up_b, down_a, down_b, arguments,
                                        adapters, next)
                : experts_adapted_below(arguments, adapters, next);
}

at::Tensor grouped_linear_below(const at::Tensor& x, const at::Tensor& offsets,
                                const at::Tensor& handle, int64_t projection, int64_t out_features,
                                int64_t top_k, bool sentinels) {
  static const auto op =
      find_op<at::Tensor(const at::Tensor&, const at::Tensor&, const at::Tensor&, int64_t, int64_t,
                         int64_t, bool)>("torch_mesh::grouped_linear");
  const at::AutoDispatchBelowADInplaceOrView guard;
  return op.call(x, offsets, handle, projection, out_features, top_k, sentinels);
}

struct GroupedLinear : torch::autograd::Function<GroupedLinear> {
  static at::Tensor forward(AutogradContext* context, const at::Tensor& x,
                            const at::Tensor& offsets, const at::Tensor& handle, int64_t projection,
                            int64_t out_features, int64_t top_k, bool sentinels) {
    context->save_for_backward({offsets, handle});
    context->saved_data["projection"] = projection;
    context->saved_data["in_features"] = x.sym_size(1).guard_int(__FILE__, __LINE__);
    return grouped_linear_below(x, offsets, handle, projection, out_features, top_k, sentinels);
  }

  static variable_list backward(AutogradContext* context, const variable_list& grads) {
    static const auto op =
        find_op<at::Tensor(const at::Tensor&, const at::Tensor&, const at::Tensor&, int64_t,
                           int64_t)>("torch_mesh::grouped_linear_backward");
    const variable_list saved = context->get_saved_variables();
    const at::Tensor x_grad =
        op.call(grads[0], saved[0], saved[1], context->saved_data["projection"].toInt(),
                context->saved_data["in_features"].toInt());
    return {x_grad, {}, {}, {}, {}, {}, {}};
  }
};

at::Tensor grouped_linear(const at::Tensor& x, const at::Tensor& offsets, const at::Tensor& handle,
                          int64_t projection, int64_t out_features, int64_t top_k, bool sentinels) {
  return wants_gradient(x)
             ? GroupedLinear::apply(x, offsets, handle, projection, out_features, top_k, sentinels)
             : grouped_linear_below(x, offsets, handle, projection, out_features, top_k, sentinels);
}

at::Tensor linear_below(const at::Tensor& x, const at::Tensor& packed, const OptionalTensor& bias,
                        int64_t in_features, int64_t out_features, c10::string_view format,
                        int64_t group_size) {
  static const auto op =
      find_op<at::Tensor(const at::Tensor&, const at::Tensor&, const OptionalTensor&, int64_t,
                         int64_t, c10::string_view, int64_t)>("torch_mesh::linear");
  const at::AutoDispatchBelowADInplaceOrView guard;
  return op.call(x, packed, bias, in_features, out_features, format, group_size);
}

struct Linear : torch::autograd::Function<Linear> {
  static at::Tensor forward(AutogradContext* context, const at::Tensor& x, const at::Tensor& packed,
                            const OptionalTensor& bias, int64_t in_features, int64_t out_features,
                            std::string format, int64_t group_size) {
    context->save_for_backward({packed});
    context->saved_data["in_features"] = in_features;
    context->saved_data["out_features"] = out_features;
    context->saved_data["format"] = format;
    context->saved_data["group_size"] = group_size;
    context->saved_data["bias"] = bias && bias->requires_grad();
    return linear_below(x, packed, bias, in_features, out_features, format, group_size);
  }

  static variable_list backward(AutogradContext* context, const variable_list& grads) {
    static const auto op =
        find_op<at::Tensor(const at::Tensor&, const at::Tensor&, int64_t, int64_t, c10::string_view,
                           int64_t)>("torch_mesh::linear_backward");
    auto& saved = context->saved_data;
    const at::Tensor& grad = grads[0];
    at::Tensor x_grad = op.call(grad, context->get_saved_variables()[0],
                                saved["in_features"].toInt(), saved["out_features"].toInt(),
                                saved["format"].toStringRef(), saved["group_size"].toInt());
    at::Tensor bias_grad;
    if (saved["bias"].toBool()) {
      std::vector<int64_t> leading(grad.dim() - 1);
      std::iota(leading.begin(), leading.end(), 0);
      bias_grad = leading.empty() ? grad : grad.sum(leading);
    }
    return {x_grad, {}, bias_grad, {}, {}, {}, {}};
  }
};

at::Tensor linear(const at::Tensor& x, const at::Tensor& packed, const OptionalTensor& bias,
                  int64_t in_features, int64_t out_features, c10::string_view format,
                  int64_t group_size) {
  return wants_gradient(x) || (bias && wants_gradient(*bias))
             ? Linear::apply(x, packed, bias, in_features, out_features, std::string(format),
                             group_size)
             : linear_below(x, packed, bias, in_features, out_features, format, group_size);
}

at::Tensor plain_linear(const at::Tensor& x, const at::Tensor& weight, const OptionalTensor& bias) {
  const auto derived = [](const at::Tensor& input) {
    return has_tangent(input) || (at::GradMode::is_enabled() && input.requires_grad());
  };
  if (derived(x) || derived(weight) || (bias && derived(*bias))) return at::linear(x, weight, bias);
  using Op = at::Tensor(const at::Tensor&, const at::Tensor&, const OptionalTensor&);
  static const auto op = find_op<Op>("torch_mesh::plain_linear");
  const at::AutoDispatchBelowADInplaceOrView guard;
  return op.call(x, weight, bias);
}

}  // namespace
}  // namespace torch_mesh

TORCH_LIBRARY_IMPL(torch_mesh, Autograd, m) {
  m.impl("experts", torch_mesh::op<torch_mesh::experts>);
  m.impl("experts_adapted", torch_mesh::op<torch_mesh::experts_adapted>);
  m.impl("grouped_linear", torch_mesh::op<torch_mesh::grouped_linear>);
  m.impl("linear", torch_mesh::op<torch_mesh::linear>);
  m.impl("plain_linear", torch_mesh::op<torch_mesh::plain_linear>);
  // Their derivatives are errors. Without a registration they would be zeros.
  for (const char* op :
       {"attention", "experts_deferred", "experts_fallback", "experts_backward",
        "experts_adapted_backward", "grouped_linear_backward", "linear_backward"}) {
    m.impl(op, torch::autograd::autogradNotImplementedFallback());
  }
}

TORCH_LIBRARY_IMPL(torch_mesh, ADInplaceOrView, m) {
  for (const char* op : {"experts_split", "grouped_low_rank"}) {
    m.impl(op, torch::CppFunction::makeFromBoxedFunction<&torch_mesh::refuse_tangents>());
  }
}
