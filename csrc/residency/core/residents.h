// The experts in slots, and the reads into them: who gets a slot, who gives one up, and what became
// of what was read ahead.
#pragma once

#include <cstdint>
#include <memory>
#include <utility>
#include <vector>

#include "base/error.h"
#include "residency/core/effects.h"
#include "residency/core/slots.h"
#include "residency/core/statistics.h"

namespace torch_mesh {

class Residents {
 public:
  Residents(int32_t layers, int32_t experts, int32_t slots, std::unique_ptr<Policy> policy,
            Statistics& statistics, Effects& effects);

  SlotTable& slots() { return slots_; }
  const SlotTable& slots() const { return slots_; }

  // An empty slot, LOADING from now on, giving one up if it must; -1: all are pinned or loading.
  int32_t reserve(ExpertId id, Phase phase);
  // What reserve() would give up; kNoExpert: nothing.
  ExpertId victim();
  void evict(int32_t slot, Phase phase);  // READY and unpinned → EMPTY, counted
  // To a policy what has just run is least wanted, but these are to be used again soon: they are
  // given up when there is nothing else, and not pinned, so that nobody waits for them.
  void give_up_last(ExpertId id);
  void forget_last(int32_t layer);  // no longer so for those of this layer

  // The read into a slot that reserve() gave.
  void read(int32_t slot, Urgency urgency, Phase phase);
  void hasten(int32_t slot);  // it has become a demand read
  void landed(int32_t slot, int64_t bytes);
  void filled(int32_t slot);  // likewise, where nothing was read
  // A read that was begun as a guess and that a forward has joined is begun anew instead: a forward
  // must not fail for a read that nobody had asked for.
  void failed(int32_t slot, int64_t bytes, Error error);
  // Whether it was read ahead and nobody has come for it; from now on somebody has.
  bool use_prefetched(int32_t slot);
  bool unused(int32_t slot) const { return loads_[slot].unused; }
  Phase phase_of_load(int32_t slot) const { return loads_[slot].phase; }
  // Reads ahead that nobody waits for yet, those of a window included.
  int32_t prefetching() const { return prefetching_; }
  void forget_unused();

  void unpin(int32_t slot);
  // Whether a slot that may not be used any more (see SlotTable::limit()) has become empty since
  // the last call.
  bool take_emptied() { return std::exchange(emptied_, false); }

  void validate() const;

 private:
  // The read under way into a slot, or that filled it.
  struct Load {
    Urgency urgency = Urgency::kDemand;
    Phase phase = Phase::kNone;  // that queued it
    bool speculative = false;    // begun as a prefetch, and not anew since
    bool unused = false;         // a prefetch that no forward has come for; stays while READY
    int64_t bytes = 0;           // read into the slot by this load
  };

  LayerStats& stats_of(int32_t slot) {
    return statistics_.of_layer_of(slots_[slot].expert, loads_[slot].phase);
  }
  void count_wasted(int32_t slot);
  void count_read(int32_t slot, int64_t bytes);
  void end_read(int32_t slot);
  void reusable(int32_t slot);

  const int32_t experts_;  // per layer
  SlotTable slots_;
  std::vector<Load> loads_;     // by slot
  std::vector<ExpertId> last_;  // see give_up_last()
  int32_t prefetching_ = 0;
  bool emptied_ = false;
  Statistics& statistics_;
  Effects& effects_;
};

}  // namespace torch_mesh
