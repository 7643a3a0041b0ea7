// The next layer's router asked with this layer's hidden states.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>

#include "bindings/registry.h"

namespace torch_mesh {

class Lookahead {
 public:
  // `router_weight` [experts, hidden] of the layer `handle`, for hidden states [tokens, hidden].
  // Throws for shapes that do not fit.
  Lookahead(const at::Tensor& x, const at::Tensor& router_weight, const at::Tensor& handle,
            int64_t top_k);

  // Queues reads of the `top_k` experts that the router ranks first for each token.
  void prefetch() const;

 private:
  at::Tensor x_;
  at::Tensor router_weight_;
  LayerHandle next_;
  int64_t top_k_;
};

}  // namespace torch_mesh
