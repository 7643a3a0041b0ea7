// What a pool knows of its model before the first forward, and what it shall never give up.
#pragma once

#include <cstdint>
#include <vector>

#include "residency/core/model_use.h"

namespace torch_mesh {

struct KeptOptions {
  ModelUse profile = {};  // of earlier runs; or empty
  // [layers * experts]: something else is to hold them, so that they are neither warmed nor pinned,
  // and warming waits for Pool::warm_up(). Or empty: none.
  std::vector<bool> elsewhere = {};
  // What the profile does not name is read too while slots are empty.
  bool fill = false;
  double pins = 0;            // share of the slots, in [0, .5], for the profile's hottest
  int32_t early_layers = 0;   // of so many first layers
  int32_t early_experts = 0;  // so many experts are kept
};

// Throws Error(kInvalid) for options that make no sense.
void check(const KeptOptions& options, int32_t layers, int32_t experts);

}  // namespace torch_mesh
