#include "residency/core/slots.h"

#include <algorithm>
#include <stdexcept>
#include <string>

namespace torch_mesh {

void check_invariant(bool holds, const char* what) {
  if (!holds) throw std::logic_error(std::string("pool invariant broken: ") + what);
}

SlotTable::SlotTable(int32_t layers, int32_t experts, int32_t slots, std::unique_ptr<Policy> policy)
    : layers_(layers),
      experts_(experts),
      slots_(static_cast<size_t>(slots)),
      slot_of_(static_cast<size_t>(layers) * experts, -1),
      soft_pins_(slot_of_.size(), 0),
      links_(slots),
      limit_(slots),
      empty_(links_),
      policy_(std::move(policy)),
      statistics_(layers, experts),
      effects_(slots, experts) {
  deferred_.reserve(slot_of_.size());
  for (int32_t slot = 0; slot < slots; ++slot) empty_.push_back(slot);
}

int32_t SlotTable::pinned() const {
  const auto count = std::ranges::count_if(slots_, [](const Slot& slot) { return slot.pins > 0; });
  return static_cast<int32_t>(count);
}

void SlotTable::set_limit(int32_t slots) {
  const int32_t first = std::min(limit_, slots), last = std::max(limit_, slots);
  const bool lower = slots < limit_;
  limit_ = slots;
  for (int32_t index = first; index < last; ++index) {
    if (slots_[index].state != SlotState::kEmpty || slots_[index].pins > 0) continue;
    lower ? empty_.erase(index) : empty_.push_back(index);
  }
}

int32_t SlotTable::reserve(ExpertId id) {
  const int32_t index = empty_.pop_front();
  slots_[index].state = SlotState::kLoading;
  slots_[index].expert = id;
  slot_of_[id] = index;
  ++loading_;
  return index;
}

int32_t SlotTable::read(ExpertId id, Urgency urgency, Phase phase, bool stuck) {
  if (!has_empty()) {
    const ExpertId evicted = victim(stuck);
    if (evicted == kNoExpert) return -1;
    evict(find(evicted), phase);
  }
  const int32_t index = reserve(id);
  Slot& slot = slots_[index];
  slot.urgency = urgency;
  slot.phase = phase;
  slot.speculative = slot.unused = urgency != Urgency::kDemand;
  slot.bytes = 0;
  if (slot.speculative) {
    ++prefetching_;
    statistics_.count(id, phase, &ExpertStats::prefetches);
  }
  effects_.reads.push_back(index);
  return index;
}

ExpertId SlotTable::victim(bool stuck) {
  ExpertId id = policy_->victim();
  if (id == kNoExpert && !deferred_.empty()) id = soft_victim(kDeferred);
  return id == kNoExpert && stuck ? soft_victim(kDeferred | kEarly) : id;
}

ExpertId SlotTable::soft_victim(uint8_t reasons) {
  const auto for_each = [&](void (Policy::*change)(ExpertId)) {
    for (const Slot& slot : slots_) {
      if (slot.state != SlotState::kReady || slot.pins > 0) continue;
      const uint8_t own = soft_pins_[slot.expert];
      if (own != 0 && (own & ~reasons) == 0) ((*policy_).*change)(slot.expert);
    }
  };
  for_each(&Policy::unpin);
  const ExpertId id = policy_->victim();
  for_each(&Policy::pin);
  return id;
}

void SlotTable::raise_priority(int32_t index) {
  Slot& slot = slots_[index];
  if (slot.urgency == Urgency::kDemand) return;
  slot.urgency = Urgency::kDemand;
  --prefetching_;
  effects_.raised.push_back(index);
}

void SlotTable::landed(int32_t index, int64_t bytes) {
  Slot& slot = slots_[index];
  count_read(slot, bytes);
  statistics_.count(slot.expert, slot.phase, &ExpertStats::promoted);
  filled(index);
}

void SlotTable::filled(int32_t index) {
  Slot& slot = slots_[index];
  slot.state = SlotState::kReady;
  --loading_;
  policy_->admit(slot.expert);
  for (; slot.uses > 0; --slot.uses) policy_->touch(slot.expert);
  if (slot.pins > 0 || soft_pins_[slot.expert] != 0) policy_->pin(slot.expert);
  end_read(index);
}

void SlotTable::failed(int32_t index, int64_t bytes, Error error) {
  Slot& slot = slots_[index];
  count_read(slot, bytes);
  if (slot.speculative) {
    ++stats_of(slot).prefetches_failed;
    statistics_.keep_prefetch_error(error);
    if (slot.pins > 0 && error.kind() != ErrorKind::kClosed) {
      slot.speculative = false;
      effects_.reads.push_back(index);
      return;
    }
  }
  ++stats_of(slot).failed;
  if (slot.unused) count_unused(slot);
  slot.uses = 0;
  --loading_;
  if (slot.pins > 0) slot.error.emplace(std::move(error));
  clear(index);
  end_read(index);
}

void SlotTable::evict(int32_t index, Phase phase) {
  Slot& slot = slots_[index];
  const ExpertId id = slot.expert;
  if (slot.unused) count_unused(slot);
  statistics_.count(id, phase, &ExpertStats::evicted);
  if (soft_pins_[id] != 0) policy_->unpin(id);
  policy_->remove(id);
  clear(index);
}

void SlotTable::clear(int32_t index) {
  Slot& slot = slots_[index];
  slot_of_[slot.expert] = -1;
  slot.state = SlotState::kEmpty;
  slot.expert = kNoExpert;
  if (slot.pins == 0 && !retired(index)) empty_.push_back(index);
}

void SlotTable::count_read(Slot& slot, int64_t bytes) {
  slot.bytes += bytes;
  stats_of(slot).bytes_read += bytes;
}

void SlotTable::count_unused(Slot& slot) {
  LayerStats& layer = stats_of(slot);
  ++layer.prefetches_unused;
  layer.unused_prefetch_bytes += slot.bytes;
  slot.unused = false;
}

void SlotTable::end_read(int32_t index) {
  Slot& slot = slots_[index];
  if (slot.urgency != Urgency::kDemand) --prefetching_;
  slot.urgency = Urgency::kDemand;
  effects_.landed |= slot.pins > 0;
  if (reusable(index)) end_use(index);
  effects_.idle |= loading_ == 0;
}

// Its last pin or its read has ended: reports the slot as free, and empties a retired one.
void SlotTable::end_use(int32_t index) {
  effects_.freed = true;
  if (!retired(index)) return;
  if (slots_[index].state == SlotState::kReady) evict(index, Phase::kNone);
  emptied_ = true;
}

bool SlotTable::use_prefetched(int32_t index) {
  Slot& slot = slots_[index];
  if (!std::exchange(slot.unused, false)) return false;
  ++stats_of(slot).prefetches_used;
  return true;
}

void SlotTable::reset_statistics() {
  statistics_.reset();
  for (Slot& slot : slots_) slot.unused = false;
}

void SlotTable::pin(int32_t index) {
  Slot& slot = slots_[index];
  if (slot.pins++ == 0 && in_policy(slot)) policy_->pin(slot.expert);
}

void SlotTable::pin_for_use(int32_t index) {
  Slot& slot = slots_[index];
  if (slot.state == SlotState::kReady) {
    policy_->touch(slot.expert);
  } else {
    ++slot.uses;
  }
  pin(index);
}

void SlotTable::unpin(int32_t index) {
  drop_pin(index);
  if (reusable(index)) end_use(index);
}

void SlotTable::drop_pin(int32_t index) {
  Slot& slot = slots_[index];
  --slot.pins;
  slot.uses = std::min(slot.uses, slot.pins);  // drops those of claims that wait no longer
  if (slot.pins > 0) return;
  if (in_policy(slot)) policy_->unpin(slot.expert);
  if (slot.state == SlotState::kEmpty) {
    slot.error.reset();
    if (!retired(index)) empty_.push_back(index);
  }
}

void SlotTable::soft_pin(ExpertId id, SoftPin reason, bool on) {
  const uint8_t before = soft_pins_[id];
  const auto after = static_cast<uint8_t>(on ? before | reason : before & ~reason);
  soft_pins_[id] = after;
  if (reason == SoftPin::kDeferred) {
    if (on) deferred_.push_back(id);
  } else {
    early_experts_ += ((after & kEarly) != 0) - ((before & kEarly) != 0);
  }
  if ((before != 0) == (after != 0) || !ready(id) || slots_[slot_of_[id]].pins > 0) return;
  after != 0 ? policy_->pin(id) : policy_->unpin(id);
}

void SlotTable::forget_deferred(int32_t layer) {
  std::erase_if(deferred_, [&](ExpertId id) {
    if (id / experts_ != layer) return false;
    soft_pin(id, SoftPin::kDeferred, false);
    return true;
  });
}

void SlotTable::validate() const {
  int32_t loading = 0, present = 0, prefetching = 0, listed = 0, out_of_list = 0;
  for (int32_t index = 0; index < size(); ++index) {
    validate_slot(index);
    const Slot& slot = slots_[index];
    loading += slot.state == SlotState::kLoading;
    present += slot.state == SlotState::kReady;
    prefetching += slot.urgency != Urgency::kDemand;
    const bool vacant = slot.state == SlotState::kEmpty;
    out_of_list += vacant && (slot.error.has_value() || retired(index));
  }
  check_invariant(loading == loading_, "the count of LOADING slots is wrong");
  check_invariant(prefetching == prefetching_, "the count of reads ahead is wrong");
  const auto early = [](uint8_t reasons) { return (reasons & kEarly) != 0; };
  check_invariant(std::ranges::count_if(soft_pins_, early) == early_experts_,
                  "the count of early experts is wrong");
  check_invariant(early_experts_ <= limit_ / 2, "more than half of the slots are soft-pinned");

  for (int32_t index = empty_.front(); index >= 0; index = empty_.next(index), ++listed) {
    check_invariant(listed < size(), "the list of empty slots has no end");
    check_invariant(!retired(index), "a retired slot is in the list of empty ones");
    check_invariant(slots_[index].state == SlotState::kEmpty && slots_[index].pins == 0,
                    "a slot in the list of empty ones is in use");
  }
  check_invariant(listed + out_of_list + loading + present == size(), "a slot is lost");

  for (ExpertId id = 0; id < layers_ * experts_; ++id) {
    const int32_t slot = find(id);
    check_invariant(slot < 0 || (slot < size() && slots_[slot].expert == id),
                    "the expert map names a slot that holds another expert");
    check_invariant(policy_->resident(id) == ready(id),
                    "the policy's residents are not the READY slots");
  }
  validate_counts();
}

void SlotTable::validate_slot(int32_t index) const {
  const Slot& slot = slots_[index];
  check_invariant(slot.pins >= 0, "a slot has fewer than zero pins");
  check_invariant(slot.urgency == Urgency::kDemand || slot.state == SlotState::kLoading,
                  "a slot that is not LOADING has a read ahead");
  if (slot.state == SlotState::kEmpty) {
    check_invariant(slot.expert == kNoExpert, "an EMPTY slot names an expert");
    check_invariant(!slot.unused, "an EMPTY slot holds a prefetch");
    check_invariant((slot.pins > 0) == slot.error.has_value(),
                    "an EMPTY slot is pinned without an error");
    return;
  }
  check_invariant(slot.expert >= 0 && slot.expert < static_cast<ExpertId>(slot_of_.size()),
                  "a slot names no expert of the model");
  check_invariant(slot_of_[slot.expert] == index, "the map does not lead to an expert's slot");
  check_invariant(!slot.error, "a slot in use has an error");
  if (slot.state == SlotState::kReady) {
    check_invariant(!retired(index) || slot.pins > 0, "a retired slot that nothing uses is READY");
    check_invariant(policy_->pinned(slot.expert) == (slot.pins > 0 || soft_pins_[slot.expert] != 0),
                    "slot and policy disagree on what is pinned");
  }
}

void SlotTable::validate_counts() const {
  const PoolStats& counts = statistics_.counts();
  std::vector<int64_t> unused(kPhases * static_cast<size_t>(layers_));
  for (const Slot& slot : slots_) {
    if (!slot.unused) continue;
    ++unused[static_cast<size_t>(slot.phase) * layers_ + slot.expert / experts_];
  }
  for (size_t phase = 0; phase < kPhases; ++phase) {
    for (int32_t layer = 0; layer < layers_; ++layer) {
      const LayerStats& at = counts.layers[phase][layer];
      check_invariant(at.hits + at.cold_misses + at.inflight_misses + at.deferred == at.accesses,
                      "hits, misses and deferrals do not add up to accesses");
      check_invariant(at.prefetches == at.prefetches_used + at.prefetches_unused +
                                           unused[phase * layers_ + layer],
                      "prefetches used, unused and waiting do not add up to those issued");
    }
  }
}

}  // namespace torch_mesh
