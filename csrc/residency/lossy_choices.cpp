#include "residency/lossy_choices.h"

#include <algorithm>
#include <cmath>
#include <functional>
#include <limits>
#include <numeric>
#include <utility>

namespace torch_mesh {

void split_cold(std::span<const SlotState> states, std::span<const float> weights, int32_t top_k,
                int64_t max_deferred, SplitChoices& choices) {
  const auto experts = static_cast<int64_t>(states.size());
  const auto now = choices.now, left_out = choices.left_out;
  std::vector<bool> needed_now(states.size());
  std::vector<size_t> order(static_cast<size_t>(top_k));
  for (size_t token = 0; token < now.size(); token += order.size()) {
    std::iota(order.begin(), order.end(), token);
    std::ranges::stable_sort(order, {}, [&](size_t at) { return weights[at]; });
    int64_t left = max_deferred;
    for (const size_t at : order) {
      const int64_t id = now[at];
      if (id >= experts) continue;
      if (left > 0 && states[id] != SlotState::kReady) {
        std::swap(now[at], left_out[at]);
        --left;
      } else {
        needed_now[id] = true;
      }
    }
  }
  for (size_t at = 0; at < now.size(); ++at) {
    const int64_t id = left_out[at];
    if (id >= experts) continue;
    if (needed_now[id]) {
      std::swap(now[at], left_out[at]);
    } else if (std::ranges::find(choices.experts, id) == choices.experts.end()) {
      choices.experts.push_back(static_cast<int32_t>(id));
    }
  }
}

void split_by_pool(std::span<const SlotState> here, std::span<const SlotState> there,
                   SplitChoices& choices) {
  const auto experts = static_cast<int64_t>(here.size());
  std::vector<bool> seen(here.size());
  for (size_t at = 0; at < choices.now.size(); ++at) {
    const int64_t id = choices.now[at];
    if (id >= experts) continue;
    const bool first = !seen[id];
    seen[id] = true;
    if (here[id] == SlotState::kReady) {
      if (first && there[id] == SlotState::kReady) {
        choices.doubles.push_back(static_cast<int32_t>(id));
      }
    } else if (here[id] == SlotState::kEmpty || there[id] != SlotState::kEmpty) {
      std::swap(choices.now[at], choices.left_out[at]);
      if (first) choices.experts.push_back(static_cast<int32_t>(id));
    }
  }
}

namespace {

// Whether a group mask removed the expert: then it is never chosen for being resident.
bool masked(float score) {
  return score == 0.0f || score == -std::numeric_limits<float>::infinity();
}

int64_t reroute_one(std::span<const SlotState> states, std::span<const float> scores, float bias,
                    int64_t kept, std::span<int64_t> chosen) {
  if (std::ranges::any_of(scores, [](float score) { return std::isnan(score); })) return 0;
  const auto cold = [&](int64_t expert) { return states[expert] == SlotState::kEmpty; };
  const auto score_of = [&](int64_t expert) { return scores[expert]; };
  std::vector<int64_t> by_score(chosen.begin(), chosen.end());
  std::ranges::stable_sort(by_score, std::greater{}, score_of);
  float min = std::numeric_limits<float>::max(), max = std::numeric_limits<float>::lowest();
  std::vector<int64_t> resident;  // resident and not chosen, the best first
  for (size_t expert = 0; expert < scores.size(); ++expert) {
    if (masked(scores[expert])) continue;
    min = std::min(min, scores[expert]);
    max = std::max(max, scores[expert]);
    const auto id = static_cast<int64_t>(expert);
    if (!cold(id) && std::ranges::find(by_score, id) == by_score.end()) resident.push_back(id);
  }
  std::ranges::stable_sort(resident, std::greater{}, score_of);
  const float bonus = bias * (max - min);
  // Compares the worst cold choice with the best resident expert, and so on. The result is what
  // topk would choose of the scores with the bonus added.
  auto best = resident.begin();
  int64_t replaced = 0;
  for (auto at = by_score.rbegin(); at != by_score.rend() - kept && best != resident.end(); ++at) {
    if (!cold(*at)) continue;
    if (!(scores[*best] + bonus > scores[*at])) break;
    *std::ranges::find(chosen, *at) = *best++;
    ++replaced;
  }
  return replaced;
}

}  // namespace

int64_t reroute(std::span<const SlotState> states, std::span<const float> scores, float bias,
                int64_t kept, std::span<int64_t> chosen, int32_t top_k) {
  int64_t replaced = 0;
  for (; !chosen.empty(); chosen = chosen.subspan(top_k)) {
    replaced += reroute_one(states, scores.first(states.size()), bias, kept, chosen.first(top_k));
    scores = scores.subspan(states.size());
  }
  return replaced;
}

}  // namespace torch_mesh
