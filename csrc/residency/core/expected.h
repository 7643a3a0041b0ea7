// What the next layer is expected to use, from the prediction until the layer begins. No threads:
// the caller holds the pool's lock.
//
// An expert gets a slot only when its read can begin: one that still waits when its layer begins
// has cost no slot, and is dropped if the layer does not use it. Where a guess stands in its
// layer's ranking says how likely it is right: what stands where too few were is not read
// (docs/decisions/0018).
#pragma once

#include <algorithm>
#include <cstdint>
#include <span>
#include <vector>

#include "residency/core/slots.h"

namespace torch_mesh {

class Expected {
 public:
  Expected(int32_t layers, int32_t experts)
      : experts_(experts), right_(static_cast<size_t>(layers) * kPositions) {
    ids_.reserve(experts);
    cold_.reserve(experts);
  }

  // Distinct experts of `layer`, the likeliest first, in position of what was expected before.
  // Those without a slot are cold.
  void set(int32_t layer, std::span<const int32_t> experts, const SlotTable& slots) {
    ids_.clear();
    cold_.clear();
    for (int32_t expert : experts) {
      ids_.push_back(layer * experts_ + expert);
      cold_.push_back(slots.find(ids_.back()) < 0);
    }
    layer_ = layer;
    next_ = 0;
  }

  // A forward of `layer` begins, and asks for what it needs itself: `experts`. It shows which
  // guesses were right, of what was not read, too, and whether the disk had the time.
  void begin(int32_t layer, std::span<const int32_t> experts, const SlotTable& slots) {
    if (layer != layer_) return;
    bool asked = false, late = false;
    for (size_t position = 0; position < ids_.size(); ++position) {
      if (!cold_[position]) continue;
      Fraction& right = right_at(position);
      if (right.value >= min_right()) {
        const int32_t slot = slots.find(ids_[position]);
        asked = true;
        late |= slot < 0 || slots[slot].state != SlotState::kReady;
      }
      right.learn(std::ranges::find(experts, ids_[position] % experts_) != experts.end());
    }
    if (asked) late_.learn(late);
    clear();
  }

  // Adds those that are worth a read and have had no slot to `ids`, the likeliest first.
  void waiting(const SlotTable& slots, std::vector<ExpertId>& ids) {
    for (size_t position = next_; position < ids_.size(); ++position) {
      const bool wanted = right_at(position).value >= min_right();
      if (wanted && slots.find(ids_[position]) < 0) ids.push_back(ids_[position]);
    }
  }

  // Begins to read the likeliest one that has no slot and is worth it. Returns its slot; -1: there
  // is no such expert, or no slot. None of those expected is evicted for it.
  int32_t read_next(SlotTable& slots, Phase phase) {
    while (next_ < ids_.size() &&
           (slots.find(ids_[next_]) >= 0 || right_at(next_).value < min_right())) {
      ++next_;
    }
    if (next_ == ids_.size()) return -1;
    int32_t slot = -1;
    slots.while_pinned(ids_, [&] { slot = slots.read(ids_[next_], Urgency::kPrefetch, phase); });
    // Whatever comes of its read: one that fails at once is not asked for again. Without a slot the
    // others get none either.
    next_ = slot < 0 ? ids_.size() : next_ + 1;
    return slot;
  }

 private:
  // Of the last few hundred times, those that something was so.
  struct Fraction {
    static constexpr int32_t kMemory = 256;
    float value = 1;  // as if it had been so eight times
    int32_t count = 8;

    void learn(bool so) {
      if (count < kMemory) ++count;
      value += (static_cast<float>(so) - value) / static_cast<float>(count);
    }
  };
  static constexpr size_t kPositions = 16;  // that a ranking of any length is divided into

  Fraction& right_at(size_t position) {
    return right_[layer_ * kPositions + position * kPositions / ids_.size()];
  }

  // Of guesses at a position of the ranking, for it to be read. A read in vain costs little where
  // all that was asked for is there when its layer begins, and delays others where it is not.
  static constexpr float kMinRightIdle = 0.45f, kMinRightBusy = 0.7f;
  float min_right() const { return kMinRightIdle + (kMinRightBusy - kMinRightIdle) * late_.value; }

  void clear() {
    ids_.clear();
    layer_ = -1;
    next_ = 0;
  }

  int32_t experts_;  // per layer
  int32_t layer_ = -1;
  std::vector<Fraction> right_;  // [layer][position]; all are read until it is known better
  Fraction late_;                // layers that began before all that was asked for them was there
  std::vector<ExpertId> ids_;
  std::vector<char> cold_;  // when they were predicted
  size_t next_ = 0;         // those before it have or had a slot
};

}  // namespace torch_mesh
