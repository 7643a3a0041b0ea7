// Chooses the experts that a pool reads before any forward asks for them: soft-pinned ones first,
// then the hottest of the profile, then, to fill the pool, the others: an equal number of each
// layer. Each is read once, into an empty slot.
//
// The live pool and its replay use the same object. No threads: the caller holds the lock.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "residency/core/model_use.h"
#include "residency/core/slots.h"

namespace torch_mesh {

// The facts about its model that a pool has before the first forward.
struct WarmUpOptions {
  ModelUse profile = {};  // of earlier runs; or empty
  // [layers * experts]: experts that a GPU will hold. They are not read, and reading waits for
  // start(). Empty: none.
  std::vector<bool> on_gpu = {};
  // Also read experts that the profile does not name while slots are empty.
  bool fill = false;
};

// Throws Error(kInvalid) for options that make no sense.
void check(const WarmUpOptions& options, int32_t layers, int32_t experts);

class WarmUp {
 public:
  // The first soft pins are set by now.
  WarmUp(const WarmUpOptions& options, SlotTable& slots);

  bool started() const { return started_; }
  void start() { started_ = true; }

  // Begins to read the next expert. Returns the slot; -1: no slot is empty, or none is left to
  // read.
  int32_t read_next();

 private:
  void append_others(const std::vector<bool>& on_gpu);

  SlotTable& slots_;
  bool started_;
  std::vector<ExpertId> experts_;
  size_t next_ = 0;
};

}  // namespace torch_mesh
