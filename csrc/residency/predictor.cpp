#include "residency/predictor.h"

#include <algorithm>

#include "base/error.h"
#include "residency/core/model_use.h"

namespace torch_mesh {

namespace {

class Previous final : public Predictor {
 public:
  Previous(int32_t layers, int32_t experts)
      : experts_(experts), clock_(layers, 0.f), used_(static_cast<size_t>(layers) * experts, 0.f) {
    order_.reserve(experts);
  }

  void observe(int32_t layer, std::span<const int32_t> experts) override {
    clock_[layer] += 1.f;
    for (int32_t expert : experts) used_[layer * experts_ + expert] = clock_[layer];
    if (clock_[layer] < kRestart) return;
    // Beyond this a float has no next integer, so only the order of the last forwards is kept.
    float* used = &used_[static_cast<size_t>(layer) * experts_];
    for (int32_t i = 0; i < experts_; ++i) used[i] = std::max(0.f, used[i] - kRestart / 2);
    clock_[layer] -= kRestart / 2;
  }

  int32_t predict(int32_t layer, std::span<int32_t> out) override {
    return rank({&used_[static_cast<size_t>(layer) * experts_], static_cast<size_t>(experts_)},
                order_, out);
  }

  void reset() override {
    std::fill(used_.begin(), used_.end(), 0.f);
    std::fill(clock_.begin(), clock_.end(), 0.f);
  }

 private:
  static constexpr float kRestart = 0x1p23f;

  int32_t experts_;
  std::vector<float> clock_;  // by layer
  std::vector<float> used_;   // by expert id: when; 0 for never
  std::vector<int32_t> order_;
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
    if (layer == next_layer()) {
      for (int32_t before : last_) {
        for (int32_t expert : experts) row(layer, before)[expert] += 1.f;
      }
    }
    last_layer_ = layer;
    last_.assign(experts.begin(), experts.end());
  }

  int32_t predict(int32_t layer, std::span<int32_t> out) override {
    if (layer != next_layer()) return 0;
    std::fill(votes_.begin(), votes_.end(), 0.f);
    for (int32_t before : last_) {
      const float* counts = row(layer, before);
      for (int32_t i = 0; i < experts_; ++i) votes_[i] += counts[i];
    }
    return rank(votes_, order_, out);
  }

  void reset() override { last_layer_ = kNone; }

 private:
  static constexpr int32_t kNone = -2;

  // After the last layer of a token comes the first one of the next.
  int32_t next_layer() const { return last_layer_ == kNone ? kNone : (last_layer_ + 1) % layers_; }
  float* row(int32_t layer, int32_t before) {
    return &count_[(static_cast<size_t>(layer) * experts_ + before) * experts_];
  }

  int32_t layers_;
  int32_t experts_;
  int32_t last_layer_ = kNone;
  std::vector<int32_t> last_;  // its experts
  std::vector<float> count_;   // [layer][expert of the layer before][expert]
  std::vector<float> votes_;
  std::vector<int32_t> order_;
};

}  // namespace

std::unique_ptr<Predictor> make_predictor(std::string_view name, int32_t layers, int32_t experts) {
  if (name == "previous") return std::make_unique<Previous>(layers, experts);
  if (name == "coactivation") return std::make_unique<Coactivation>(layers, experts);
  throw_invalid("unknown predictor \"", name, "\"; allowed are previous, coactivation");
}

}  // namespace torch_mesh
