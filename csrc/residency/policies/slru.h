// Segmented LRU (Karedla, Love and Wherry, 1994). An expert enters on probation; its second use
// moves it to the protected segment, whose overflow goes back to probation. Victims come from
// probation first.
#pragma once

#include <algorithm>

#include "residency/policies/queue_policy.h"

namespace torch_mesh {

class Slru final : public QueuePolicy {
 public:
  explicit Slru(const PolicyOptions& options)
      : QueuePolicy(options, kCount), used_(static_cast<size_t>(options.all()), false) {
    resize(options.slots);
  }

  void admitted(ExpertId id) override {
    move(id, kProbation);
    used_[id] = false;
  }

  void gained(ExpertId id) override {
    move(id, queue_of(id));
    demote_overflow();
  }

  // The use that an expert was read for is its first: a prefetched expert has had none yet.
  void touch(ExpertId id) override {
    move(id, used_[id] ? kProtected : kProbation);
    used_[id] = true;
    demote_overflow();
  }

  ExpertId victim() override {
    const ExpertId id = oldest_evictable(kProbation);
    return id != kNoExpert ? id : oldest_evictable(kProtected);
  }

  void resize(int32_t slots) override {
    capacity_ = std::max<int32_t>(1, slots / 2);
    demote_overflow();
  }

 private:
  enum : Queue { kNone, kProbation, kProtected, kCount };

  // Pinned experts count towards the protected segment but stay until they are unpinned.
  void demote_overflow() {
    while (size(kProtected) > capacity_) {
      const ExpertId id = oldest_evictable(kProtected);
      if (id == kNoExpert) return;
      move(id, kProbation);
    }
  }

  int32_t capacity_ = 1;    // of the protected segment
  std::vector<bool> used_;  // since admission
};

}  // namespace torch_mesh
