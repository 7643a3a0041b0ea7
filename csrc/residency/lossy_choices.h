// Changes the choices of a decode step by the slot states at one moment. Those it leaves out are
// used one layer later, or another pool computes them in another format. Others become resident
// experts. Choices are [tokens][top_k]; ids of `experts` and more stand for none, and so does
// `experts` where a choice is left out.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "residency/core/slots.h"

namespace torch_mesh {

// A layer's choices, divided into those that this forward computes and those that it leaves out.
struct SplitChoices {
  std::span<int64_t> now;             // all choices at first
  std::span<int64_t> left_out;        // none at first
  std::vector<int32_t> experts = {};  // the distinct ones of `left_out`
  std::vector<int32_t> doubles = {};  // split_by_pool(): of `now`, READY in both pools
};

// Leaves out up to `max_deferred` choices of each token, those of least weight whose experts are
// not READY, except experts that some token needs now anyway. weights: [tokens][top_k].
void split_cold(std::span<const SlotState> states, std::span<const float> weights, int32_t top_k,
                int64_t max_deferred, SplitChoices& choices);

// Leaves experts that are not READY here to the fallback pool, except those that are being read
// here and lack a slot there.
void split_by_pool(std::span<const SlotState> here, std::span<const SlotState> there,
                   SplitChoices& choices);

// Replaces cold experts among each token's `chosen` by resident ones that were not chosen, the
// worst by the best, while `bias` (a fraction of the spread of its scores) makes up for the
// difference. The `kept` best stay. scores: [tokens][experts]. Returns how many were replaced.
// Scores that a group mask left at 0 or -inf are never chosen; with NaN nothing is replaced.
//
// After the cache prior of arXiv 2412.00099, with two differences. The bonus is a fraction of the
// spread of the token's own scores, not of a running mean. It is added to the scores that the
// family selects by, after group masks and correction biases.
int64_t reroute(std::span<const SlotState> states, std::span<const float> scores, float bias,
                int64_t kept, std::span<int64_t> chosen, int32_t top_k);

}  // namespace torch_mesh
