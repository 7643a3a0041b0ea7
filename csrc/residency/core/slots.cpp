#include "residency/core/slots.h"

#include <algorithm>
#include <stdexcept>
#include <utility>

namespace torch_mesh {

void check_invariant(bool holds, const char* what) {
  if (!holds) throw std::logic_error(std::string("pool invariant broken: ") + what);
}

SlotTable::SlotTable(int32_t experts, int32_t slots, std::unique_ptr<Policy> policy)
    : slots_(static_cast<size_t>(slots)),
      slot_of_(static_cast<size_t>(experts), -1),
      marks_(static_cast<size_t>(experts), 0),
      links_(slots),
      limit_(slots),
      empty_(links_),
      policy_(std::move(policy)) {
  for (int32_t slot = 0; slot < slots; ++slot) empty_.push_back(slot);
}

void SlotTable::set_limit(int32_t slots) {
  const int32_t first = std::min(limit_, slots), last = std::max(limit_, slots);
  const bool lower = slots < limit_;
  limit_ = slots;
  for (int32_t index = first; index < last; ++index) {
    if (slots_[index].state != SlotState::kEmpty || slots_[index].pins > 0) continue;
    if (lower) {
      empty_.erase(index);
    } else {
      empty_.push_back(index);
    }
  }
}

void SlotTable::put_back(int32_t index) {
  if (!retired(index)) empty_.push_back(index);
}

int32_t SlotTable::reserve(ExpertId id) {
  const int32_t index = empty_.pop_front();
  Slot& slot = slots_[index];
  slot.state = SlotState::kLoading;
  slot.expert = id;
  slot_of_[id] = index;
  ++loading_;
  return index;
}

void SlotTable::land(int32_t index) {
  Slot& slot = slots_[index];
  slot.state = SlotState::kReady;
  --loading_;
  policy_->admit(slot.expert);
  for (; slot.uses > 0; --slot.uses) policy_->touch(slot.expert);
  if (slot.pins > 0 || marks_[slot.expert] != 0) policy_->pin(slot.expert);
}

void SlotTable::fail(int32_t index, Error error) {
  Slot& slot = slots_[index];
  slot_of_[slot.expert] = -1;
  slot.state = SlotState::kEmpty;
  slot.expert = kNoExpert;
  slot.uses = 0;
  --loading_;
  if (slot.pins > 0) {
    slot.error.emplace(std::move(error));
  } else {
    put_back(index);
  }
}

void SlotTable::evict(int32_t index) {
  Slot& slot = slots_[index];
  if (marks_[slot.expert] != 0) policy_->unpin(slot.expert);
  policy_->remove(slot.expert);
  slot_of_[slot.expert] = -1;
  slot.state = SlotState::kEmpty;
  slot.expert = kNoExpert;
  put_back(index);
}

void SlotTable::hold(int32_t index) {
  Slot& slot = slots_[index];
  if (slot.pins++ > 0) return;
  ++pinned_;
  if (slot.state == SlotState::kReady && marks_[slot.expert] == 0) policy_->pin(slot.expert);
}

void SlotTable::pin(int32_t index) {
  Slot& slot = slots_[index];
  if (slot.state == SlotState::kReady) {
    policy_->touch(slot.expert);
  } else {
    ++slot.uses;
  }
  hold(index);
}

void SlotTable::unpin(int32_t index) {
  Slot& slot = slots_[index];
  --slot.pins;
  slot.uses = std::min(slot.uses, slot.pins);  // who gave up waiting
  if (slot.pins > 0) return;
  --pinned_;
  if (slot.state == SlotState::kReady && marks_[slot.expert] == 0) policy_->unpin(slot.expert);
  if (slot.state == SlotState::kEmpty) {
    slot.error.reset();
    put_back(index);
  }
}

void SlotTable::mark(ExpertId id, Mark mark, bool on) {
  const uint8_t before = marks_[id];
  const auto after = static_cast<uint8_t>(on ? before | mark : before & ~mark);
  marks_[id] = after;
  if (mark == kKept) kept_experts_ += ((after & kKept) != 0) - ((before & kKept) != 0);
  if ((before != 0) == (after != 0)) return;
  const int32_t index = slot_of_[id];
  if (index < 0 || slots_[index].state != SlotState::kReady || slots_[index].pins > 0) return;
  if (after != 0) {
    policy_->pin(id);
  } else {
    policy_->unpin(id);
  }
}

void SlotTable::validate() const {
  int32_t loading = 0, pinned = 0, ready = 0, mapped = 0, resident = 0;
  for (int32_t index = 0; index < size(); ++index) {
    validate_slot(index);
    loading += slots_[index].state == SlotState::kLoading;
    ready += slots_[index].state == SlotState::kReady;
    pinned += slots_[index].pins > 0;
  }
  check_invariant(loading == loading_, "the count of LOADING slots is wrong");
  check_invariant(pinned == pinned_, "the count of pinned slots is wrong");
  const auto keeps = [](uint8_t marks) { return (marks & kKept) != 0; };
  check_invariant(std::count_if(marks_.begin(), marks_.end(), keeps) == kept_experts_,
                  "the count of experts that are kept is wrong");
  check_invariant(kept_experts_ <= limit_ / 2, "more than half of the slots are kept");

  std::vector<bool> listed(slots_.size(), false);
  int32_t empty = 0;
  for (int32_t index = empty_.front(); index >= 0; index = empty_.next(index), ++empty) {
    check_invariant(!listed[index], "a slot is twice in the list of empty ones");
    listed[index] = true;
    check_invariant(!retired(index), "a retired slot is in the list of empty ones");
    check_invariant(slots_[index].state == SlotState::kEmpty && slots_[index].pins == 0,
                    "a slot in the list of empty ones is in use");
  }
  int32_t failed = 0, vacant = 0;
  for (int32_t index = 0; index < size(); ++index) {
    failed += slots_[index].error.has_value();
    vacant += retired(index) && slots_[index].state == SlotState::kEmpty && slots_[index].pins == 0;
  }
  check_invariant(empty + failed + loading + ready + vacant == size(), "a slot is lost");

  for (size_t id = 0; id < slot_of_.size(); ++id) {
    const auto expert = static_cast<ExpertId>(id);
    resident += policy_->resident(expert);
    if (slot_of_[id] < 0) continue;
    ++mapped;
    check_invariant(slot_of_[id] < size() && slots_[slot_of_[id]].expert == expert,
                    "the expert map names a slot that holds another expert");
  }
  check_invariant(mapped == loading + ready, "an expert is in a slot but not in the map");
  check_invariant(resident == ready, "the policy's residents are not the READY slots");
}

void SlotTable::validate_slot(int32_t index) const {
  const Slot& slot = slots_[index];
  check_invariant(slot.pins >= 0, "a slot has fewer than zero pins");
  if (slot.state == SlotState::kEmpty) {
    check_invariant(slot.expert == kNoExpert, "an EMPTY slot names an expert");
    check_invariant((slot.pins > 0) == slot.error.has_value(),
                    "an EMPTY slot is pinned without an error");
    return;
  }
  check_invariant(slot.expert >= 0 && slot.expert < static_cast<ExpertId>(slot_of_.size()),
                  "a slot names no expert of the model");
  check_invariant(slot_of_[slot.expert] == index, "the map does not lead to an expert's slot");
  check_invariant(!slot.error, "a slot in use has an error");
  if (slot.state == SlotState::kReady) {
    check_invariant(!retired(index) || slot.pins > 0, "a retired slot that nobody uses is READY");
    check_invariant(policy_->resident(slot.expert), "a READY slot is unknown to the policy");
    check_invariant(policy_->pinned(slot.expert) == (slot.pins > 0 || marks_[slot.expert] != 0),
                    "slot and policy disagree on what is pinned");
  }
}

}  // namespace torch_mesh
