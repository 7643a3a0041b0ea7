// Least recently used. A use lasts from touch() to the last unpin(), and recency counts from its
// end.
#pragma once

#include "io/index_list.h"
#include "residency/policies/policy.h"

namespace torch_mesh {

class Lru final : public Policy {
 public:
  explicit Lru(const PolicyOptions& options) : Policy(options.all()), links_(options.all()) {}
  Lru(const Lru&) = delete;
  Lru& operator=(const Lru&) = delete;

  void touch(ExpertId id) override {
    if (!evictable(id)) return;
    lost(id);
    gained(id);
  }

  ExpertId victim() override { return evictable_.front(); }

 private:
  void gained(ExpertId id) override { evictable_.push_back(id); }
  void lost(ExpertId id) override { evictable_.erase(id); }

  IndexLinks links_;
  IndexList evictable_{links_};  // the least recently used first
};

}  // namespace torch_mesh
