#pragma once

#include "residency/pool.h"

namespace torch_mesh::testing {

// Releases the expert that next() returned with this `index`.
inline void release(Claim& claim, int32_t index) {
  const ReadyExpert done{.index = index, .record = nullptr, .node = -1};
  claim.release({&done, 1});
}

}  // namespace torch_mesh::testing
