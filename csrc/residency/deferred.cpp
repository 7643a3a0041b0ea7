// Experts that a forward uses one layer later. Their reads are queued behind its own; nothing waits
// for them until the late claim comes, so they are not pinned: a forward that waits for slots holds
// no pin. They are given up last instead, since to a policy what has just run is least wanted.
//
// Or experts that another pool has computed in another format: nothing comes for them.
#include <utility>
#include <vector>

#include "residency/pool_impl.h"

namespace torch_mesh {

void Pool::Impl::defer(const Claim& claim, std::span<const int32_t> indices) {
  LayerStats& layer = stats_of(claim.layer_, claim.part_.phase);
  for (int32_t index : indices) {
    const ExpertId id = id_of(claim.layer_, index);
    ++layer.accesses, ++layer.deferred;
    layer.kept_accesses += slots.kept(id);
    ++stats.experts[id].accesses, ++stats.experts[id].deferred;
    awaited.push_back(id);
  }
  // Where reads wait for slots, those that somebody waits for come first.
  const bool placed = claim.waiting_ == 0 && first_ticket == nullptr;
  for (int32_t index : indices) {
    const ExpertId id = id_of(claim.layer_, index);
    if (const int32_t present = slots.find(id); present >= 0) {
      if (slots[present].state == SlotState::kLoading) hasten(present);
      if (std::exchange(loads[present].unused, false)) ++stats_of(present).prefetches_used;
    } else if (placed) {
      const int32_t slot = reserve(id, claim.part_.phase);
      if (slot >= 0) start_load(slot, Urgency::kDemand, claim.part_.phase);
    }
  }
}

// The policy has learned of their use, and says which of them to read before the next one.
void Pool::Impl::stand_in(const Claim& claim, std::span<const int32_t> indices) {
  LayerStats& layer = stats_of(claim.layer_, claim.part_.phase);
  for (int32_t index : indices) layer.kept_accesses += slots.kept(id_of(claim.layer_, index));
  if (claim.waiting_ > 0 || first_ticket != nullptr) return;
  for (int32_t index : indices) {
    if (prefetching >= slots.unkept() / 2) return;
    const ExpertId id = id_of(claim.layer_, index);
    if (slots.find(id) >= 0) continue;
    if (!slots.has_empty()) {
      const ExpertId victim = choose_victim();
      if (victim == kNoExpert) continue;
      if (!slots.kept(id) && !slots.policy().prefers(id, victim)) continue;
    }
    if (const int32_t slot = reserve(id, claim.part_.phase); slot >= 0) {
      start_load(slot, Urgency::kPrefetch, claim.part_.phase);
    }
  }
}

void Pool::Impl::forget_awaited(int32_t layer) {
  std::erase_if(awaited, [&](ExpertId id) { return id / experts == layer; });
}

ExpertId Pool::Impl::choose_victim() {
  ExpertId victim = kNoExpert;
  while_kept(slots, awaited, [&] { victim = slots.policy().victim(); });
  return victim == kNoExpert && !awaited.empty() ? slots.policy().victim() : victim;
}

}  // namespace torch_mesh
