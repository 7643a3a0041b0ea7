// Least frequently used with decay: the heat of an expert is the sum of kDecay^(ticks since) over
// its uses, where a tick is one forward of its layer. Heat outlives eviction, so that an expert
// that comes back keeps its past.
//
// Stored heat is never decayed. Instead the weight of one use is divided by kDecay with every tick
// of its layer, and heat is read relative to the present weight of the layer. Within a layer the
// order of experts then changes only when one of them is used.
#include "residency/policies/coldest_by_layer.h"

namespace torch_mesh {
namespace {

constexpr double kDecay = 0.97;
// The uses that a router probability of 1 adds.
constexpr double kScoreHeat = 1.0;
constexpr double kMaxWeight = 0x1p400;

class Lfu final : public ColdestByLayer<Lfu> {
 public:
  explicit Lfu(const PolicyOptions& options)
      : ColdestByLayer(options),
        weight_(static_cast<size_t>(options.layers), 1.0),
        heat_(static_cast<size_t>(options.all()), 0.0),
        last_use_(heat_.size(), 0) {}

  void admitted(ExpertId id) override { last_use_[id] = ++clock_; }

  void touch(ExpertId id) override {
    heat_[id] += weight_[id / experts_];
    last_use_[id] = ++clock_;
    grew_hotter(id);
  }

  ExpertId victim() override {
    ExpertId coldest = kNoExpert;
    for (int32_t layer = 0; layer < layers_; ++layer) {
      const ExpertId id = coldest_of(layer);
      if (id != kNoExpert && (coldest == kNoExpert || colder(id, coldest))) coldest = id;
    }
    return coldest;
  }

  void observe(int32_t layer, std::span<const float> scores) override {
    const ExpertId first = layer * experts_;
    for (int32_t expert = 0; expert < experts_; ++expert) {
      heat_[first + expert] += weight_[layer] * kScoreHeat * static_cast<double>(scores[expert]);
    }
    order_changed(layer);
  }

  void tick(int32_t layer, std::span<const int32_t>) override {
    weight_[layer] /= kDecay;
    if (weight_[layer] < kMaxWeight) return;
    // kMaxWeight is a power of two, so relative heat stays exact until it underflows; ties then go
    // by last use.
    weight_[layer] /= kMaxWeight;
    for (int32_t expert = 0; expert < experts_; ++expert) {
      heat_[layer * experts_ + expert] /= kMaxWeight;
    }
    order_changed(layer);
  }

  // The heat that uses at these rates would have come to.
  void start_from(const ModelUse& use) override {
    for (size_t id = 0; id < heat_.size(); ++id) {
      heat_[id] = static_cast<double>(use.rate(static_cast<int64_t>(id))) / (1 - kDecay);
    }
  }

 private:
  friend ColdestByLayer;

  // Of two equally cold experts, the one used longer ago is colder. Within a layer heat is compared
  // as it is stored, so that rounding cannot make the order depend on the weight of the moment.
  bool colder(ExpertId a, ExpertId b) const {
    const int32_t layer_a = a / experts_, layer_b = b / experts_;
    const bool same = layer_a == layer_b;
    const double heat_a = same ? heat_[a] : heat_[a] / weight_[layer_a];
    const double heat_b = same ? heat_[b] : heat_[b] / weight_[layer_b];
    return heat_a != heat_b ? heat_a < heat_b : last_use_[a] < last_use_[b];
  }

  uint64_t clock_ = 0;
  std::vector<double> weight_;  // [layers] of one use, now
  // By expert id.
  std::vector<double> heat_;
  std::vector<uint64_t> last_use_;
};

}  // namespace

std::unique_ptr<Policy> make_lfu(const PolicyOptions& options) {
  return std::make_unique<Lfu>(options);
}

}  // namespace torch_mesh
