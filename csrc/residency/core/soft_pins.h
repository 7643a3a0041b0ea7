// Chooses the experts that a pool soft-pins: the hottest of its first layers by recent use. Soft
// pins take at most half of the slots: when the pool shrinks below twice their number some experts
// lose theirs, the least used first.
//
// The live pool and its replay use the same object. No threads: the caller holds the lock.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "residency/core/slots.h"
#include "residency/core/warm_up.h"

namespace torch_mesh {

struct SoftPinOptions {
  int32_t early_layers = 0;   // the number of first layers with soft pins
  int32_t early_experts = 0;  // soft-pinned experts in each of them
};

// Throws Error(kInvalid) for options that make no sense.
void check(const SoftPinOptions& options);

class SoftPins {
 public:
  // Begins with the hottest experts of the profile of `warm_up`.
  SoftPins(const SoftPinOptions& options, const WarmUpOptions& warm_up, SlotTable& slots);

  // A forward of `layer` begins; arguments as for Policy::tick_prompt().
  void tick(int32_t layer, std::span<const int32_t> chosen, std::span<const int64_t> ids,
            int32_t top_k);
  // The limit of the slot table has changed.
  void resize();

 private:
  void pin_hottest(int32_t layer);

  const int32_t experts_;
  const int32_t early_layers_, max_early_;
  SlotTable& slots_;
  std::vector<float> recent_;   // [early_layers][experts]: uses, decayed
  std::vector<int32_t> order_;  // [experts]
};

}  // namespace torch_mesh
