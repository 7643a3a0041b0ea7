// S3-FIFO (Yang et al., SOSP 2023). Experts enter a small queue; those used more than once there
// move to the main one, the others leave and are remembered as ghosts, which enter the main queue
// when they come back. The main queue gives an expert another round for each of its last uses.
#pragma once

#include <algorithm>

#include "residency/policies/queue_policy.h"

namespace torch_mesh {

class S3Fifo final : public QueuePolicy {
 public:
  explicit S3Fifo(const PolicyOptions& options)
      : QueuePolicy(options, kCount), reuses_(static_cast<size_t>(options.all()), kUnused) {
    resize(options.slots);
  }

  void admitted(ExpertId id) override {
    move(id, queue_of(id) == kGhosts ? kMain : kSmall);
    reuses_[id] = kUnused;
  }

  void removed(ExpertId id) override {
    move(id, queue_of(id) == kMain ? kNone : kGhosts);
    forget_overflow();
  }

  // The use that an expert was read for is no reuse.
  void touch(ExpertId id) override {
    if (reuses_[id] < kMaxReuses) ++reuses_[id];
  }

  ExpertId victim() override {
    if (!any_evictable()) return kNoExpert;
    promote_reused();
    const ExpertId newcomer = oldest_evictable(kSmall);
    if (small_overflows() && newcomer != kNoExpert) return newcomer;
    const ExpertId established = from_main();
    return established != kNoExpert ? established : newcomer;
  }

  void resize(int32_t slots) override {
    small_capacity_ = std::max<int32_t>(1, slots / 10);
    ghost_capacity_ = std::max<int32_t>(1, slots - small_capacity_);
    forget_overflow();
  }

 private:
  static constexpr int8_t kUnused = -1, kMaxReuses = 3;
  enum : Queue { kNone, kSmall, kGhosts, kMain, kCount };

  bool small_overflows() const { return size(kSmall) > small_capacity_; }
  void forget_overflow() { shorten(kGhosts, ghost_capacity_, kNone); }

  void promote_reused() {
    while (small_overflows()) {
      const ExpertId id = oldest_evictable(kSmall);
      if (id == kNoExpert || reuses_[id] <= 1) return;
      reuses_[id] = 0;
      move(id, kMain);
    }
  }

  // The loop ends, since each round takes one from the reuses of every expert that is not pinned.
  ExpertId from_main() {
    for (int32_t left = size(kMain) * (kMaxReuses + 1); left > 0; --left) {
      const ExpertId id = oldest(kMain);
      if (!pinned(id) && reuses_[id] <= 0) return id;
      if (!pinned(id)) --reuses_[id];
      move(id, kMain);
    }
    return kNoExpert;
  }

  int32_t small_capacity_ = 1;
  int32_t ghost_capacity_ = 1;
  std::vector<int8_t> reuses_;  // since admission; at most kMaxReuses
};

}  // namespace torch_mesh
