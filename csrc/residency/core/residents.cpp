#include "residency/core/residents.h"

#include <utility>

namespace torch_mesh {

Residents::Residents(int32_t layers, int32_t experts, int32_t slots, std::unique_ptr<Policy> policy,
                     Statistics& statistics, Effects& effects)
    : experts_(experts),
      slots_(layers * experts, slots, std::move(policy)),
      loads_(static_cast<size_t>(slots)),
      statistics_(statistics),
      effects_(effects) {
  last_.reserve(static_cast<size_t>(layers) * experts);
}

int32_t Residents::reserve(ExpertId id, Phase phase) {
  if (!slots_.has_empty()) {
    const ExpertId given_up = victim();
    if (given_up == kNoExpert) return -1;
    evict(slots_.find(given_up), phase);
  }
  return slots_.reserve(id);
}

ExpertId Residents::victim() {
  const ExpertId first = slots_.policy().victim();
  if (first != kNoExpert || last_.empty()) return first;
  for (ExpertId id : last_) slots_.spare(id, false);
  const ExpertId any = slots_.policy().victim();
  for (ExpertId id : last_) slots_.spare(id, true);
  return any;
}

void Residents::evict(int32_t slot, Phase phase) {
  const ExpertId id = slots_[slot].expert;
  if (loads_[slot].unused) count_wasted(slot);
  ++statistics_.of_layer_of(id, phase).evicted;
  ++statistics_.of(id).evicted;
  slots_.evict(slot);
}

void Residents::give_up_last(ExpertId id) {
  last_.push_back(id);
  slots_.spare(id, true);
}

void Residents::forget_last(int32_t layer) {
  std::erase_if(last_, [&](ExpertId id) {
    if (id / experts_ != layer) return false;
    slots_.spare(id, false);
    return true;
  });
}

void Residents::read(int32_t slot, Urgency urgency, Phase phase) {
  const bool ahead = urgency != Urgency::kDemand;
  loads_[slot] = {
      .urgency = urgency, .phase = phase, .speculative = ahead, .unused = ahead, .bytes = 0};
  if (ahead) {
    ++prefetching_;
    ++stats_of(slot).prefetches;
    ++statistics_.of(slots_[slot].expert).prefetches;
  }
  effects_.loads.push_back({slot, slots_[slot].expert, urgency});
}

void Residents::hasten(int32_t slot) {
  Load& load = loads_[slot];
  if (load.urgency == Urgency::kDemand) return;
  load.urgency = Urgency::kDemand;
  --prefetching_;
  effects_.hastened.push_back(slot);
}

void Residents::landed(int32_t slot, int64_t bytes) {
  count_read(slot, bytes);
  ++stats_of(slot).promoted;
  ++statistics_.of(slots_[slot].expert).promoted;
  slots_.land(slot);
  end_read(slot);
}

void Residents::filled(int32_t slot) {
  slots_.land(slot);
  end_read(slot);
}

void Residents::failed(int32_t slot, int64_t bytes, Error error) {
  Load& load = loads_[slot];
  count_read(slot, bytes);
  if (load.speculative) {
    ++stats_of(slot).prefetches_failed;
    statistics_.keep_prefetch_error(error);
    if (slots_[slot].pins > 0 && error.kind() != ErrorKind::kClosed) {
      load.speculative = false;
      effects_.loads.push_back({slot, slots_[slot].expert, load.urgency});
      return;
    }
  }
  ++stats_of(slot).failed;
  if (load.unused) count_wasted(slot);
  slots_.fail(slot, std::move(error));
  end_read(slot);
}

void Residents::count_read(int32_t slot, int64_t bytes) {
  loads_[slot].bytes += bytes;
  stats_of(slot).bytes_read += bytes;
}

void Residents::end_read(int32_t slot) {
  Load& load = loads_[slot];
  if (load.urgency != Urgency::kDemand) --prefetching_;
  load.urgency = Urgency::kDemand;
  effects_.landed |= slots_[slot].pins > 0;
  if (slots_.reusable(slot)) reusable(slot);
  effects_.idle |= slots_.loading() == 0;
}

bool Residents::use_prefetched(int32_t slot) {
  if (!std::exchange(loads_[slot].unused, false)) return false;
  ++stats_of(slot).prefetches_used;
  return true;
}

void Residents::count_wasted(int32_t slot) {
  LayerStats& layer = stats_of(slot);
  ++layer.prefetches_wasted;
  layer.wasted_bytes += loads_[slot].bytes;
  loads_[slot].unused = false;
}

void Residents::forget_unused() {
  for (Load& load : loads_) load.unused = false;
}

void Residents::unpin(int32_t slot) {
  slots_.unpin(slot);
  if (slots_.reusable(slot)) reusable(slot);
}

void Residents::reusable(int32_t slot) {
  effects_.freed = true;
  if (!slots_.retired(slot)) return;
  if (slots_[slot].state == SlotState::kReady) evict(slot, Phase::kNone);
  emptied_ = true;
}

void Residents::validate() const {
  slots_.validate();
  int32_t ahead = 0;
  for (int32_t slot = 0; slot < slots_.size(); ++slot) {
    ahead += loads_[slot].urgency != Urgency::kDemand;
    check_invariant(
        loads_[slot].urgency == Urgency::kDemand || slots_[slot].state == SlotState::kLoading,
        "a slot that is not LOADING has a read ahead");
  }
  check_invariant(ahead == prefetching_, "the count of reads ahead is wrong");

  const PoolStats& counts = statistics_.counts();
  const auto layers = static_cast<int32_t>(counts.layers[0].size());
  std::vector<int64_t> unused(kPhases * static_cast<size_t>(layers));
  for (int32_t slot = 0; slot < slots_.size(); ++slot) {
    if (!loads_[slot].unused) continue;
    check_invariant(slots_[slot].state != SlotState::kEmpty, "an EMPTY slot holds a prefetch");
    ++unused[static_cast<size_t>(loads_[slot].phase) * layers + slots_[slot].expert / experts_];
  }
  for (size_t phase = 0; phase < kPhases; ++phase) {
    for (int32_t layer = 0; layer < layers; ++layer) {
      const LayerStats& at = counts.layers[phase][layer];
      check_invariant(at.hits + at.cold_misses + at.inflight_misses + at.deferred == at.accesses,
                      "hits, misses and deferrals do not add up to accesses");
      check_invariant(at.prefetches == at.prefetches_used + at.prefetches_wasted +
                                           unused[phase * layers + layer],
                      "prefetches used, wasted and waiting do not add up to those issued");
    }
  }
}

}  // namespace torch_mesh
