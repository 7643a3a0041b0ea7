// The plain read that decode is measured against.
#pragma once

#include <cstdint>
#include <span>

#include "engine/engine.h"

namespace torch_mesh {

// The sum of the records of `experts` as 64-bit words, which nothing but reading every byte gives:
// its time is what a one-row forward over them takes at least. Promotes the cold ones and pins all
// at a time. Throws Error: kInvalid for experts that are not distinct, or too many for the pool;
// else what the pool throws.
uint64_t record_sum(Engine& engine, int32_t layer, std::span<const int32_t> experts);

}  // namespace torch_mesh
