// S3-FIFO (Yang et al., SOSP 2023). Experts enter a small queue; those used more than once there
// move to the main one, the others leave and are remembered as ghosts, which enter the main queue
// when they come back. The main queue gives an expert another round for each of its last uses.
#include <algorithm>

#include "residency/policies/policy.h"

namespace torch_mesh {
namespace {

constexpr uint8_t kMaxUses = 3;

class S3Fifo final : public Policy {
 public:
  explicit S3Fifo(const PolicyOptions& options)
      : Policy(options.all()),
        queue_of_(static_cast<size_t>(options.all()), Queue::kUnknown),
        used_(queue_of_.size(), false),
        reuses_(queue_of_.size(), 0),
        links_(options.all()),
        small_(links_),
        ghosts_(links_),
        main_(links_) {
    resize(options.slots);
  }

  void admitted(ExpertId id) override {
    const bool known = queue_of_[id] == Queue::kGhost;
    if (known) ghosts_.erase(id);
    queue_of_[id] = known ? Queue::kMain : Queue::kSmall;
    (known ? main_ : small_).push_back(id);
    used_[id] = false;
    reuses_[id] = 0;
  }

  void removed(ExpertId id) override {
    if (queue_of_[id] == Queue::kMain) {
      main_.erase(id);
      queue_of_[id] = Queue::kUnknown;
      return;
    }
    small_.erase(id);
    queue_of_[id] = Queue::kGhost;
    ghosts_.push_back(id);
    forget_overflow();
  }

  // The use that an expert was read for is none that came back.
  void touch(ExpertId id) override {
    if (used_[id]) reuses_[id] = std::min<uint8_t>(kMaxUses, reuses_[id] + 1);
    used_[id] = true;
  }

  ExpertId victim() override {
    if (!any_evictable()) return kNoExpert;
    promote_reused();
    const ExpertId newcomer = first_evictable(small_);
    if (small_.size() > small_capacity_ && newcomer != kNoExpert) return newcomer;
    const ExpertId established = from_main();
    return established != kNoExpert ? established : newcomer;
  }

  void resize(int32_t slots) override {
    small_capacity_ = std::max<int32_t>(1, slots / 10);
    ghost_capacity_ = std::max<int32_t>(1, slots - small_capacity_);
    forget_overflow();
  }

 private:
  enum class Queue : uint8_t { kUnknown, kSmall, kGhost, kMain };

  void forget_overflow() {
    while (ghosts_.size() > ghost_capacity_) queue_of_[ghosts_.pop_front()] = Queue::kUnknown;
  }

  void promote_reused() {
    while (small_.size() > small_capacity_) {
      const ExpertId id = first_evictable(small_);
      if (id == kNoExpert || reuses_[id] <= 1) return;
      small_.erase(id);
      queue_of_[id] = Queue::kMain;
      reuses_[id] = 0;
      main_.push_back(id);
    }
  }

  // Ends: each round takes one from the reuses of every expert that is not pinned.
  ExpertId from_main() {
    for (int32_t left = main_.size() * (kMaxUses + 1); left > 0; --left) {
      const ExpertId id = main_.front();
      if (!pinned(id) && reuses_[id] == 0) return id;
      if (!pinned(id)) --reuses_[id];
      main_.erase(id);
      main_.push_back(id);
    }
    return kNoExpert;
  }

  int32_t small_capacity_ = 1;
  int32_t ghost_capacity_ = 1;
  std::vector<Queue> queue_of_;
  std::vector<bool> used_;  // since admission
  std::vector<uint8_t> reuses_;
  IndexLinks links_;
  IndexList small_;  // oldest first, as are the others
  IndexList ghosts_;
  IndexList main_;
};

}  // namespace

std::unique_ptr<Policy> make_s3fifo(const PolicyOptions& options) {
  return std::make_unique<S3Fifo>(options);
}

}  // namespace torch_mesh
