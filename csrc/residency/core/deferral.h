// Which experts a decode step leaves out of its forward, by what is resident at one moment: those
// that it uses one layer later, or that another pool computes in another format. Choices are
// [tokens][top_k]; ids of `experts` and more stand for none, and so does `experts` where a choice
// is left out.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "residency/core/slots.h"

namespace torch_mesh {

// What tokens chose of a layer: what this forward computes, and what it leaves out.
struct SplitChoices {
  std::span<int64_t> now;             // the choices at first
  std::span<int64_t> left_out;        // none at first
  std::vector<int32_t> experts = {};  // the distinct ones of `left_out`
  std::vector<int32_t> doubles = {};  // split_by_pool(): of `now`, READY in both pools
};

// Of each token's choices, up to `most` of least weight whose experts are not READY are left out:
// all but those that some token needs now anyway. weights: [tokens][top_k].
void split_cold(std::span<const SlotState> states, std::span<const float> weights, int32_t top_k,
                int64_t most, SplitChoices& choices);

// What is not READY here goes to the fallback pool, but for what is being read here and lacking
// there.
void split_by_pool(std::span<const SlotState> here, std::span<const SlotState> there,
                   SplitChoices& choices);

// Replaces cold ones among each token's `chosen` by resident ones that were not chosen, the worst
// by the best, while `bias` (of the spread of its scores) makes up for the difference; the `kept`
// best stay. scores: [tokens][experts]. Returns how many. Scores that a group mask left at 0 or
// -inf are never chosen; NaN: nothing is replaced.
//
// After the cache prior of arXiv 2412.00099, with two differences: the bonus is a fraction of the
// spread of the token's own scores, not of a running mean, and it counts in whatever scores the
// family selects by, which is what its group masks and correction biases are made for.
int64_t reroute(std::span<const SlotState> states, std::span<const float> scores, float bias,
                int64_t kept, std::span<int64_t> chosen, int32_t top_k);

}  // namespace torch_mesh
