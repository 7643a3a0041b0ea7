// SIEVE (Zhang et al., NSDI 2024): a queue in order of admission and a hand that moves from old to
// new. The hand clears the marks of experts used since it last passed, and evicts the first without
// one.
//
// An expert enters with its mark set, unlike in the paper. The layers scan the pool cyclically, so
// that a new expert cannot be used again before a whole token has passed, and the hand would evict
// it first. That would cost half of all hits (0.227 instead of 0.435 at a quarter of
// DeepSeek-V2-Lite).
#pragma once

#include "residency/policies/queue_policy.h"

namespace torch_mesh {

class Sieve final : public QueuePolicy {
 public:
  explicit Sieve(const PolicyOptions& options)
      : QueuePolicy(options, kCount), marked_(static_cast<size_t>(options.all()), false) {}

  void admitted(ExpertId id) override {
    marked_[id] = true;
    move(id, kResident);
  }

  void removed(ExpertId id) override {
    if (hand_ == id) hand_ = next(id);
    move(id, kNone);
  }

  void touch(ExpertId id) override { marked_[id] = true; }

  ExpertId victim() override {
    if (!any_evictable()) return kNoExpert;
    for (;; hand_ = next(hand_)) {
      if (hand_ == kNoExpert) hand_ = oldest(kResident);
      if (pinned(hand_)) continue;
      if (!marked_[hand_]) return hand_;
      marked_[hand_] = false;
    }
  }

 private:
  enum : Queue { kNone, kResident, kCount };

  std::vector<bool> marked_;
  ExpertId hand_ = kNoExpert;
};

}  // namespace torch_mesh
