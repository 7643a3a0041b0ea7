// 2Q (Johnson and Shasha, VLDB 1994). An expert enters a short queue, in which uses do not count.
// One that is asked for again soon after it has left that queue enters the main one, which is least
// recently used. The layers scan the pool cyclically, and this keeps such a scan out of the main
// queue.
#pragma once

#include <algorithm>

#include "residency/policies/queue_policy.h"

namespace torch_mesh {

class TwoQueues final : public QueuePolicy {
 public:
  explicit TwoQueues(const PolicyOptions& options) : QueuePolicy(options, kCount) {
    resize(options.slots);
  }

  void admitted(ExpertId id) override { move(id, queue_of(id) == kGhosts ? kMain : kRecent); }

  void removed(ExpertId id) override {
    move(id, queue_of(id) == kMain ? kNone : kGhosts);
    forget_overflow();
  }

  void touch(ExpertId id) override {
    if (queue_of(id) == kMain) move(id, kMain);
  }

  ExpertId victim() override {
    const ExpertId recent = oldest_evictable(kRecent), main = oldest_evictable(kMain);
    if (recent == kNoExpert || main == kNoExpert) return std::max(recent, main);
    return size(kRecent) > recent_capacity_ ? recent : main;
  }

  void resize(int32_t slots) override {
    recent_capacity_ = std::max<int32_t>(1, slots / 4);
    ghost_capacity_ = std::max<int32_t>(1, slots / 2);
    forget_overflow();
  }

 private:
  // A ghost is not resident any more; only its id is remembered.
  enum : Queue { kNone, kRecent, kGhosts, kMain, kCount };

  void forget_overflow() { shorten(kGhosts, ghost_capacity_, kNone); }

  int32_t recent_capacity_ = 1;
  int32_t ghost_capacity_ = 1;
};

}  // namespace torch_mesh
