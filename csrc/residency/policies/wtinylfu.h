// W-TinyLFU (Einziger, Friedman and Manes, ACM Transactions on Storage 2017): a small window, least
// recently used, before a segmented main part. An expert that leaves the window enters the main
// part only if it was used more often than the one that would have to leave there. There are few
// enough experts to count each one, so no sketch is needed; all counts are halved every ten uses
// per slot.
#pragma once

#include <algorithm>

#include "residency/policies/queue_policy.h"

namespace torch_mesh {

// Its queues are least recently used first.
class WTinyLfu final : public QueuePolicy {
 public:
  explicit WTinyLfu(const PolicyOptions& options)
      : QueuePolicy(options, kCount),
        used_(static_cast<size_t>(options.all()), false),
        uses_(used_.size(), 0) {
    resize(options.slots);
  }

  void admitted(ExpertId id) override {
    move(id, kWindow);
    used_[id] = false;
    const int32_t main = size(kProbation) + size(kProtected);
    if (main < main_capacity_ && size(kWindow) > window_capacity_) leave_window(oldest(kWindow));
  }

  // As in slru, the use that an expert was read for does not promote it.
  void touch(ExpertId id) override {
    ++uses_[id];
    if (++counted_ >= sample_) halve();
    const bool promoted = queue_of(id) == kProbation && used_[id];
    move(id, promoted ? Queue{kProtected} : queue_of(id));
    used_[id] = true;
    demote_overflow();
  }

  ExpertId victim() override {
    const ExpertId newcomer = oldest_evictable(kWindow);
    ExpertId established = oldest_evictable(kProbation);
    if (established == kNoExpert) established = oldest_evictable(kProtected);
    if (newcomer == kNoExpert || established == kNoExpert) return std::max(newcomer, established);
    if (size(kWindow) <= window_capacity_) return established;
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
  enum : Queue { kNone, kWindow, kProbation, kProtected, kCount };

  void demote_overflow() { shorten(kProtected, protected_capacity_, kProbation); }
  void leave_window(ExpertId id) { move(id, kProbation); }

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
};

}  // namespace torch_mesh
