// W-TinyLFU (Einziger, Friedman and Manes, ACM Transactions on Storage 2017): a small window, least
// recently used, before a segmented main part. What leaves the window enters the main part only if
// it was used more often than what would have to leave there. There are few enough experts to count
// each one, so no sketch is needed; all counts are halved every ten uses per slot.
#include <algorithm>

#include "residency/policies/policy.h"

namespace torch_mesh {
namespace {

class WTinyLfu final : public Policy {
 public:
  explicit WTinyLfu(const PolicyOptions& options)
      : Policy(options.all()),
        queue_of_(static_cast<size_t>(options.all()), Queue::kWindow),
        used_(queue_of_.size(), false),
        uses_(queue_of_.size(), 0),
        links_(options.all()),
        window_(links_),
        probation_(links_),
        protected_(links_) {
    resize(options.slots);
  }

  void admitted(ExpertId id) override {
    queue_of_[id] = Queue::kWindow;
    used_[id] = false;
    window_.push_back(id);
    const bool room = probation_.size() + protected_.size() < main_capacity_;
    if (room && window_.size() > window_capacity_) leave_window(window_.front());
  }

  void removed(ExpertId id) override { list(id).erase(id); }

  // As in slru, the use that an expert was read for does not promote it.
  void touch(ExpertId id) override {
    ++uses_[id];
    if (++counted_ >= sample_) halve();
    list(id).erase(id);
    if (queue_of_[id] == Queue::kProbation && used_[id]) queue_of_[id] = Queue::kProtected;
    used_[id] = true;
    list(id).push_back(id);
    demote_overflow();
  }

  ExpertId victim() override {
    const ExpertId newcomer = first_evictable(window_);
    ExpertId established = first_evictable(probation_);
    if (established == kNoExpert) established = first_evictable(protected_);
    if (newcomer == kNoExpert || established == kNoExpert) return std::max(newcomer, established);
    if (window_.size() <= window_capacity_) return established;
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
  enum class Queue : uint8_t { kWindow, kProbation, kProtected };

  IndexList& list(ExpertId id) {
    if (queue_of_[id] == Queue::kWindow) return window_;
    return queue_of_[id] == Queue::kProbation ? probation_ : protected_;
  }

  void demote_overflow() {
    while (protected_.size() > protected_capacity_) {
      const ExpertId demoted = protected_.pop_front();
      queue_of_[demoted] = Queue::kProbation;
      probation_.push_back(demoted);
    }
  }

  void leave_window(ExpertId id) {
    window_.erase(id);
    queue_of_[id] = Queue::kProbation;
    probation_.push_back(id);
  }

  void halve() {
    counted_ /= 2;
    for (int32_t& uses : uses_) uses /= 2;
  }

  int32_t window_capacity_ = 1;
  int32_t main_capacity_ = 0;
  int32_t protected_capacity_ = 0;
  int64_t sample_ = 1;
  int64_t counted_ = 0;
  std::vector<Queue> queue_of_;
  std::vector<bool> used_;  // since admission
  std::vector<int32_t> uses_;
  IndexLinks links_;
  IndexList window_;  // least recently used first, as are the others
  IndexList probation_;
  IndexList protected_;
};

}  // namespace

std::unique_ptr<Policy> make_wtinylfu(const PolicyOptions& options) {
  return std::make_unique<WTinyLfu>(options);
}

}  // namespace torch_mesh
