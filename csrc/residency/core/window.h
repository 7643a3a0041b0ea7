// Prompts. A forward that needs nearly all of its layer streams the layer through a window of slots
// rather than through the whole pool, and while it computes the rest of its experts, the next
// layer's are read into the slots that it is done with.
//
// The slots outside the window hold what the policy thinks hottest: an equal share of the pool for
// each layer that the prompt has come to. So the window narrows from layer to layer, and
// decode starts with experts of all layers rather than with those of the last.
#pragma once

#include <cstdint>

#include "residency/core/claims.h"

namespace torch_mesh {

// Whether forwards of prompts take the pool's window: never, those that need nearly all experts of
// their layer, or all.
enum class PrefillWindow : uint8_t { kNever, kAuto, kAlways };

// `used`: distinct experts of the forward, of `experts`. `covers_all`: there is a slot for every
// expert of the model.
bool takes_window(PrefillWindow prefill, Phase phase, int32_t used, int32_t experts,
                  bool covers_all);

class Window {
 public:
  Window(int32_t layers, int32_t experts, Residents& residents)
      : layers_(layers), experts_(experts), residents_(residents) {}

  // How many slots a claim may take from others for reads whose experts it has not computed yet.
  int32_t slots_for(const ClaimState& claim) const {
    return slots_for(claim.layer, claim.part.last);
  }
  // For a claim that has a slot for all that it needs: what it reads goes first on the disk.
  void read_next_layer(const ClaimState& claim);

 private:
  int32_t slots_for(int32_t layer, bool last_chunk) const;

  const int32_t layers_, experts_;
  Residents& residents_;
};

}  // namespace torch_mesh
