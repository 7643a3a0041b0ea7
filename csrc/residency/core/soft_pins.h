// Chooses the experts that a pool soft-pins, the hottest of its first layers by recent use, and
// those that it reads before any forward asks. Soft pins take at most half of the slots: when the
// pool shrinks below twice their number some experts lose theirs, the least used first.
//
// The live pool and its replay use the same object. No threads: the caller holds the lock.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "residency/core/model_use.h"
#include "residency/core/slots.h"

namespace torch_mesh {

// The facts about its model that a pool has before the first forward.
struct SoftPinOptions {
  ModelUse profile = {};  // of earlier runs; or empty
  // [layers * experts]: experts that a GPU will hold. They are not warmed, and warming waits for
  // Pool::warm_up(). Empty: none.
  std::vector<bool> on_gpu = {};
  // Also read experts that the profile does not name while slots are empty.
  bool fill = false;
  int32_t early_layers = 0;   // the number of first layers with soft pins
  int32_t early_experts = 0;  // soft-pinned experts in each of them
};

// Throws Error(kInvalid) for options that make no sense.
void check(const SoftPinOptions& options, int32_t layers, int32_t experts);

class SoftPins {
 public:
  SoftPins(const SoftPinOptions& options, SlotTable& slots);

  // A forward of `layer` begins; arguments as for Policy::tick_prompt().
  void tick(int32_t layer, std::span<const int32_t> chosen, std::span<const int64_t> ids,
            int32_t top_k);
  // The limit of the slot table has changed.
  void resize();

  // Begins to read the next expert before it is used, into an empty slot. Returns the slot; -1: no
  // slot is empty, or none is left to read. Soft-pinned experts come first, then the hottest of the
  // profile, then, to fill the pool, the others: an equal number of each layer, each once.
  int32_t read_warm();

 private:
  void pin_hottest(int32_t layer);
  void append_others(const std::vector<bool>& on_gpu);

  const int32_t experts_;
  const int32_t early_layers_, max_early_;
  SlotTable& slots_;
  std::vector<float> recent_;   // [early_layers][experts]: uses, decayed
  std::vector<int32_t> order_;  // [experts]
  std::vector<ExpertId> warm_;
  size_t next_warm_ = 0;
};

}  // namespace torch_mesh
