// What the ops on experts have in common.
#pragma once

#include <ATen/core/Tensor.h>

#include <optional>

#include "engine/engine.h"

namespace torch_mesh {

using OptionalTensor = std::optional<at::Tensor>;

// ValueError for what is not x [tokens, hidden], topk_ids and topk_weights [tokens, k].
void check_experts_inputs(const at::Tensor& x, const at::Tensor& ids, const at::Tensor& weights,
                          const Engine& engine);

// Whether autograd runs a backward pass on this thread: what computes forwards in it is gradient
// checkpointing.
bool in_backward_pass();

}  // namespace torch_mesh
