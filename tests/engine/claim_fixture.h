#pragma once

#include <vector>

#include "residency/pool.h"

namespace torch_mesh::testing {

// Releases the expert that next() returned with this `index`.
inline void release(Claim& claim, int32_t index) {
  const ReadyExpert done{.index = index, .record = nullptr, .node = -1};
  claim.release({&done, 1});
}

inline SlotState state_of(const Pool& pool, int32_t layer, int32_t expert) {
  std::vector<SlotState> states(static_cast<size_t>(pool.experts()));
  pool.states(layer, states);
  return states.at(static_cast<size_t>(expert));
}

}  // namespace torch_mesh::testing
