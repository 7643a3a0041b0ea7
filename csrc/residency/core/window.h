// Forwards that read many experts do so through a window of slots rather than through the whole
// pool: what they have computed makes room for the next ones. The slots outside hold what the
// policy thinks hottest, which a scan of the layers would throw out before they come round again.
//
// Decode steps have a narrow one, and so have steps of more sequences than are decode and prompts
// of as few rows: more that is read ahead of their short layers hides nothing. A longer prompt that
// needs nearly all of its layer comes to a pool that holds another text's experts: the slots
// outside its window are an equal part of the pool for each layer that it has come to, so the
// window narrows from layer to layer, and decode starts with experts of all layers rather than with
// those of the last. While it computes the rest of its experts, the next layer's are read into the
// slots that it is done with.
#pragma once

#include <cstdint>

#include "residency/core/claims.h"

namespace torch_mesh {

// Whether forwards of prompts take the pool's window: never, those that need nearly all experts of
// their layer, or all.
enum class PrefillWindow : uint8_t { kNever, kAuto, kAlways };

class Window {
 public:
  Window(int32_t layers, int32_t experts, PrefillWindow prefill, SlotTable& slots)
      : layers_(layers), experts_(experts), prefill_(prefill), slots_(slots) {}

  // Whether a claim that begins is of a forward that takes the window, and whose next layer will.
  bool takes(const ClaimState& claim) const;
  // How many slots a claim may take from others for reads whose experts it has not computed yet.
  int32_t slots_for(const ClaimState& claim) const {
    if (claim.window && !is_narrow(claim)) return slots_for(claim.layer, claim.part.last);
    return claim.part.streams && claim.part.last ? narrow() : slots_.limit();
  }
  // For a claim that has a slot for all that it needs: what it reads goes first on the disk.
  void read_next_layer(const ClaimState& claim);

 private:
  static bool is_narrow(const ClaimState& claim) {
    return claim.part.rows > 0 && claim.part.rows <= kMaxStepRows;
  }
  int32_t slots_for(int32_t layer, bool last_chunk) const;
  int32_t narrow() const;

  const int32_t layers_, experts_;
  const PrefillWindow prefill_;
  SlotTable& slots_;
};

}  // namespace torch_mesh
