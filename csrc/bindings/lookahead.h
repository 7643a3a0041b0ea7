// The next layer's router asked with this layer's hidden states.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <optional>

#include "bindings/registry.h"

namespace torch_mesh {

class Lookahead {
 public:
  // `router_weight` [experts, hidden] of the layer `handle`, for hidden states [tokens, hidden].
  // Throws for shapes that do not fit.
  Lookahead(const at::Tensor& x, const at::Tensor& router_weight, const at::Tensor& handle,
            int64_t top_k);

  // What the next layer's pool lacks is read into the pool of `fallback` instead.
  void read_stand_ins(const LayerHandle& fallback) { fallback_ = {fallback.live, next_.layer}; }

  // Queues reads of the `top_k` experts that the router ranks first for each token.
  void prefetch() const;

 private:
  at::Tensor x_;
  at::Tensor router_weight_;
  LayerHandle next_;
  std::optional<LayerHandle> fallback_;
  int64_t top_k_;
};

}  // namespace torch_mesh
