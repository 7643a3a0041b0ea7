// Least recently used. A use lasts from touch() to the last unpin(), which is when recency counts
// from.
#include "residency/index_list.h"
#include "residency/policies/policies.h"

namespace torch_mesh {
namespace {

class Lru final : public Policy {
 public:
  explicit Lru(const PolicyOptions& options)
      : place_(static_cast<size_t>(options.layers) * options.experts, Place::kAbsent),
        links_(static_cast<int64_t>(place_.size())),
        evictable_(links_) {}

  const char* name() const override { return "lru"; }

  void admit(ExpertId id) override {
    place_[id] = Place::kEvictable;
    evictable_.push_back(id);
  }

  void remove(ExpertId id) override {
    if (place_[id] == Place::kEvictable) evictable_.erase(id);
    place_[id] = Place::kAbsent;
  }

  void touch(ExpertId id) override {
    if (place_[id] != Place::kEvictable) return;
    evictable_.erase(id);
    evictable_.push_back(id);
  }

  void pin(ExpertId id) override {
    place_[id] = Place::kPinned;
    evictable_.erase(id);
  }

  void unpin(ExpertId id) override { admit(id); }

  ExpertId victim() override { return evictable_.front(); }

  bool resident(ExpertId id) const override { return place_[id] != Place::kAbsent; }
  bool pinned(ExpertId id) const override { return place_[id] == Place::kPinned; }

 private:
  enum class Place : uint8_t { kAbsent, kEvictable, kPinned };

  std::vector<Place> place_;
  IndexLinks links_;
  IndexList evictable_;  // least recently used first
};

}  // namespace

std::unique_ptr<Policy> make_lru(const PolicyOptions& options) {
  return std::make_unique<Lru>(options);
}

}  // namespace torch_mesh
