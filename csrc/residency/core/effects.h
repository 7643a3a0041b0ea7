// The actions that a core requires after an event. Its driver carries them out, in whatever threads
// it has, and clears them. Their outcomes are further events.
#pragma once

#include <cstdint>
#include <vector>

#include "store/source.h"

namespace torch_mesh {

struct Effects {
  // Slots whose reads begin, in this order; each ends in landed() or failed().
  std::vector<int32_t> reads;
  std::vector<int32_t> raised;      // slots whose reads have become demand
  std::vector<ExpertId> predicted;  // without a slot, likely to be read next
  std::vector<int64_t> vacant;      // segments to detach: detached() or detach_failed() follows
  bool landed = false;              // a read that claims have joined has ended
  bool freed = false;               // a slot may be reused, or the head of the queue has changed
  bool idle = false;                // no read is under way
  bool forward_ended = false;
  bool resized = false;  // a segment was attached or detached

  // Reserves room for all effects of one event, so that no event allocates. `experts`: of a layer.
  Effects(int32_t slots, int32_t experts) {
    reads.reserve(static_cast<size_t>(slots));
    raised.reserve(static_cast<size_t>(slots));
    predicted.reserve(static_cast<size_t>(experts));
    vacant.reserve(static_cast<size_t>(slots));
  }

  bool any() const {
    return !reads.empty() || !raised.empty() || !predicted.empty() || !vacant.empty() || landed ||
           freed || idle || forward_ended || resized;
  }
  void clear() {
    reads.clear();
    raised.clear();
    predicted.clear();
    vacant.clear();
    landed = freed = idle = forward_ended = resized = false;
  }
};

}  // namespace torch_mesh
