// Least recently used. A use lasts from touch() to the last unpin(), and recency counts from its
// end.
#pragma once

#include "residency/policies/queue_policy.h"

namespace torch_mesh {

class Lru final : public QueuePolicy {
 public:
  explicit Lru(const PolicyOptions& options) : QueuePolicy(options, kCount) {}

  void gained(ExpertId id) override { move(id, kEvictable); }
  void lost(ExpertId id) override { move(id, kNone); }

  void touch(ExpertId id) override {
    if (evictable(id)) move(id, kEvictable);
  }

  ExpertId victim() override { return oldest(kEvictable); }

 private:
  enum : Queue { kNone, kEvictable, kCount };
};

}  // namespace torch_mesh
