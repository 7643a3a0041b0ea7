// 2Q (Johnson and Shasha, VLDB 1994). An expert enters a short queue, in which uses do not count.
// One that is asked for again soon after it has left that queue enters the main one, which is least
// recently used. The layers scan the pool cyclically: this is what keeps them apart.
#include <algorithm>

#include "residency/policies/policy.h"

namespace torch_mesh {
namespace {

class TwoQueues final : public Policy {
 public:
  explicit TwoQueues(const PolicyOptions& options)
      : Policy(options.all()),
        queue_of_(static_cast<size_t>(options.all()), Queue::kUnknown),
        links_(options.all()),
        recent_(links_),
        ghosts_(links_),
        main_(links_) {
    resize(options.slots);
  }

  void admitted(ExpertId id) override {
    const bool known = queue_of_[id] == Queue::kGhost;
    if (known) ghosts_.erase(id);
    queue_of_[id] = known ? Queue::kMain : Queue::kRecent;
    (known ? main_ : recent_).push_back(id);
  }

  void removed(ExpertId id) override {
    if (queue_of_[id] == Queue::kMain) {
      main_.erase(id);
      queue_of_[id] = Queue::kUnknown;
      return;
    }
    recent_.erase(id);
    queue_of_[id] = Queue::kGhost;
    ghosts_.push_back(id);
    forget_overflow();
  }

  void touch(ExpertId id) override {
    if (queue_of_[id] != Queue::kMain) return;
    main_.erase(id);
    main_.push_back(id);
  }

  ExpertId victim() override {
    const ExpertId recent = first_evictable(recent_), main = first_evictable(main_);
    if (recent == kNoExpert || main == kNoExpert) return std::max(recent, main);
    return recent_.size() > recent_capacity_ ? recent : main;
  }

  void resize(int32_t slots) override {
    recent_capacity_ = std::max<int32_t>(1, slots / 4);
    ghost_capacity_ = std::max<int32_t>(1, slots / 2);
    forget_overflow();
  }

 private:
  // A ghost is not resident any more; only its id is remembered.
  enum class Queue : uint8_t { kUnknown, kRecent, kGhost, kMain };

  void forget_overflow() {
    while (ghosts_.size() > ghost_capacity_) queue_of_[ghosts_.pop_front()] = Queue::kUnknown;
  }

  int32_t recent_capacity_ = 1;
  int32_t ghost_capacity_ = 1;
  std::vector<Queue> queue_of_;
  IndexLinks links_;
  IndexList recent_;  // oldest first, as are the others
  IndexList ghosts_;
  IndexList main_;
};

}  // namespace

std::unique_ptr<Policy> make_two_queues(const PolicyOptions& options) {
  return std::make_unique<TwoQueues>(options);
}

}  // namespace torch_mesh
