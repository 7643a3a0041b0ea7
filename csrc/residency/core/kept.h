// Experts that a pool soft-pins: those that a profile names once for all, and the hottest of the
// first layers, as they are used. Together they take at most half of the slots; when the pool
// shrinks below twice their number some lose theirs, the least used first.
//
// The live pool and its replay use the same object. No threads: the caller holds the lock.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "residency/core/kept_options.h"
#include "residency/core/slots.h"

namespace torch_mesh {

class Kept {
 public:
  Kept(const KeptOptions& options, int32_t layers, int32_t experts, SlotTable& slots);

  // A forward of `layer` begins; arguments as those of Policy::tick_prompt().
  void tick(int32_t layer, std::span<const int32_t> chosen, std::span<const int64_t> ids,
            int32_t top_k);
  // The limit of the slot table has changed.
  void resize();

  // Begins to read the next expert before it is used, into an empty slot. Returns the slot; -1: no
  // slot is empty, or none is left to read. What is kept comes first, then the hottest of the
  // profile, then, to fill the pool, the others: an equal number of each layer, each once.
  int32_t read_warm();

 private:
  void keep_early(int32_t layer);
  void append_others(int32_t layers, const std::vector<bool>& elsewhere);

  const int32_t experts_;
  const int32_t early_layers_, most_early_;
  SlotTable& slots_;
  std::vector<ExpertId> pins_;  // the most used first
  int32_t pinned_ = 0;          // of them, kept now
  int32_t early_ = 0;           // of each early layer, kept now
  std::vector<float> recent_;   // [early_layers][experts]: uses, decayed
  std::vector<int32_t> order_;  // [experts]
  std::vector<ExpertId> warm_;
  size_t next_warm_ = 0;
};

}  // namespace torch_mesh
