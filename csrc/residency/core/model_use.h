// Counts of how often a model used each of its experts. They outlive a sequence, and may outlive
// the process as a profile (docs/profiles.md).
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

namespace torch_mesh {

struct ModelUse {
  std::vector<int64_t> tokens;  // [layers]; a decode step counts as one, whatever its rows
  std::vector<int64_t> uses;    // [layers][experts]

  ModelUse() = default;
  ModelUse(int32_t layers, int32_t experts)
      : tokens(static_cast<size_t>(layers)), uses(static_cast<size_t>(layers) * experts) {}

  int32_t experts() const { return static_cast<int32_t>(uses.size() / tokens.size()); }

  // The probability that a token uses the expert; 0 where nothing is known.
  float rate(int64_t id) const {
    const int64_t seen = tokens[id / experts()];
    return seen > 0 ? static_cast<float>(uses[id]) / static_cast<float>(seen) : 0.f;
  }

  // Counts uses that count() does not see, since a GPU computes them: of ids whose entry in
  // `on_gpu` is not negative, top_k for each token. `alone`: nothing else of these tokens is
  // counted. Each use by a `prompt` counts; those of a decode step count once per expert.
  void count_on_gpu(int32_t layer, std::span<const int64_t> ids, int32_t top_k,
                    std::span<const int32_t> on_gpu, bool prompt, bool alone);

  // Arguments as for Policy::tick_prompt(); without `ids` one token used `chosen`.
  void count(int32_t layer, std::span<const int32_t> chosen, std::span<const int64_t> ids,
             int32_t top_k) {
    const int32_t all = experts();
    int64_t* of_layer = &uses[static_cast<size_t>(layer) * all];
    if (ids.empty() || top_k < 1) {
      ++tokens[layer];
      for (int32_t expert : chosen) ++of_layer[expert];
      return;
    }
    tokens[layer] += static_cast<int64_t>(ids.size()) / top_k;
    for (int64_t id : ids) {
      if (id >= 0 && id < all) ++of_layer[id];
    }
  }
};

// Throws Error(kInvalid) unless `use` has this shape, nothing negative and no expert used more
// often than there were tokens. `tokens` may be empty: nothing is known.
void check(const ModelUse& use, int32_t layers, int32_t experts);

// The ids that were used and are not `on_gpu`, the most used per token first.
std::vector<int32_t> hottest(const ModelUse& use, const std::vector<bool>& on_gpu = {});

// The indices of the largest positive values, as many as fit into `out`; equal ones in order of
// their index. Returns how many. `order` is scratch.
int32_t rank(std::span<const float> values, std::vector<int32_t>& order, std::span<int32_t> out);

}  // namespace torch_mesh
