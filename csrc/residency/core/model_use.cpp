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

void ModelUse::count_on_gpu(int32_t layer, std::span<const int64_t> ids, int32_t top_k,
                            std::span<const int32_t> on_gpu, bool prompt, bool alone) {
  const int32_t all = experts();
  int64_t* of_layer = &uses[static_cast<size_t>(layer) * all];
  if (alone) tokens[layer] += prompt ? static_cast<int64_t>(ids.size()) / top_k : 1;
  for (size_t i = 0; i < ids.size(); ++i) {
    const int64_t id = ids[i];
    if (id < 0 || id >= all || on_gpu[id] < 0) continue;
    const auto before = ids.first(i);
    if (prompt || std::ranges::find(before, id) == before.end()) ++of_layer[id];
  }
}

std::vector<int32_t> hottest(const ModelUse& use, const std::vector<bool>& on_gpu) {
  std::vector<float> rates(use.uses.size());
  for (size_t id = 0; id < rates.size(); ++id) {
    if (on_gpu.empty() || !on_gpu[id]) rates[id] = use.rate(static_cast<int64_t>(id));
  }
  std::vector<int32_t> order, ids(rates.size());
  ids.resize(rank(rates, order, ids));
  return ids;
}

int32_t rank(std::span<const float> values, std::vector<int32_t>& order, std::span<int32_t> out) {
  order.clear();
  for (int32_t i = 0; i < static_cast<int32_t>(values.size()); ++i) {
    if (values[i] > 0) order.push_back(i);
  }
  const size_t count = std::min(order.size(), out.size());
  std::partial_sort(
      order.begin(), order.begin() + static_cast<int64_t>(count), order.end(),
      [&](int32_t a, int32_t b) { return values[a] != values[b] ? values[a] > values[b] : a < b; });
  std::copy_n(order.begin(), count, out.begin());
  return static_cast<int32_t>(count);
}

}  // namespace torch_mesh
