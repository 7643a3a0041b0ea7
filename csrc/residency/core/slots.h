// Slots and their states.
#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <vector>

#include "base/error.h"
#include "residency/index_list.h"
#include "residency/policies/policy.h"

namespace torch_mesh {

enum class SlotState : uint8_t { kEmpty, kLoading, kReady };

struct Slot {
  SlotState state = SlotState::kEmpty;
  ExpertId expert = kNoExpert;  // while LOADING or READY
  int32_t pins = 0;  // claims that use it, wait for its read, or have yet to see its error
  int32_t uses = 0;  // those of them, while it is LOADING, of which the policy shall learn
  // Of a failed read, until the last of those forwards has seen it; in place, so that failing takes
  // no memory.
  std::optional<Error> error;
};

class SlotTable {
 public:
  SlotTable(int32_t experts, int32_t slots, std::unique_ptr<Policy> policy);

  int32_t size() const { return static_cast<int32_t>(slots_.size()); }
  const Slot& operator[](int32_t slot) const { return slots_[slot]; }
  int32_t find(ExpertId id) const { return slot_of_[id]; }  // -1: neither LOADING nor READY
  // Slots from here on are retired: never reserved, and emptied by the pool as soon as they may be.
  int32_t limit() const { return limit_; }
  bool retired(int32_t slot) const { return slot >= limit_; }
  // Leaves the READY slots beyond a lower limit to the caller.
  void set_limit(int32_t slots);
  bool has_empty() const { return !empty_.empty(); }
  int32_t loading() const { return loading_; }
  int32_t pinned() const { return pinned_; }
  Policy& policy() { return *policy_; }
  const Policy& policy() const { return *policy_; }

  int32_t reserve(ExpertId id);          // EMPTY → LOADING; there must be an empty slot
  void land(int32_t slot);               // LOADING → READY
  void fail(int32_t slot, Error error);  // LOADING → EMPTY
  void evict(int32_t slot);              // READY and unpinned → EMPTY

  void pin(int32_t slot);    // a forward uses the expert, or waits for it
  void unpin(int32_t slot);  // the forward is done with the slot, or has seen its error
  // A pin that is no touch: keeps a slot for a moment, or for who is no forward. Policies that
  // count recency from the last unpin see it as one.
  void hold(int32_t slot);

  // From now on, or no longer: the policy does not give it up while it is resident.
  void keep(ExpertId id, bool kept) { mark(id, kKept, kept); }
  bool kept(ExpertId id) const { return (marks_[id] & kKept) != 0; }
  // Slots for all others: at least half.
  int32_t unkept() const { return limit_ - kept_experts_; }
  // As keep(), for who may change its mind: such experts are not counted among those kept.
  void spare(ExpertId id, bool spared) { mark(id, kSpared, spared); }

  bool reusable(int32_t slot) const {
    return slots_[slot].pins == 0 && slots_[slot].state != SlotState::kLoading;
  }

  // Throws std::logic_error naming the first broken invariant.
  void validate() const;

 private:
  enum Mark : uint8_t { kKept = 1, kSpared = 2 };

  void mark(ExpertId id, Mark mark, bool on);
  void put_back(int32_t slot);  // an EMPTY and unpinned one
  void validate_slot(int32_t slot) const;

  std::vector<Slot> slots_;
  std::vector<int32_t> slot_of_;  // by expert id
  std::vector<uint8_t> marks_;    // likewise; any one is a pin to the policy
  int32_t kept_experts_ = 0;
  IndexLinks links_;
  int32_t limit_;
  IndexList empty_;  // EMPTY, unpinned and not retired
  int32_t loading_ = 0;
  int32_t pinned_ = 0;
  std::unique_ptr<Policy> policy_;
};

// Runs `act` while those of `ids` that are READY cannot be given up: what is wanted and here
// already must not make room for what is not.
template <typename Ids, typename Act>
void while_kept(SlotTable& slots, const Ids& ids, const Act& act) {
  const auto for_each_ready = [&](void (SlotTable::*change)(int32_t)) {
    for (ExpertId id : ids) {
      const int32_t slot = slots.find(id);
      if (slot >= 0 && slots[slot].state == SlotState::kReady) (slots.*change)(slot);
    }
  };
  for_each_ready(&SlotTable::hold);
  act();
  for_each_ready(&SlotTable::unpin);
}

// Throws std::logic_error(what) unless `holds`.
void check_invariant(bool holds, const char* what);

}  // namespace torch_mesh
