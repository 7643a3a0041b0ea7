// A plain read of records, with which decode is compared.
#pragma once

#include <cstdint>
#include <span>

#include "engine/engine.h"

namespace torch_mesh {

// Returns the sum of the records of `experts` as 64-bit words. It has to read every byte, so its
// time is a lower bound for a one-row forward over them. Promotes the cold ones and pins all at
// once. Throws Error: kInvalid for experts that are not distinct, or too many for the pool; else
// what the pool throws.
uint64_t record_sum(Engine& engine, int32_t layer, std::span<const int32_t> experts);

}  // namespace torch_mesh
