// W-TinyLFU (Einziger, Friedman and Manes, ACM Transactions on Storage 2017): a small window, least
// recently used, before a segmented main part. An expert that leaves the window enters the main
// part only if it was used more often than the one that would have to leave there. There are few
// enough experts to count each one, so no sketch is needed; all counts are halved every ten uses
// per slot.
#include <algorithm>

#include "residency/policies/queues.h"

namespace torch_mesh {
namespace {

class WTinyLfu final : public Policy {
 public:
  explicit WTinyLfu(const PolicyOptions& options)
      : Policy(options.all()),
        used_(static_cast<size_t>(options.all()), false),
        uses_(used_.size(), 0),
        queues_(options.all()) {
    resize(options.slots);
  }

  void admitted(ExpertId id) override {
    queues_.move(id, Queue::kWindow);
    used_[id] = false;
    const IndexList& window = queues_[Queue::kWindow];
    const int32_t main = queues_[Queue::kProbation].size() + queues_[Queue::kProtected].size();
    if (main < main_capacity_ && window.size() > window_capacity_) leave_window(window.front());
  }

  void removed(ExpertId id) override { queues_.move(id, Queue::kNone); }

  // As in slru, the use that an expert was read for does not promote it.
  void touch(ExpertId id) override {
    ++uses_[id];
    if (++counted_ >= sample_) halve();
    const bool promoted = queues_.of(id) == Queue::kProbation && used_[id];
    queues_.move(id, promoted ? Queue::kProtected : queues_.of(id));
    used_[id] = true;
    demote_overflow();
  }

  ExpertId victim() override {
    const ExpertId newcomer = first_evictable(queues_[Queue::kWindow]);
    ExpertId established = first_evictable(queues_[Queue::kProbation]);
    if (established == kNoExpert) established = first_evictable(queues_[Queue::kProtected]);
    if (newcomer == kNoExpert || established == kNoExpert) return std::max(newcomer, established);
    if (queues_[Queue::kWindow].size() <= window_capacity_) return established;
    if (uses_[newcomer] <= uses_[established]) return newcomer;
    leave_window(newcomer);
    return established;
  }

  void resize(int32_t slots) override {
    window_capacity_ = std::max<int32_t>(1, slots / 100);
    main_capacity_ = slots - window_capacity_;
    protected_capacity_ = main_capacity_ * 4 / 5;
    sample_ = int64_t{10} * slots;
    demote_overflow();
  }

 private:
  enum class Queue : uint8_t { kNone, kWindow, kProbation, kProtected, kCount };

  void demote_overflow() {
    queues_.shorten(Queue::kProtected, protected_capacity_, Queue::kProbation);
  }
  void leave_window(ExpertId id) { queues_.move(id, Queue::kProbation); }

  void halve() {
    counted_ /= 2;
    for (int32_t& uses : uses_) uses /= 2;
  }

  int32_t window_capacity_ = 1;
  int32_t main_capacity_ = 0;
  int32_t protected_capacity_ = 0;
  int64_t sample_ = 1;
  int64_t counted_ = 0;
  std::vector<bool> used_;  // since admission
  std::vector<int32_t> uses_;
  Queues<Queue> queues_;  // least recently used first
};

}  // namespace

std::unique_ptr<Policy> make_wtinylfu(const PolicyOptions& options) {
  return std::make_unique<WTinyLfu>(options);
}

}  // namespace torch_mesh
