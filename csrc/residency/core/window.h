// The window: the slots that a forward of many experts reads through, instead of the whole pool.
// The forward evicts experts that it has computed. The slots outside hold what the policy ranks
// hottest, which a scan of the layers would evict before those layers run again.
//
// Decode steps have a narrow window. So have forwards of up to kMaxStepRows rows: their layers are
// too short to hide more reads.
//
// A longer prompt that needs nearly all of its layer comes to a pool that holds another text's
// experts. The slots outside its window are an equal part of the pool for each layer that it has
// come to. So the window narrows from layer to layer, and decode starts with experts of all layers
// rather than of the last. While the prompt computes the rest of its experts, the next layer's are
// read into the slots that it has released.
#pragma once

#include <cstdint>

#include "residency/core/claims.h"

namespace torch_mesh {

// Which forwards of prompts use the pool's window: none, those that need nearly all experts of
// their layer, or all.
enum class PrefillWindow : uint8_t { kNever, kAuto, kAlways };

class Window {
 public:
  Window(PrefillWindow prefill, SlotTable& slots) : prefill_(prefill), slots_(slots) {}

  // Whether the forward of a new claim will read the next layer's experts through the window, too.
  bool will_read_next_layer(const ClaimState& claim) const;
  // The number of slots that a claim may take from others for reads of experts that it has not
  // computed yet.
  int32_t slots_for(const ClaimState& claim) const {
    if (claim.reads_next_layer && !is_narrow(claim)) return slots_for(claim.layer, claim.part.last);
    return claim.part.streams && claim.part.last ? narrow() : slots_.limit();
  }
  // Reads experts of the next layer once the claim has slots for all of its own, which the disk
  // reads first.
  void read_next_layer(const ClaimState& claim);

 private:
  static bool is_narrow(const ClaimState& claim) {
    return claim.part.rows > 0 && claim.part.rows <= kMaxStepRows;
  }
  int32_t slots_for(int32_t layer, bool last_chunk) const;
  int32_t narrow() const;

  const PrefillWindow prefill_;
  SlotTable& slots_;
};

}  // namespace torch_mesh
