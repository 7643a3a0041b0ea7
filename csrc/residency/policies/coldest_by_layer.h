// The base of policies that rank the experts within each layer. It knows the coldest evictable one
// of each layer, and searches for it only when it may have changed.
#pragma once

#include <cstddef>
#include <vector>

#include "residency/policies/policy.h"

namespace torch_mesh {

// `Ranking` derives from it. It has colder(a, b) for two experts of one layer, and warmth(id,
// layer) to compare those of different layers: the victim has the least.
template <typename Ranking>
class ColdestByLayer : public Policy {
 public:
  ExpertId victim() final {
    ExpertId victim = kNoExpert;
    decltype(ranking().warmth(0, 0)) min_warmth = {};
    for (int32_t layer = 0; layer < layers_; ++layer) {
      const ExpertId coldest = coldest_of(layer);
      if (coldest == kNoExpert) continue;
      const auto warmth = ranking().warmth(coldest, layer);
      if (victim != kNoExpert && !(warmth < min_warmth)) continue;
      min_warmth = warmth;
      victim = coldest;
    }
    return victim;
  }

 protected:
  explicit ColdestByLayer(const PolicyOptions& options)
      : Policy(options.all()),
        layers_(options.layers),
        experts_(options.experts),
        coldest_(static_cast<size_t>(layers_), kNoExpert),
        stale_(coldest_.size(), false),
        evictable_(coldest_.size(), 0) {}

  void order_changed(int32_t layer) { stale_[layer] = true; }
  void grew_hotter(ExpertId id) {
    if (coldest_[id / experts_] == id) order_changed(id / experts_);
  }

  const int32_t layers_;
  const int32_t experts_;  // per layer

 private:
  void gained(ExpertId id) override {
    const int32_t layer = id / experts_;
    if (++evictable_[layer] == 1) {
      coldest_[layer] = id;
      stale_[layer] = false;
    } else if (!stale_[layer] && ranking().colder(id, coldest_[layer])) {
      coldest_[layer] = id;
    }
  }

  void lost(ExpertId id) override {
    --evictable_[id / experts_];
    grew_hotter(id);
  }

  // kNoExpert: none of the layer is evictable.
  ExpertId coldest_of(int32_t layer) {
    if (evictable_[layer] == 0) return kNoExpert;
    if (stale_[layer]) find_coldest(layer);
    return coldest_[layer];
  }

  void find_coldest(int32_t layer) {
    ExpertId coldest = kNoExpert;
    for (ExpertId id = layer * experts_; id < (layer + 1) * experts_; ++id) {
      if (evictable(id) && (coldest == kNoExpert || ranking().colder(id, coldest))) coldest = id;
    }
    coldest_[layer] = coldest;
    stale_[layer] = false;
  }

  const Ranking& ranking() const { return static_cast<const Ranking&>(*this); }

  // By layer.
  std::vector<ExpertId> coldest_;  // among the evictable, unless stale_
  std::vector<bool> stale_;
  std::vector<int32_t> evictable_;
};

}  // namespace torch_mesh
