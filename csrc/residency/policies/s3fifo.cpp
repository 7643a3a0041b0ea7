// S3-FIFO (Yang et al., SOSP 2023). Experts enter a small queue; those used more than once there
// move to the main one, the others leave and are remembered as ghosts, which enter the main queue
// when they come back. The main queue gives an expert another round for each of its last uses.
#include <algorithm>

#include "residency/policies/queues.h"

namespace torch_mesh {
namespace {

constexpr uint8_t kMaxUses = 3;

class S3Fifo final : public Policy {
 public:
  explicit S3Fifo(const PolicyOptions& options)
      : Policy(options.all()),
        used_(static_cast<size_t>(options.all()), false),
        reuses_(used_.size(), 0),
        queues_(options.all()) {
    resize(options.slots);
  }

  void admitted(ExpertId id) override {
    queues_.move(id, queues_.of(id) == Queue::kGhosts ? Queue::kMain : Queue::kSmall);
    used_[id] = false;
    reuses_[id] = 0;
  }

  void removed(ExpertId id) override {
    queues_.move(id, queues_.of(id) == Queue::kMain ? Queue::kNone : Queue::kGhosts);
    forget_overflow();
  }

  // The use that an expert was read for is no reuse.
  void touch(ExpertId id) override {
    if (used_[id]) reuses_[id] = std::min<uint8_t>(kMaxUses, reuses_[id] + 1);
    used_[id] = true;
  }

  ExpertId victim() override {
    if (!any_evictable()) return kNoExpert;
    promote_reused();
    const ExpertId newcomer = first_evictable(queues_[Queue::kSmall]);
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
  enum class Queue : uint8_t { kNone, kSmall, kGhosts, kMain, kCount };

  bool small_overflows() const { return queues_[Queue::kSmall].size() > small_capacity_; }
  void forget_overflow() { queues_.shorten(Queue::kGhosts, ghost_capacity_, Queue::kNone); }

  void promote_reused() {
    while (small_overflows()) {
      const ExpertId id = first_evictable(queues_[Queue::kSmall]);
      if (id == kNoExpert || reuses_[id] <= 1) return;
      reuses_[id] = 0;
      queues_.move(id, Queue::kMain);
    }
  }

  // The loop ends, since each round takes one from the reuses of every expert that is not pinned.
  ExpertId from_main() {
    const IndexList& main = queues_[Queue::kMain];
    for (int32_t left = main.size() * (kMaxUses + 1); left > 0; --left) {
      const ExpertId id = main.front();
      if (!pinned(id) && reuses_[id] == 0) return id;
      if (!pinned(id)) --reuses_[id];
      queues_.move(id, Queue::kMain);
    }
    return kNoExpert;
  }

  int32_t small_capacity_ = 1;
  int32_t ghost_capacity_ = 1;
  std::vector<bool> used_;  // since admission
  std::vector<uint8_t> reuses_;
  Queues<Queue> queues_;
};

}  // namespace

std::unique_ptr<Policy> make_s3fifo(const PolicyOptions& options) {
  return std::make_unique<S3Fifo>(options);
}

}  // namespace torch_mesh
