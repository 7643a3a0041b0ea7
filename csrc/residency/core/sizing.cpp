#include "residency/core/sizing.h"

#include <algorithm>

namespace torch_mesh {

Sizing::Sizing(int32_t slots_per_segment, SlotTable& slots, SoftPins& soft_pins)
    : slots_per_segment_(slots_per_segment),
      target_(slots.limit()),
      before_(target_),
      slots_(slots),
      soft_pins_(soft_pins) {
  if (slots_per_segment == 0) return;
  segments_.assign(static_cast<size_t>((target_ + slots_per_segment - 1) / slots_per_segment),
                   State::kAttached);
}

int32_t Sizing::first_of(int64_t segment) const {
  return static_cast<int32_t>(std::min<int64_t>(slots_.size(), segment * slots_per_segment_));
}

int64_t Sizing::first_not_attached() const {
  const auto present = [](State state) { return state == State::kAttached; };
  return std::ranges::find_if_not(segments_, present) - segments_.begin();
}

bool Sizing::vacant(int64_t segment) const {
  for (int32_t slot = first_of(segment); slot < first_of(segment + 1); ++slot) {
    if (!slots_.retired(slot) || !slots_.reusable(slot)) return false;
  }
  return true;
}

void Sizing::detach_vacant() {
  for (int64_t segment = 0; segment < std::ssize(segments_); ++segment) detach_vacant(segment);
}

// Nothing reads into an EMPTY slot.
void Sizing::detach_vacant(int64_t segment) {
  if (segments_[segment] != State::kAttached || !vacant(segment)) return;
  segments_[segment] = State::kDetaching;
  slots_.effects().vacant.push_back(segment);
}

void Sizing::detached(int64_t segment) {
  segments_[segment] = State::kDetached;
  slots_.effects().resized = true;
}

void Sizing::detach_failed(int64_t segment) { segments_[segment] = State::kAttached; }

int64_t Sizing::next_to_attach() {
  if (std::ranges::find(segments_, State::kAttaching) != segments_.end()) return -1;
  // Attaches from the first one up, as slots can be used only without a gap below them: waits for
  // one that is being detached.
  const int64_t segment = first_not_attached();
  if (segment == std::ssize(segments_) || segments_[segment] == State::kDetaching) return -1;
  if (first_of(segment) >= target_) return -1;
  segments_[segment] = State::kAttaching;
  return segment;
}

void Sizing::attached(int64_t segment) {
  segments_[segment] = State::kAttached;
  raise_limit();
  detach_vacant(segment);  // if the pool has shrunk meanwhile
  slots_.effects().resized = true;
}

void Sizing::attach_failed(int64_t segment) {
  segments_[segment] = State::kDetached;
  slots_.effects().resized = true;
  if (first_of(segment) < target_) resize(before_);  // else the pool has shrunk meanwhile
}

void Sizing::raise_limit() {
  const int32_t limit =
      segments_.empty() ? target_ : std::min(target_, first_of(first_not_attached()));
  if (limit <= slots_.limit()) return;
  slots_.statistics().counts().grows += slots_.limit() == before_;  // the first of this resize()
  set_limit(limit);
  slots_.effects().freed = true;
}

void Sizing::set_limit(int32_t limit) {
  slots_.set_limit(limit);
  soft_pins_.resize();
}

void Sizing::resize(int32_t wanted) {
  before_ = slots_.limit();
  target_ = wanted;
  if (wanted < before_) {
    ++slots_.statistics().counts().shrinks;
    set_limit(wanted);
    for (int32_t slot = wanted; slot < before_; ++slot) {
      if (slots_.reusable(slot) && slots_[slot].state == SlotState::kReady) {
        slots_.evict(slot, Phase::kNone);
      }
    }
  }
  raise_limit();
  detach_vacant();
  slots_.effects().resized = true;
}

bool Sizing::settled() const {
  return slots_.limit() == target_ && std::ranges::none_of(segments_, [](State state) {
           return state == State::kDetaching || state == State::kAttaching;
         });
}

void Sizing::validate(bool closed) const {
  check_invariant(slots_.limit() <= target_, "more slots are in use than were asked for");
  for (int64_t segment = 0; segment < std::ssize(segments_); ++segment) {
    const bool present = segments_[segment] == State::kAttached;
    check_invariant(present || vacant(segment), "a slot is in use without memory");
    check_invariant(!present || closed || !vacant(segment), "a segment that is not in use stays");
  }
}

}  // namespace torch_mesh
