#include "residency/core/claims.h"

#include <algorithm>

namespace torch_mesh {

void Claims::add(ClaimState& claim) {
  std::ranges::fill(claim.entries, ClaimEntry{-1, ClaimEntry::kWaiting, false});
  claim.waiting = static_cast<int32_t>(claim.entries.size());
  queue_.reserve(alive_.size() + 1);
  alive_.push_back(&claim);
}

void Claims::remove(ClaimState& claim) {
  for (const ClaimEntry& entry : claim.entries) {
    if (entry.state == ClaimEntry::kJoined || entry.state == ClaimEntry::kHandedOut) {
      slots_.unpin(entry.slot);
    }
  }
  std::erase(alive_, &claim);
}

void Claims::reserve(ClaimState& claim, int32_t max_window) {
  if (claim.waiting == 0 || is_behind_others(claim)) return;
  join_present(claim);
  const size_t count = claim.entries.size();
  for (size_t i = 0; i < count && claim.waiting > 0; ++i) {
    // Forwards list the expert of most rows first. A window leaves resident what it reads last.
    if (!reserve_one(claim, claim.reads_next_layer ? count - 1 - i : i, max_window)) return;
  }
}

// Called before any slot is reserved, so that no victim is an expert which this claim needs.
void Claims::join_present(ClaimState& claim) {
  for (size_t i = 0; i < claim.entries.size(); ++i) {
    if (claim.entries[i].state != ClaimEntry::kWaiting) continue;
    const int32_t slot = slots_.find(id_of(claim, i));
    if (slot < 0) continue;
    const bool ready = slots_[slot].state == SlotState::kReady;
    // Only a forward counts a prefetch as used.
    const bool ahead = claim.part.kind != ClaimKind::kVisit && slots_.use_prefetched(slot);
    join(claim, i, slot, ahead);
    if (!ready) slots_.raise_priority(slot);
    count(claim, i, ready ? &ExpertStats::hits : &ExpertStats::inflight_misses);
  }
}

// False when there is no slot.
bool Claims::reserve_one(ClaimState& claim, size_t index, int32_t max_window) {
  if (claim.entries[index].state != ClaimEntry::kWaiting) return true;
  const ExpertId id = id_of(claim, index);
  if (const int32_t present = slots_.find(id); present >= 0) {  // a duplicate in the list
    join(claim, index, present, false);
    count(claim, index, &ExpertStats::inflight_misses);
    return true;
  }
  if (!slots_.has_empty() && claim.window_slots >= max_window) return false;
  const bool stuck = claim.joined + claim.held == 0;
  const int32_t slot = slots_.read(id, Urgency::kDemand, claim.part.phase, stuck);
  if (slot < 0) return false;
  join(claim, index, slot, true);
  count(claim, index, &ExpertStats::cold_misses);
  return true;
}

void Claims::join(ClaimState& claim, size_t index, int32_t slot, bool in_window) {
  claim.part.kind == ClaimKind::kVisit ? slots_.pin(slot) : slots_.pin_for_use(slot);
  claim.entries[index] = {slot, ClaimEntry::kJoined, in_window};
  claim.window_slots += in_window;
  --claim.waiting;
  ++claim.joined;
}

void Claims::count(const ClaimState& claim, size_t index, CommonCount how) {
  if (claim.part.kind != ClaimKind::kForward) return;
  const ExpertId id = id_of(claim, index);
  slots_.statistics().count_access(id, claim.part.phase, how, slots_.early(id));
}

int32_t Claims::hand_out(ClaimState& claim, std::span<HandedOut> ready,
                         std::optional<Error>& error) {
  int32_t count = 0;
  for (size_t i = 0; i < claim.entries.size() && claim.joined > 0; ++i) {
    ClaimEntry& entry = claim.entries[i];
    if (entry.state != ClaimEntry::kJoined) continue;
    const Slot& slot = slots_[entry.slot];
    if (slot.state == SlotState::kLoading) continue;
    if (slot.error) {
      if (count > 0) break;  // what is in `ready` must reach the caller first
      error.emplace(*slot.error);
      entry.state = ClaimEntry::kDone;
      --claim.joined;
      leave_window(claim, entry);
      slots_.unpin(entry.slot);
      return 0;
    }
    if (count == static_cast<int32_t>(ready.size())) break;
    entry.state = ClaimEntry::kHandedOut;
    --claim.joined;
    ++claim.held;
    ready[count++] = {static_cast<int32_t>(i), entry.slot};
  }
  return count;
}

size_t Claims::release(ClaimState& claim, std::span<const int32_t> indices) {
  for (size_t at = 0; at < indices.size(); ++at) {
    const int32_t index = indices[at];
    if (index < 0 || index >= std::ssize(claim.entries)) return at;
    ClaimEntry& entry = claim.entries[index];
    if (entry.state != ClaimEntry::kHandedOut) return at;
    entry.state = ClaimEntry::kDone;
    --claim.held;
    leave_window(claim, entry);
    slots_.unpin(entry.slot);
  }
  return indices.size();
}

int32_t Claims::late_slot(const ClaimState& claim) const {
  int32_t late = -1;
  for (const ClaimEntry& entry : claim.entries) {
    if (entry.state != ClaimEntry::kJoined) continue;
    if (slots_[entry.slot].state != SlotState::kLoading) return -1;
    if (late < 0) late = entry.slot;
  }
  return late;
}

bool Claims::waits_for_prefetches(const ClaimState& claim) const {
  return std::ranges::all_of(claim.entries, [&](const ClaimEntry& entry) {
    return entry.state != ClaimEntry::kJoined || slots_[entry.slot].speculative;
  });
}

void Claims::leave_queue(ClaimState& claim) {
  std::erase(queue_, &claim);
  slots_.effects().freed = true;  // the next in line must look
}

bool Claims::is_behind_others(const ClaimState& claim) const {
  const auto first = std::ranges::find(queue_, false, &ClaimState::passed_over);
  return first != queue_.end() && *first != &claim;
}

void Claims::validate() const {
  std::vector<int32_t> pins(static_cast<size_t>(slots_.size()), 0);
  for (const ClaimState* claim : alive_) {
    int32_t waiting = 0, joined = 0, held = 0, window_slots = 0;
    for (const ClaimEntry& entry : claim->entries) {
      waiting += entry.state == ClaimEntry::kWaiting;
      joined += entry.state == ClaimEntry::kJoined;
      held += entry.state == ClaimEntry::kHandedOut;
      window_slots += entry.in_window;
      if (entry.state != ClaimEntry::kJoined && entry.state != ClaimEntry::kHandedOut) continue;
      ++pins[entry.slot];
      check_invariant(
          entry.state != ClaimEntry::kHandedOut || slots_[entry.slot].state == SlotState::kReady,
          "a claim holds a slot that is not READY");
    }
    check_invariant(waiting == claim->waiting && joined == claim->joined && held == claim->held &&
                        window_slots == claim->window_slots,
                    "a claim's counts are not those of its entries");
  }
  for (int32_t slot = 0; slot < slots_.size(); ++slot) {
    check_invariant(pins[slot] == slots_[slot].pins, "a slot's pins are not those of the claims");
  }
}

}  // namespace torch_mesh
