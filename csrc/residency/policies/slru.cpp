// Segmented LRU (Karedla, Love and Wherry, 1994). An expert enters on probation; its second use
// moves it to the protected segment, whose overflow goes back to probation. Victims come from
// probation first.
#include <algorithm>

#include "residency/policies/policy.h"

namespace torch_mesh {
namespace {

class Slru final : public Policy {
 public:
  explicit Slru(const PolicyOptions& options)
      : Policy(options.all()),
        segment_(static_cast<size_t>(options.all()), Segment::kUnused),
        links_(options.all()),
        probation_(links_),
        protected_(links_) {
    resize(options.slots);
  }

  void admitted(ExpertId id) override { segment_[id] = Segment::kUnused; }
  void gained(ExpertId id) override {
    list(id).push_back(id);
    demote_overflow();
  }
  void lost(ExpertId id) override { list(id).erase(id); }
  void removed(ExpertId id) override {
    if (segment_[id] == Segment::kProtected) --protected_count_;
  }

  // The use that an expert was read for is its first: a prefetched expert has had none yet.
  void touch(ExpertId id) override {
    const bool listed = evictable(id);
    if (listed) list(id).erase(id);
    if (segment_[id] == Segment::kProbation) ++protected_count_;
    segment_[id] = segment_[id] == Segment::kUnused ? Segment::kProbation : Segment::kProtected;
    if (listed) list(id).push_back(id);
    demote_overflow();
  }

  ExpertId victim() override {
    return probation_.empty() ? protected_.front() : probation_.front();
  }

  void resize(int32_t slots) override {
    capacity_ = std::max<int32_t>(1, slots / 2);
    demote_overflow();
  }

 private:
  enum class Segment : uint8_t { kUnused, kProbation, kProtected };

  IndexList& list(ExpertId id) {
    return segment_[id] == Segment::kProtected ? protected_ : probation_;
  }

  // Pinned experts count towards the protected segment but stay until they are unpinned.
  void demote_overflow() {
    while (protected_count_ > capacity_ && !protected_.empty()) {
      const ExpertId id = protected_.pop_front();
      segment_[id] = Segment::kProbation;
      probation_.push_back(id);
      --protected_count_;
    }
  }

  int32_t capacity_ = 1;  // of the protected segment
  int32_t protected_count_ = 0;
  std::vector<Segment> segment_;
  IndexLinks links_;
  IndexList probation_;  // least recently used first, as is protected_
  IndexList protected_;
};

}  // namespace

std::unique_ptr<Policy> make_slru(const PolicyOptions& options) {
  return std::make_unique<Slru>(options);
}

}  // namespace torch_mesh
