// Predicts the next layer's experts: applies its router to this layer's hidden states.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <optional>
#include <string_view>

#include "bindings/registry.h"

namespace torch_mesh {

// The function that a router applies to its logits before it adds its bias and selects.
enum class Scoring { kLogits, kSigmoid, kSoftmax, kSqrtSoftplus };

// Parses "logits", "sigmoid", "softmax" or "sqrtsoftplus"; throws for other names.
Scoring parse_scoring(std::string_view name);

// The tensors of a router, which ranks the experts of a layer.
struct RouterTensors {
  at::Tensor weight;               // [experts, hidden]
  std::optional<at::Tensor> bias;  // [experts]
  Scoring scoring = Scoring::kLogits;
};

class Lookahead {
 public:
  // `router` is that of the layer `handle`; x is [tokens, hidden]. Throws for shapes that do not
  // fit.
  Lookahead(const at::Tensor& x, RouterTensors router, const at::Tensor& handle, int64_t top_k);

  // Makes prefetch() read experts that the next layer's pool lacks into the pool of `fallback`.
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
