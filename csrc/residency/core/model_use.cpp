#include "residency/core/model_use.h"

#include <algorithm>

#include "base/error.h"

namespace torch_mesh {

void check(const ModelUse& use, int32_t layers, int32_t experts) {
  if (use.tokens.empty() && use.uses.empty()) return;
  if (use.tokens.size() != static_cast<size_t>(layers) ||
      use.uses.size() != static_cast<size_t>(layers) * experts) {
    throw_invalid("a profile of this model has counts of ", layers, " layers of ", experts,
                  " experts; got ", use.tokens.size(), " layers and ", use.uses.size(),
                  " experts in all");
  }
  for (size_t id = 0; id < use.uses.size(); ++id) {
    const size_t layer = id / experts;
    if (use.uses[id] >= 0 && use.uses[id] <= use.tokens[layer]) continue;
    throw_invalid("a profile has ", use.uses[id], " uses of expert ", id % experts, " by ",
                  use.tokens[layer], " tokens of layer ", layer,
                  "; allowed: 0 to as many as the tokens");
  }
}

void ModelUse::count_elsewhere(int32_t layer, std::span<const int64_t> ids, int32_t top_k,
                               std::span<const int32_t> elsewhere, bool prompt, bool alone) {
  const int32_t all = experts();
  int64_t* of_layer = &uses[static_cast<size_t>(layer) * all];
  if (alone) tokens[layer] += prompt ? static_cast<int64_t>(ids.size()) / top_k : 1;
  for (size_t i = 0; i < ids.size(); ++i) {
    const int64_t id = ids[i];
    if (id < 0 || id >= all || elsewhere[id] < 0) continue;
    const auto before = ids.first(i);
    if (prompt || std::ranges::find(before, id) == before.end()) ++of_layer[id];
  }
}

std::vector<int32_t> hottest(const ModelUse& use, int32_t most,
                             const std::vector<bool>& elsewhere) {
  std::vector<int32_t> ids;
  for (size_t id = 0; id < use.uses.size(); ++id) {
    if (!elsewhere.empty() && elsewhere[id]) continue;
    if (use.uses[id] > 0) ids.push_back(static_cast<int32_t>(id));
  }
  const auto count = std::min<size_t>(ids.size(), static_cast<size_t>(most));
  std::partial_sort(ids.begin(), ids.begin() + static_cast<int64_t>(count), ids.end(),
                    [&](int32_t a, int32_t b) {
                      const float rate_a = use.rate(a), rate_b = use.rate(b);
                      return rate_a != rate_b ? rate_a > rate_b : a < b;
                    });
  ids.resize(count);
  return ids;
}

}  // namespace torch_mesh
