// 2Q (Johnson and Shasha, VLDB 1994). An expert enters a short queue, in which uses do not count.
// One that is asked for again soon after it has left that queue enters the main one, which is least
// recently used. The layers scan the pool cyclically, and this keeps such a scan out of the main
// queue.
#include <algorithm>

#include "residency/policies/queues.h"

namespace torch_mesh {
namespace {

class TwoQueues final : public Policy {
 public:
  explicit TwoQueues(const PolicyOptions& options) : Policy(options.all()), queues_(options.all()) {
    resize(options.slots);
  }

  void admitted(ExpertId id) override {
    queues_.move(id, queues_.of(id) == Queue::kGhosts ? Queue::kMain : Queue::kRecent);
  }

  void removed(ExpertId id) override {
    queues_.move(id, queues_.of(id) == Queue::kMain ? Queue::kNone : Queue::kGhosts);
    forget_overflow();
  }

  void touch(ExpertId id) override {
    if (queues_.of(id) == Queue::kMain) queues_.move(id, Queue::kMain);
  }

  ExpertId victim() override {
    const ExpertId recent = first_evictable(queues_[Queue::kRecent]);
    const ExpertId main = first_evictable(queues_[Queue::kMain]);
    if (recent == kNoExpert || main == kNoExpert) return std::max(recent, main);
    return queues_[Queue::kRecent].size() > recent_capacity_ ? recent : main;
  }

  void resize(int32_t slots) override {
    recent_capacity_ = std::max<int32_t>(1, slots / 4);
    ghost_capacity_ = std::max<int32_t>(1, slots / 2);
    forget_overflow();
  }

 private:
  // A ghost is not resident any more; only its id is remembered.
  enum class Queue : uint8_t { kNone, kRecent, kGhosts, kMain, kCount };

  void forget_overflow() { queues_.shorten(Queue::kGhosts, ghost_capacity_, Queue::kNone); }

  int32_t recent_capacity_ = 1;
  int32_t ghost_capacity_ = 1;
  Queues<Queue> queues_;
};

}  // namespace

std::unique_ptr<Policy> make_two_queues(const PolicyOptions& options) {
  return std::make_unique<TwoQueues>(options);
}

}  // namespace torch_mesh
