// Least recently used. A use lasts from touch() to the last unpin(), which is when recency counts
// from.
#include "residency/index_list.h"
#include "residency/policies/policies.h"

namespace torch_mesh {
namespace {

class Lru final : public Policy {
 public:
  explicit Lru(const PolicyOptions& options)
      : Policy(options.all()), links_(options.all()), order_(links_) {}

  const char* name() const override { return "lru"; }

  void admitted(ExpertId id) override { order_.push_back(id); }

  void removed(ExpertId id) override {
    if (evictable(id)) order_.erase(id);
  }

  void touch(ExpertId id) override {
    if (!evictable(id)) return;
    order_.erase(id);
    order_.push_back(id);
  }

  void has_pin(ExpertId id) override { order_.erase(id); }

  void lost_pin(ExpertId id) override { admitted(id); }

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
