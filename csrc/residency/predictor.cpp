#include "residency/predictor.h"

#include <algorithm>

#include "base/error.h"
#include "residency/core/model_use.h"

namespace torch_mesh {

namespace {

class Previous final : public Predictor {
 public:
  explicit Previous(int32_t layers) : recent_(layers) {}

  void observe(int32_t layer, std::span<const int32_t> experts) override {
    std::vector<int32_t>& order = recent_[layer];
    std::erase_if(
        order, [&](int32_t expert) { return std::ranges::find(experts, expert) != experts.end(); });
    order.insert(order.begin(), experts.begin(), experts.end());
    std::ranges::sort(std::span(order).first(experts.size()));
  }

  int32_t predict(int32_t layer, std::span<int32_t> out) override {
    const std::vector<int32_t>& order = recent_[layer];
    const size_t count = std::min(order.size(), out.size());
    std::copy_n(order.begin(), count, out.begin());
    return static_cast<int32_t>(count);
  }

  void reset() override {
    for (std::vector<int32_t>& order : recent_) order.clear();
  }

 private:
  std::vector<std::vector<int32_t>> recent_;  // by layer: those used, the last first
};

class Coactivation final : public Predictor {
 public:
  Coactivation(int32_t layers, int32_t experts)
      : layers_(layers),
        experts_(experts),
        count_(static_cast<size_t>(layers) * experts * experts, 0.f),
        votes_(experts, 0.f) {
    last_.reserve(experts);
    order_.reserve(experts);
  }

  void observe(int32_t layer, std::span<const int32_t> experts) override {
    if (layer == next_layer_) {
      for (int32_t before : last_) {
        for (int32_t expert : experts) row(layer, before)[expert] += 1.f;
      }
    }
    next_layer_ = (layer + 1) % layers_;  // after the last layer comes the next token's first
    last_.assign(experts.begin(), experts.end());
  }

  int32_t predict(int32_t layer, std::span<int32_t> out) override {
    if (layer != next_layer_) return 0;
    std::fill(votes_.begin(), votes_.end(), 0.f);
    for (int32_t before : last_) {
      const float* counts = row(layer, before);
      for (int32_t i = 0; i < experts_; ++i) votes_[i] += counts[i];
    }
    return rank(votes_, order_, out);
  }

  void reset() override { next_layer_ = -1; }

 private:
  float* row(int32_t layer, int32_t before) {
    return &count_[(static_cast<size_t>(layer) * experts_ + before) * experts_];
  }

  int32_t layers_;
  int32_t experts_;
  int32_t next_layer_ = -1;    // that follows the last one; -1: none does
  std::vector<int32_t> last_;  // the experts of the last one
  std::vector<float> count_;   // [layer][expert of the layer before][expert]
  std::vector<float> votes_;
  std::vector<int32_t> order_;
};

}  // namespace

std::unique_ptr<Predictor> make_predictor(std::string_view name, int32_t layers, int32_t experts) {
  if (name == "previous") return std::make_unique<Previous>(layers);
  if (name == "coactivation") return std::make_unique<Coactivation>(layers, experts);
  throw_invalid("unknown predictor \"", name, "\"; allowed are previous, coactivation");
}

}  // namespace torch_mesh
