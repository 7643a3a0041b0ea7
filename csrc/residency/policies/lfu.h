// Least frequently used with decay: the heat of an expert is the sum of kDecay^(ticks since) over
// its uses, where a tick is one forward of its layer. Heat outlives eviction, so that an expert
// that comes back keeps its past.
//
// Stored heat is never decayed. Instead the weight of one use is divided by kDecay with every tick
// of its layer, and heat is read relative to the present weight of the layer. Within a layer the
// order of experts then changes only when one of them is used.
#pragma once

#include <tuple>
#include <utility>

#include "residency/policies/coldest_by_layer.h"

namespace torch_mesh {

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

  static constexpr double kDecay = 0.97;
  static constexpr double kMaxWeight = 0x1p400;

  // Of two equally cold experts, the one used longer ago is colder. Within a layer heat is compared
  // as it is stored, so that rounding cannot make the order depend on the weight of the moment.
  bool colder(ExpertId a, ExpertId b) const {
    return std::tie(heat_[a], last_use_[a]) < std::tie(heat_[b], last_use_[b]);
  }
  std::pair<double, uint64_t> warmth(ExpertId id, int32_t layer) const {
    return {heat_[id] / weight_[layer], last_use_[id]};
  }

  uint64_t clock_ = 0;
  std::vector<double> weight_;  // [layers] of one use, now
  // By expert id.
  std::vector<double> heat_;
  std::vector<uint64_t> last_use_;
};

}  // namespace torch_mesh
