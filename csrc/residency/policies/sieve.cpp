// SIEVE (Zhang et al., NSDI 2024): a queue in order of admission and a hand that moves from old to
// new. The hand clears the marks of experts used since it last passed, and evicts the first without
// one.
//
// An expert enters with its mark set, unlike in the paper. The layers scan the pool cyclically, so
// that a new expert cannot be used again before a whole token has passed, and the hand would evict
// it first. That would cost half of all hits (0.227 instead of 0.435 at a quarter of
// DeepSeek-V2-Lite).
#include "residency/policies/policy.h"

namespace torch_mesh {
namespace {

class Sieve final : public Policy {
 public:
  explicit Sieve(const PolicyOptions& options)
      : Policy(options.all()),
        marked_(static_cast<size_t>(options.all()), false),
        links_(options.all()),
        queue_(links_) {}

  void admitted(ExpertId id) override {
    marked_[id] = true;
    queue_.push_back(id);
  }

  void removed(ExpertId id) override {
    if (hand_ == id) hand_ = queue_.next(id);
    queue_.erase(id);
  }

  void touch(ExpertId id) override { marked_[id] = true; }

  ExpertId victim() override {
    if (!any_evictable()) return kNoExpert;
    for (;; hand_ = queue_.next(hand_)) {
      if (hand_ == kNoExpert) hand_ = queue_.front();
      if (pinned(hand_)) continue;
      if (!marked_[hand_]) return hand_;
      marked_[hand_] = false;
    }
  }

 private:
  std::vector<bool> marked_;
  IndexLinks links_;
  IndexList queue_;  // admitted first, first
  ExpertId hand_ = kNoExpert;
};

}  // namespace

std::unique_ptr<Policy> make_sieve(const PolicyOptions& options) {
  return std::make_unique<Sieve>(options);
}

}  // namespace torch_mesh
