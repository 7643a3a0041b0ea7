// What the next layer is expected to use, from the moment that somebody foretells it until the
// layer begins. No threads: whoever calls holds the pool's lock.
//
// An expert gets a slot only when its read can begin: one that still waits when its layer begins
// has cost nobody a slot, and is dropped if the layer does not use it (docs/decisions/0018).
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "residency/core/slots.h"

namespace torch_mesh {

class Expected {
 public:
  explicit Expected(int32_t experts) : experts_(experts) { ids_.reserve(experts); }

  // Distinct experts of `layer`, the likeliest first, in place of what was expected before.
  void set(int32_t layer, std::span<const int32_t> experts) {
    ids_.clear();
    for (int32_t expert : experts) ids_.push_back(layer * experts_ + expert);
    layer_ = layer;
    next_ = 0;
  }

  // A forward of `layer` begins, and asks for what it needs itself.
  void begin(int32_t layer) {
    if (layer == layer_) clear();
  }

  // The slot that `reserve(id)` gives to the likeliest one that has none; -1: there is no such
  // expert, or no slot. None of those expected is given up for it.
  template <typename Reserve>
  int32_t reserve_next(SlotTable& slots, Reserve&& reserve) {
    while (next_ < ids_.size() && slots.find(ids_[next_]) >= 0) ++next_;
    if (next_ == ids_.size()) return -1;
    int32_t slot = -1;
    while_kept(slots, ids_, [&] { slot = reserve(ids_[next_]); });
    if (slot < 0) {
      clear();
    } else {
      ++next_;  // whatever comes of its read: one that fails at once is not asked for again
    }
    return slot;
  }

 private:
  void clear() {
    ids_.clear();
    layer_ = -1;
    next_ = 0;
  }

  int32_t experts_;  // per layer
  int32_t layer_ = -1;
  std::vector<ExpertId> ids_;
  size_t next_ = 0;  // those before it have or had a slot
};

}  // namespace torch_mesh
