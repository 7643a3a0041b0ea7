// Ops for a model on a GPU with its experts on the CPU. Arguments are copied to the CPU and the CPU
// op runs. Results are copied to the device of the first tensor, as the fake kernels say.
#include <ATen/core/Tensor.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <torch/library.h>

#include <optional>

namespace torch_mesh {
namespace {

void hand_over(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
  const size_t arguments = op.schema().arguments().size();
  const size_t begin = stack->size() - arguments;
  std::optional<at::Device> device;
  for (size_t i = begin; i < stack->size(); ++i) {
    c10::IValue& value = (*stack)[i];
    if (!value.isTensor()) continue;
    if (!device) device = value.toTensor().device();
    value = value.toTensor().to(at::kCPU);
  }
  op.callBoxed(stack);
  const size_t results = op.schema().returns().size();
  for (size_t i = stack->size() - results; i < stack->size(); ++i) {
    c10::IValue& value = (*stack)[i];
    if (value.isTensor() && device) value = value.toTensor().to(*device);
  }
}

}  // namespace
}  // namespace torch_mesh

TORCH_LIBRARY_IMPL(torch_mesh, CUDA, m) {
  for (const char* op :
       {"experts", "experts_backward", "experts_adapted", "experts_adapted_backward",
        "experts_deferred", "experts_fallback", "grouped_linear", "grouped_linear_backward",
        "linear", "linear_backward", "promote", "prefetch", "evict", "route"}) {
    m.impl(op, torch::CppFunction::makeFromBoxedFunction<&torch_mesh::hand_over>());
  }
}
