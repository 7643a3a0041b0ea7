// What the ops on experts have in common.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <optional>
#include <string_view>

#include "engine/engine.h"

namespace torch_mesh {

using OptionalTensor = std::optional<at::Tensor>;

// Arguments of an op of the table in library.cpp, gathered for the functions behind it. They refer
// to the op's own and live as long.
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

// Low-rank adapters, of any strides. `a` and `b` of a projection are both there or neither is.
struct AdapterArguments {
  const OptionalTensor& gate_up_a;  // [experts, rank, hidden]
  const OptionalTensor& gate_up_b;  // [experts, rank, halves, intermediate]
  double gate_up_scaling;
  const OptionalTensor& down_a;  // [experts, rank, intermediate]
  const OptionalTensor& down_b;  // [experts, rank, hidden]
  double down_scaling;
};

// ValueError for what is not x [tokens, hidden], topk_ids and topk_weights [tokens, k].
void check_experts_inputs(const at::Tensor& x, const at::Tensor& ids, const at::Tensor& weights,
                          const Engine& engine);

// Whether autograd runs a backward pass on this thread: what computes forwards in it is gradient
// checkpointing.
bool in_backward_pass();

}  // namespace torch_mesh
