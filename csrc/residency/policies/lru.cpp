// Least recently used. A use lasts from touch() to the last unpin(), and recency counts from its
// end.
#include "residency/policies/policy.h"

namespace torch_mesh {
namespace {

class Lru final : public Policy {
 public:
  explicit Lru(const PolicyOptions& options)
      : Policy(options.all()), links_(options.all()), order_(links_) {}

  void gained(ExpertId id) override { order_.push_back(id); }
  void lost(ExpertId id) override { order_.erase(id); }

  void touch(ExpertId id) override {
    if (!evictable(id)) return;
    order_.erase(id);
    order_.push_back(id);
  }

  ExpertId victim() override { return order_.front(); }

 private:
  IndexLinks links_;
  IndexList order_;  // least recently used first
};

}  // namespace

std::unique_ptr<Policy> make_lru(const PolicyOptions& options) {
  return std::make_unique<Lru>(options);
}

}  // namespace torch_mesh
