// The slots, their experts and the reads into them: which expert gets a slot, which one is evicted
// for it, and whether reads ahead were used. With them are the counts and effects to which all
// parts of the core add.
//
// Two things keep an expert in its slot. A pin counts a claim that uses the slot or waits for its
// read: a pinned slot is never a victim. A soft pin is a mark on the expert, with a reason, that
// makes it a victim of last resort: a deferred one when nothing else is evictable, an early one for
// a claim that has nothing else to do.
#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <utility>
#include <vector>

#include "base/error.h"
#include "io/index_list.h"
#include "io/urgency.h"
#include "residency/core/effects.h"
#include "residency/core/statistics.h"
#include "residency/policies/policy.h"

namespace torch_mesh {

enum class SlotState : uint8_t { kEmpty, kLoading, kReady };

struct Slot {
  SlotState state = SlotState::kEmpty;
  ExpertId expert = kNoExpert;  // while LOADING or READY
  int32_t pins = 0;  // claims that use it, wait for its read, or have yet to see its error
  int32_t uses = 0;  // while LOADING: pins that the policy will learn of as uses
  // The read under way into it, or that filled it.
  Urgency urgency = Urgency::kDemand;  // kDemand once it has ended
  Phase phase = Phase::kNone;          // the phase that queued it
  bool speculative = false;            // begun as a prefetch, and not repeated as a demand read
  bool unused = false;                 // a prefetch that no forward has used yet, also while READY
  int64_t bytes = 0;                   // read into the slot by this read
  // The error of a failed read, until all claims that pin the slot have seen it. Stored here, so
  // that a failure needs no memory.
  std::optional<Error> error;
};

// Why an expert is soft-pinned.
enum SoftPin : uint8_t { kEarly = 1, kDeferred = 2 };

class SlotTable {
 public:
  SlotTable(int32_t layers, int32_t experts, int32_t slots, std::unique_ptr<Policy> policy);

  int32_t layers() const { return layers_; }
  int32_t experts() const { return experts_; }  // per layer
  ExpertId id_of(int32_t layer, int32_t expert) const { return layer * experts_ + expert; }
  int32_t size() const { return static_cast<int32_t>(slots_.size()); }
  const Slot& operator[](int32_t slot) const { return slots_[slot]; }
  int32_t find(ExpertId id) const { return slot_of_[id]; }  // -1: neither LOADING nor READY
  SlotState state(ExpertId id) const {
    return slot_of_[id] < 0 ? SlotState::kEmpty : slots_[slot_of_[id]].state;
  }
  bool ready(ExpertId id) const { return state(id) == SlotState::kReady; }
  // Slots from here on are retired: never reserved, and emptied as soon as nothing uses them.
  int32_t limit() const { return limit_; }
  bool retired(int32_t slot) const { return slot >= limit_; }
  // Whether every expert has a slot. Then nothing is evicted, and the policy need not learn.
  bool covers_all() const { return limit_ == layers_ * experts_; }
  void set_limit(int32_t slots);  // leaves the READY slots beyond a lower limit to the caller
  bool has_empty() const { return !empty_.empty(); }
  bool reusable(int32_t slot) const {
    return slots_[slot].pins == 0 && slots_[slot].state != SlotState::kLoading;
  }
  int32_t loading() const { return loading_; }
  int32_t pinned() const;  // slots with a pin
  // Reads ahead that no forward waits for yet, those of a window included.
  int32_t prefetching() const { return prefetching_; }
  Policy& policy() { return *policy_; }
  Statistics& statistics() { return statistics_; }
  const Statistics& statistics() const { return statistics_; }
  Effects& effects() { return effects_; }

  // Begins the read of an expert that has no slot, into an empty slot or that of a victim. Returns
  // the slot; -1: there is none. Every read begins here. `stuck`: for a claim that has nothing to
  // use or to wait for.
  int32_t read(ExpertId id, Urgency urgency, Phase phase, bool stuck = false);
  // Calls read() for those of `ids` without a slot, in order, while `has_room()`. Those that are
  // READY are not evicted for the others.
  template <typename Ids, typename HasRoom>
  void read_missing(const Ids& ids, Urgency urgency, Phase phase, const HasRoom& has_room) {
    while_pinned(ids, [&] {
      for (ExpertId id : ids) {
        if (!has_room()) return;
        if (find(id) < 0 && read(id, urgency, phase) < 0) return;
      }
    });
  }
  // Runs `act` while those of `ids` that are READY are pinned.
  template <typename Ids, typename Act>
  void while_pinned(const Ids& ids, const Act& act) {
    for (ExpertId id : ids) {
      if (ready(id)) pin(find(id));
    }
    act();
    for (ExpertId id : ids) {
      if (ready(id)) drop_pin(find(id));
    }
  }
  ExpertId victim(bool stuck = false);  // of the next read; kNoExpert: none
  void raise_priority(int32_t slot);    // makes its read a demand read
  void landed(int32_t slot, int64_t bytes);
  // Repeats a failed prefetch that a forward waits for, as a demand read: no forward fails for a
  // prefetch.
  void failed(int32_t slot, int64_t bytes, Error error);
  void count_second_read(int32_t slot) { ++stats_of(slots_[slot]).second_reads; }
  // For cores that read nothing: reserve() takes an empty slot for a record; filled() says that the
  // record is there.
  int32_t reserve(ExpertId id);
  void filled(int32_t slot);
  void evict(int32_t slot, Phase phase);  // READY and unpinned → EMPTY, counted

  // Marks a prefetch as used. Returns whether it was unused.
  bool use_prefetched(int32_t slot);
  void reset_statistics();  // unused prefetches will count neither as used nor as unused
  // Whether a retired slot has become empty since the last call.
  bool take_emptied() { return std::exchange(emptied_, false); }

  void pin_for_use(int32_t slot);  // a forward uses the expert, or waits for it
  void unpin(int32_t slot);        // the forward no longer uses the slot, or has seen its error
  // Pins without counting a use: briefly, or for a visit. Policies that count recency from the last
  // unpin see a use.
  void pin(int32_t slot);

  void soft_pin(ExpertId id, SoftPin reason, bool on);
  // Whether SoftPin::kEarly is set; at most half of the slots have it.
  bool early(ExpertId id) const { return (soft_pins_[id] & kEarly) != 0; }
  int32_t slots_without_early() const { return limit_ - early_experts_; }
  void forget_deferred(int32_t layer);  // clears SoftPin::kDeferred of its experts

  // Throws std::logic_error naming the first broken invariant.
  void validate() const;

 private:
  LayerStats& stats_of(const Slot& slot) {
    return statistics_.of_layer_of(slot.expert, slot.phase);
  }
  bool in_policy(const Slot& slot) const {  // as a possible victim
    return slot.state == SlotState::kReady && soft_pins_[slot.expert] == 0;
  }
  void clear(int32_t slot);  // → EMPTY
  ExpertId soft_victim(uint8_t reasons);
  void drop_pin(int32_t slot);
  void count_read(Slot& slot, int64_t bytes);
  void count_unused(Slot& slot);
  void end_read(int32_t slot);
  void end_use(int32_t slot);
  void validate_slot(int32_t slot) const;
  void validate_counts() const;

  const int32_t layers_, experts_;
  std::vector<Slot> slots_;
  std::vector<int32_t> slot_of_;    // by expert id
  std::vector<uint8_t> soft_pins_;  // likewise: bits of SoftPin; if any is set the policy pins it
  std::vector<ExpertId> deferred_;  // those with SoftPin::kDeferred
  int32_t early_experts_ = 0;
  IndexLinks links_;
  int32_t limit_;
  IndexList empty_;  // EMPTY, unpinned and not retired
  int32_t loading_ = 0;
  int32_t prefetching_ = 0;
  bool emptied_ = false;
  std::unique_ptr<Policy> policy_;
  Statistics statistics_;
  Effects effects_;
};

// Throws std::logic_error(what) unless `holds`.
void check_invariant(bool holds, const char* what);

}  // namespace torch_mesh
