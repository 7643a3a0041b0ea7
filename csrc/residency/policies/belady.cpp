#include "residency/policies/belady.h"

#include <limits>
#include <set>
#include <utility>

namespace torch_mesh {
namespace {

class Belady final : public Policy {
 public:
  explicit Belady(const RoutingTrace& trace)
      : Policy(int64_t{trace.layers} * trace.experts), experts_(trace.experts) {
    const auto all = static_cast<size_t>(trace.layers) * trace.experts;
    first_.assign(all + 1, 0);
    const auto for_each_use = [&](auto&& act) {
      for (int64_t forward = 0; forward < trace.forward_count(); ++forward) {
        for (int32_t layer = 0; layer < trace.layers; ++layer) {
          for (int32_t expert : experts_of(trace, forward, layer)) {
            act(layer * experts_ + expert, forward * trace.layers + layer);
          }
        }
      }
    };
    for_each_use([&](ExpertId id, int64_t) { ++first_[id + 1]; });
    for (size_t id = 0; id < all; ++id) first_[id + 1] += first_[id];
    uses_.resize(first_[all]);
    position_.assign(first_.begin(), first_.end() - 1);
    for_each_use([&](ExpertId id, int64_t step) { uses_[position_[id]++] = step; });
    position_.assign(first_.begin(), first_.end() - 1);
  }

  const char* name() const override { return "belady"; }

  void admitted(ExpertId id) override { evictable_.insert({next_use(id), id}); }

  void removed(ExpertId id) override {
    if (evictable(id)) evictable_.erase({next_use(id), id});
  }

  void touch(ExpertId) override {}

  void has_pin(ExpertId id) override { evictable_.erase({next_use(id), id}); }

  void lost_pin(ExpertId id) override { admitted(id); }

  void tick(int32_t layer, std::span<const int32_t> experts) override {
    for (int32_t expert : experts) {
      const ExpertId id = layer * experts_ + expert;
      const bool listed = evictable(id);
      if (listed) evictable_.erase({next_use(id), id});
      ++position_[id];
      if (listed) evictable_.insert({next_use(id), id});
    }
  }

  ExpertId victim() override {
    return evictable_.empty() ? kNoExpert : evictable_.rbegin()->second;
  }

 private:
  int64_t next_use(ExpertId id) const {
    return position_[id] < first_[id + 1] ? uses_[position_[id]]
                                          : std::numeric_limits<int64_t>::max();
  }

  int32_t experts_;
  std::vector<int64_t> first_;     // of the uses of each expert
  std::vector<int64_t> position_;  // of its next use
  std::vector<int64_t> uses_;      // in steps, one for each layer of each forward
  std::set<std::pair<int64_t, ExpertId>> evictable_;
};

}  // namespace

std::unique_ptr<Policy> make_belady(const RoutingTrace& trace) {
  return std::make_unique<Belady>(trace);
}

}  // namespace torch_mesh
