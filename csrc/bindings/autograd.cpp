// The gradients of experts and grouped_linear: for the hidden states and the routing weights; the
// experts are frozen. Quantised activations pass it straight through (Bengio et al. 2013, arXiv
// 1308.3432), so it is the gradient of the same layer with exact activations.
//
// In C++, because an autograd formula in Python costs more per call than the rest of the op, with
// or without a gradient.
#include <ATen/core/dispatch/Dispatcher.h>
#include <torch/csrc/autograd/autograd_not_implemented_fallback.h>
#include <torch/csrc/autograd/custom_function.h>
#include <torch/library.h>

#include <tuple>

namespace torch_mesh {
namespace {

using torch::autograd::AutogradContext;
using torch::autograd::Variable;
using torch::autograd::variable_list;

template <typename Signature>
c10::TypedOperatorHandle<Signature> find_op(const char* name) {
  return c10::Dispatcher::singleton().findSchemaOrThrow(name, "").typed<Signature>();
}

template <typename... Tensors>
bool wants_gradient(const Tensors&... inputs) {
  return at::GradMode::is_enabled() && (inputs.requires_grad() || ...);
}

at::Tensor experts_below(const at::Tensor& x, const at::Tensor& ids, const at::Tensor& weights,
                         const at::Tensor& handle, bool sentinels) {
  static const auto op = find_op<at::Tensor(const at::Tensor&, const at::Tensor&, const at::Tensor&,
                                            const at::Tensor&, bool)>("torch_mesh::experts");
  const at::AutoDispatchBelowADInplaceOrView guard;
  return op.call(x, ids, weights, handle, sentinels);
}

struct Experts : torch::autograd::Function<Experts> {
  static at::Tensor forward(AutogradContext* context, const at::Tensor& x, const at::Tensor& ids,
                            const at::Tensor& weights, const at::Tensor& handle, bool sentinels) {
    context->save_for_backward({x, ids, weights, handle});
    context->saved_data["sentinels"] = sentinels;
    return experts_below(x, ids, weights, handle, sentinels);
  }

  static variable_list backward(AutogradContext* context, const variable_list& grads) {
    static const auto op = find_op<std::tuple<at::Tensor, at::Tensor>(
        const at::Tensor&, const at::Tensor&, const at::Tensor&, const at::Tensor&,
        const at::Tensor&, bool)>("torch_mesh::experts_backward");
    const variable_list saved = context->get_saved_variables();
    const auto [x_grad, weights_grad] = op.call(grads[0], saved[0], saved[1], saved[2], saved[3],
                                                context->saved_data["sentinels"].toBool());
    return {x_grad, Variable(), weights_grad, Variable(), Variable()};
  }
};

at::Tensor experts(const at::Tensor& x, const at::Tensor& ids, const at::Tensor& weights,
                   const at::Tensor& handle, bool sentinels) {
  return wants_gradient(x, weights) ? Experts::apply(x, ids, weights, handle, sentinels)
                                    : experts_below(x, ids, weights, handle, sentinels);
}

at::Tensor grouped_linear_below(const at::Tensor& x, const at::Tensor& offsets,
                                const at::Tensor& handle, int64_t projection,
                                int64_t out_features) {
  static const auto op = find_op<at::Tensor(const at::Tensor&, const at::Tensor&, const at::Tensor&,
                                            int64_t, int64_t)>("torch_mesh::grouped_linear");
  const at::AutoDispatchBelowADInplaceOrView guard;
  return op.call(x, offsets, handle, projection, out_features);
}

struct GroupedLinear : torch::autograd::Function<GroupedLinear> {
  static at::Tensor forward(AutogradContext* context, const at::Tensor& x,
                            const at::Tensor& offsets, const at::Tensor& handle, int64_t projection,
                            int64_t out_features) {
    context->save_for_backward({offsets, handle});
    context->saved_data["projection"] = projection;
    context->saved_data["in_features"] = x.sym_size(1).guard_int(__FILE__, __LINE__);
    return grouped_linear_below(x, offsets, handle, projection, out_features);
  }

  static variable_list backward(AutogradContext* context, const variable_list& grads) {
    static const auto op =
        find_op<at::Tensor(const at::Tensor&, const at::Tensor&, const at::Tensor&, int64_t,
                           int64_t)>("torch_mesh::grouped_linear_backward");
    const variable_list saved = context->get_saved_variables();
    const at::Tensor x_grad =
        op.call(grads[0], saved[0], saved[1], context->saved_data["projection"].toInt(),
                context->saved_data["in_features"].toInt());
    return {x_grad, Variable(), Variable(), Variable(), Variable()};
  }
};

at::Tensor grouped_linear(const at::Tensor& x, const at::Tensor& offsets, const at::Tensor& handle,
                          int64_t projection, int64_t out_features) {
  return wants_gradient(x) ? GroupedLinear::apply(x, offsets, handle, projection, out_features)
                           : grouped_linear_below(x, offsets, handle, projection, out_features);
}

}  // namespace
}  // namespace torch_mesh

TORCH_LIBRARY_IMPL(torch_mesh, Autograd, m) {
  m.impl("experts", torch_mesh::experts);
  m.impl("grouped_linear", torch_mesh::grouped_linear);
  // No gradient of a gradient: an error and not zeros.
  m.impl("experts_backward", torch::autograd::autogradNotImplementedFallback());
  m.impl("grouped_linear_backward", torch::autograd::autogradNotImplementedFallback());
}
