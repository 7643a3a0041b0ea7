// Grouping of (token, choice) pairs by expert.
#pragma once

#include "engine/workspace.h"

namespace torch_mesh {

// Groups ids [tokens][top_k] by a stable counting sort. Experts with many rows come first: all
// threads compute them together, and the last tasks are short. Throws Error(kInvalid) for an id
// outside [0, experts), unless `sentinels` says that ids >= experts are to be skipped.
void group_by_expert(const int64_t* ids, const float* weights, int32_t tokens, int32_t top_k,
                     int32_t experts, bool sentinels, Grouping& grouping);

// Throws Error(kInvalid) for an id outside [0, experts), naming its token and choice; ids >=
// experts are allowed with `sentinels`.
void check_expert_ids(const int64_t* ids, int32_t tokens, int32_t top_k, int32_t experts,
                      bool sentinels);

// Throws Error(kInvalid) unless the `experts` + 1 offsets of rows sorted by expert begin at 0 and
// never decrease.
void check_offsets(const int64_t* offsets, int32_t experts);

}  // namespace torch_mesh
