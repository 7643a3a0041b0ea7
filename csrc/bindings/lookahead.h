// The next layer's router asked with this layer's hidden states.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <optional>
#include <string_view>

#include "bindings/registry.h"

namespace torch_mesh {

// What a router makes of its logits before it adds its bias and takes the largest.
enum class Scoring { kLogits, kSigmoid, kSoftmax, kSqrtSoftplus };

// Of "logits", "sigmoid", "softmax" or "sqrtsoftplus"; throws for others.
Scoring parse_scoring(std::string_view name);

// What ranks the experts of a layer.
struct RouterTensors {
  at::Tensor weight;               // [experts, hidden]
  std::optional<at::Tensor> bias;  // [experts]
  Scoring scoring = Scoring::kLogits;
};

class Lookahead {
 public:
  // The router of the layer `handle`, for hidden states [tokens, hidden]. Throws for shapes that
  // do not fit.
  Lookahead(const at::Tensor& x, RouterTensors router, const at::Tensor& handle, int64_t top_k);

  // What the next layer's pool lacks is read into the pool of `fallback` instead.
  void read_into_fallback(const LayerHandle& fallback) { fallback_ = {fallback.live, next_.layer}; }

  // Queues reads of the `top_k` experts that the router ranks first for each token.
  void prefetch() const;

 private:
  at::Tensor x_;
  RouterTensors router_;
  LayerHandle next_;
  std::optional<LayerHandle> fallback_;
  int64_t top_k_;
};

}  // namespace torch_mesh
