// Arguments and checks that the ops on experts share.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <optional>
#include <string_view>

#include "bindings/tensors.h"
#include "engine/engine.h"

namespace torch_mesh {

// Arguments of an op in library.cpp, grouped for the functions that implement it. They are
// references to the op's arguments, valid while it runs.
struct NextLayer {
  const OptionalTensor &router, &handle;
  int64_t top_k;
  const OptionalTensor& bias;
  std::string_view scoring;
};

struct ExpertsArguments {
  const at::Tensor &x, &topk_ids, &topk_weights, &handle;
  bool sentinels;
};

// Low-rank adapters, of any strides. A projection has both `a` and `b` or neither.
struct AdapterArguments {
  const OptionalTensor& gate_up_a;  // [experts, rank, hidden]
  const OptionalTensor& gate_up_b;  // [experts, rank, halves, intermediate]
  double gate_up_scaling;
  const OptionalTensor& down_a;  // [experts, rank, intermediate]
  const OptionalTensor& down_b;  // [experts, rank, hidden]
  double down_scaling;
};

// Raises ValueError unless x is [tokens, hidden], topk_ids and topk_weights are [tokens, k], and
// the dtypes of these two are allowed.
void check_experts_inputs(const at::Tensor& x, const at::Tensor& ids, const at::Tensor& weights,
                          const Engine& engine);

// Whether autograd runs a backward pass on this thread. A forward within one is gradient
// checkpointing.
bool in_backward_pass();

}  // namespace torch_mesh
