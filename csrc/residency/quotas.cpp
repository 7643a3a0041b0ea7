// Shares the slots out among the layers: each has a policy of its own and a quota, the layer that
// exceeds its quota most gives something up, and what one layer leaves unused others may borrow.
//
// Quotas follow from miss-ratio curves: how many hits a layer would have had with 1, 2, 3 ... slots
// under LRU, from the reuse distances of its own uses (Mattson et al., IBM Systems Journal 1970).
// SHARDS (Waldspurger et al., FAST '15) samples ids to make that cheap; a layer has so few experts
// that all of them are sampled. Slots go where the next one gains most, along the convex hulls of
// the curves; every few hundred tokens they are shared out anew.
#include <algorithm>
#include <memory>
#include <string>

#include "residency/policies.h"

namespace torch_mesh {
namespace {

constexpr int64_t kRenewal = 256;  // forwards of the last layer
constexpr double kDecay = .9;      // of the curves, at each renewal
// A curve is that of LRU and of the past: so much of each quota is an equal share all the same.
constexpr double kEqualShare = .5;

class Quotas final : public Policy {
 public:
  Quotas(std::string_view base, const PolicyOptions& options)
      : layers_(options.layers),
        experts_(options.experts),
        slots_(options.slots),
        resident_(static_cast<size_t>(layers_), 0),
        pinned_(resident_.size(), 0),
        quota_(resident_.size(), 0),
        hits_(resident_.size() * experts_, 0.0),
        last_use_(hits_.size(), 0),
        is_pinned_(hits_.size(), false) {
    for (int32_t layer = 0; layer < layers_; ++layer) {
      of_layer_.push_back(make_policy(base, {1, experts_, std::max(1, slots_ / layers_)}));
    }
    name_ = std::string(of_layer_[0]->name()) + " with quotas";
    pieces_.reserve(hits_.size());
    share_out();
  }

  const char* name() const override { return name_.c_str(); }

  void admit(ExpertId id) override {
    ++resident_[layer_of(id)];
    policy_of(id).admit(expert_of(id));
  }
  void remove(ExpertId id) override {
    --resident_[layer_of(id)];
    policy_of(id).remove(expert_of(id));
  }
  void touch(ExpertId id) override { policy_of(id).touch(expert_of(id)); }
  void pin(ExpertId id) override {
    ++pinned_[layer_of(id)];
    is_pinned_[id] = true;
    policy_of(id).pin(expert_of(id));
  }
  void unpin(ExpertId id) override {
    --pinned_[layer_of(id)];
    is_pinned_[id] = false;
    policy_of(id).unpin(expert_of(id));
  }

  ExpertId victim() override {
    int32_t from = -1, most = 0;
    for (int32_t layer = 0; layer < layers_; ++layer) {
      if (resident_[layer] == pinned_[layer]) continue;
      // The layer that runs is about to get one more.
      const int32_t excess = resident_[layer] + (layer == now_) - quota_[layer];
      if (from >= 0 && excess <= most) continue;
      from = layer;
      most = excess;
    }
    if (from < 0) return kNoExpert;
    return from * experts_ + of_layer_[from]->victim();
  }

  // Within a layer its own policy says; between layers the quotas have decided.
  bool prefers(ExpertId id, ExpertId victim) const override {
    return layer_of(id) != layer_of(victim) ||
           policy_of(id).prefers(expert_of(id), expert_of(victim));
  }
  bool resident(ExpertId id) const override { return policy_of(id).resident(expert_of(id)); }
  bool pinned(ExpertId id) const override { return is_pinned_[id]; }

  void resize(int32_t slots) override {
    slots_ = slots;
    share_out();
  }

  void start_from(const ModelUse& use) override {
    for (int32_t layer = 0; layer < layers_; ++layer) {
      ModelUse one(1, experts_);
      one.tokens[0] = use.tokens[layer];
      std::copy_n(&use.uses[static_cast<size_t>(layer) * experts_], experts_, one.uses.begin());
      of_layer_[layer]->start_from(one);
    }
  }
  void begin_sequence(int32_t layer) override { of_layer_[layer]->begin_sequence(0); }
  void observe(int32_t layer, std::span<const float> scores) override {
    of_layer_[layer]->observe(0, scores);
  }
  void tick(int32_t layer, std::span<const int32_t> experts) override {
    count(layer, experts);
    of_layer_[layer]->tick(0, experts);
  }
  void tick_prompt(int32_t layer, std::span<const int32_t> experts, std::span<const int64_t> ids,
                   int32_t top_k) override {
    count(layer, experts);
    of_layer_[layer]->tick_prompt(0, experts, ids, top_k);
  }

 private:
  int32_t layer_of(ExpertId id) const { return id / experts_; }
  int32_t expert_of(ExpertId id) const { return id % experts_; }
  Policy& policy_of(ExpertId id) const { return *of_layer_[layer_of(id)]; }

  // The reuse distance of an expert is the number of others that its layer has used since.
  void count(int32_t layer, std::span<const int32_t> experts) {
    now_ = layer;
    int64_t* last_use = &last_use_[static_cast<size_t>(layer) * experts_];
    double* hits = &hits_[static_cast<size_t>(layer) * experts_];
    for (const int32_t expert : experts) {
      const int64_t before = last_use[expert];
      if (before == 0) continue;
      ++hits[std::count_if(last_use, last_use + experts_, [&](int64_t at) { return at > before; })];
    }
    for (const int32_t expert : experts) last_use[expert] = ++clock_;
    if (layer != layers_ - 1 || ++forwards_ % kRenewal != 0) return;
    share_out();
    for (double& count : hits_) count *= kDecay;
  }

  struct Piece {
    double gain;  // hits per slot
    int32_t layer, slots;
  };

  // The convex hull of a layer's curve, from the left.
  void add_hull(int32_t layer, std::vector<Piece>& pieces) const {
    const double* hits = &hits_[static_cast<size_t>(layer) * experts_];
    const size_t first = pieces.size();
    for (int32_t slot = 0; slot < experts_; ++slot) {
      Piece piece{hits[slot], layer, 1};
      for (; pieces.size() > first && pieces.back().gain <= piece.gain; pieces.pop_back()) {
        const Piece& last = pieces.back();
        const int32_t slots = last.slots + piece.slots;
        piece = {(last.gain * last.slots + piece.gain * piece.slots) / slots, layer, slots};
      }
      pieces.push_back(piece);
    }
  }

  void share_out() {
    pieces_.clear();
    for (int32_t layer = 0; layer < layers_; ++layer) add_hull(layer, pieces_);
    // Within a layer no two gain the same, so this is an order of all; a stable sort takes memory.
    std::sort(pieces_.begin(), pieces_.end(), [](const Piece& a, const Piece& b) {
      return a.gain != b.gain ? a.gain > b.gain : a.layer < b.layer;
    });
    std::fill(quota_.begin(), quota_.end(), 0);
    int32_t left = slots_;
    for (const Piece& piece : pieces_) {
      const int32_t slots = piece.gain > 0 ? std::min(left, piece.slots) : 0;
      quota_[piece.layer] += slots;
      left -= slots;
    }
    left = slots_;
    for (int32_t& quota : quota_) {
      quota = static_cast<int32_t>(kEqualShare * slots_ / layers_ + (1 - kEqualShare) * quota);
      left -= quota;
    }
    for (int32_t layer = 0; left > 0; layer = (layer + 1) % layers_, --left) ++quota_[layer];
    for (int32_t layer = 0; layer < layers_; ++layer) {
      of_layer_[layer]->resize(std::max(1, quota_[layer]));
    }
  }

  int32_t layers_;
  int32_t experts_;
  int32_t slots_;
  int32_t now_ = 0;  // the layer that runs
  int64_t clock_ = 0, forwards_ = 0;
  std::string name_;
  std::vector<std::unique_ptr<Policy>> of_layer_;
  std::vector<int32_t> resident_, pinned_, quota_;  // by layer
  std::vector<double> hits_;                        // [layers][distance]
  std::vector<int64_t> last_use_;                   // by expert id; 0: never
  std::vector<bool> is_pinned_;
  std::vector<Piece> pieces_;  // of share_out(), which takes no memory
};

}  // namespace

std::unique_ptr<Policy> make_quotas(std::string_view base, const PolicyOptions& options) {
  return std::make_unique<Quotas>(base, options);
}

}  // namespace torch_mesh
