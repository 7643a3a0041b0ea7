// A predictor names the experts that a layer is likely to use next, so that they can be read ahead.
// Like a policy it is a state machine over expert indices without threads or clocks.
#pragma once

#include <cstdint>
#include <memory>
#include <span>
#include <string_view>

namespace torch_mesh {

class Predictor {
 public:
  virtual ~Predictor() = default;

  // A forward of `layer` uses these experts, each once.
  virtual void observe(int32_t layer, std::span<const int32_t> experts) = 0;
  // Fills `out` with distinct experts of `layer`, the likeliest first; returns how many. Fewer than
  // out.size() if there is no reason to expect more.
  virtual int32_t predict(int32_t layer, std::span<int32_t> out) = 0;
  // A new sequence begins: forgets what is true of one text, and keeps what is true of the model.
  virtual void reset() {}
};

// "previous": what the layer used last, the most recent first.
// "coactivation": how often each expert was used after each of those that the layer before it has
// just used, counted since the predictor was made.
// Else Error(kInvalid).
std::unique_ptr<Predictor> make_predictor(std::string_view name, int32_t layers, int32_t experts);

}  // namespace torch_mesh
