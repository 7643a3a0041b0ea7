// Belady's optimum (IBM Systems Journal 1966) for a recorded trace: gives up the expert whose next
// use lies furthest ahead. It knows the future, so it serves simulations alone.
#pragma once

#include <memory>

#include "residency/policies/policy.h"
#include "residency/replay.h"

namespace torch_mesh {

// For a replay of `trace` from its first token on, one tick for each layer of each token.
std::unique_ptr<Policy> make_belady(const RoutingTrace& trace);

}  // namespace torch_mesh
