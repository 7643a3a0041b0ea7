// route: the selection among a token's experts leans towards those that are resident.
//
// After the cache prior of arXiv 2412.00099, with two differences: the bonus is a share of the
// spread of the token's own scores, not of a running mean, and it counts in whatever scores the
// family selects by, which is what its group masks and correction biases are made for.
#include <ATen/core/Tensor.h>
#include <torch/library.h>

#include <algorithm>
#include <cmath>
#include <functional>
#include <limits>
#include <span>
#include <vector>

#include "bindings/registry.h"
#include "bindings/tensors.h"
#include "engine/grouping.h"

namespace torch_mesh {
namespace {

// What a group mask leaves of an expert's score; such a one is never chosen for being resident.
bool masked(float score) {
  return score == 0.0f || score == -std::numeric_limits<float>::infinity();
}

// Replaces some of one token's `chosen`, in place; returns how many.
int64_t reroute(std::span<const float> scores, const std::vector<SlotState>& states, float bias,
                int64_t kept, std::span<int64_t> chosen) {
  if (std::ranges::any_of(scores, [](float score) { return std::isnan(score); })) return 0;
  const auto cold = [&](int64_t expert) { return states[expert] == SlotState::kEmpty; };
  std::vector<int64_t> by_score(chosen.begin(), chosen.end());
  std::ranges::stable_sort(by_score, std::greater{},
                           [&](int64_t expert) { return scores[expert]; });
  float least = std::numeric_limits<float>::max(), most = std::numeric_limits<float>::lowest();
  std::vector<int64_t> spare;  // resident and not chosen, the best first
  for (size_t expert = 0; expert < scores.size(); ++expert) {
    if (masked(scores[expert])) continue;
    least = std::min(least, scores[expert]);
    most = std::max(most, scores[expert]);
    const auto id = static_cast<int64_t>(expert);
    if (!cold(id) && std::ranges::find(by_score, id) == by_score.end()) spare.push_back(id);
  }
  std::ranges::stable_sort(spare, std::greater{}, [&](int64_t expert) { return scores[expert]; });
  const float bonus = bias * (most - least);
  // The worst cold choice against the best spare one, and so on: what topk of scores with the bonus
  // added would choose.
  auto best = spare.begin();
  int64_t replaced = 0;
  for (auto at = by_score.rbegin(); at != by_score.rend() - kept && best != spare.end(); ++at) {
    if (!cold(*at)) continue;
    if (!(scores[*best] + bonus > scores[*at])) break;
    *std::ranges::find(chosen, *at) = *best++;
    ++replaced;
  }
  return replaced;
}

at::Tensor route(const at::Tensor& scores, const at::Tensor& topk_ids, at::Tensor& handle,
                 double bias, int64_t kept) {
  const LayerHandle layer = resolve(handle);
  Pool& pool = layer.engine().pool();
  TORCH_CHECK_VALUE(scores.dim() == 2 && scores.size(1) == pool.experts(),
                    "scores must be [tokens, experts=", pool.experts(), "]; got ", scores.sizes());
  TORCH_CHECK_VALUE(topk_ids.dim() == 2 && topk_ids.size(0) == scores.size(0),
                    "topk_ids must be [tokens=", scores.size(0), ", k]; got ", topk_ids.sizes());
  TORCH_CHECK_VALUE(bias >= 0 && bias <= 1, "bias is ", bias, "; allowed: 0 to 1");
  TORCH_CHECK_VALUE(kept >= 0 && kept <= topk_ids.size(1), "kept is ", kept,
                    "; allowed: 0 to k = ", topk_ids.size(1));
  at::Tensor ids = contiguous_as(topk_ids, at::kLong).clone();
  const int64_t tokens = ids.size(0), k = ids.size(1);
  int64_t* chosen = ids.mutable_data_ptr<int64_t>();
  check_expert_ids(chosen, static_cast<int32_t>(tokens), static_cast<int32_t>(k), pool.experts(),
                   /*sentinels=*/false);
  if (bias == 0 || phase_of(tokens) != Phase::kDecode) return ids;
  const std::vector<SlotState> states = states_of(layer);
  const at::Tensor rows = contiguous_as(scores, at::kFloat);
  const float* row = rows.const_data_ptr<float>();
  int64_t replaced = 0;
  for (int64_t token = 0; token < tokens; ++token) {
    replaced +=
        reroute({row + token * pool.experts(), states.size()}, states, static_cast<float>(bias),
                kept, {chosen + token * k, static_cast<size_t>(k)});
  }
  if (replaced > 0) pool.count_rerouted(layer.layer, replaced, Phase::kDecode);
  return ids;
}

}  // namespace
}  // namespace torch_mesh

TORCH_LIBRARY_IMPL(torch_mesh, CPU, m) { m.impl("route", torch_mesh::route); }
