#include "residency/core/statistics.h"

#include <algorithm>
#include <new>

namespace torch_mesh {

LayerStats& LayerStats::operator+=(const LayerStats& other) {
  for (const auto& [name, count] : kLayerCounts) this->*count += other.*count;
  return *this;
}

PoolStats::PoolStats(int32_t layers, int32_t experts)
    : experts(static_cast<size_t>(layers) * experts) {
  for (std::vector<LayerStats>& phase : this->layers) phase.resize(static_cast<size_t>(layers));
}

void Statistics::count(ExpertId id, Phase phase, CommonCount what) {
  ++(of_layer_of(id, phase).*what);
  ++(counts_.experts[id].*what);
}

void Statistics::count_access(ExpertId id, Phase phase, CommonCount how, bool early) {
  count(id, phase, &ExpertStats::accesses);
  count(id, phase, how);
  LayerStats& layer = of_layer_of(id, phase);
  layer.early_accesses += early;
  layer.early_hits += early && how == &ExpertStats::hits;
}

void Statistics::keep_prefetch_error(const Error& error) {
  try {
    counts_.prefetch_error = error;
  } catch (const std::bad_alloc&) {
    counts_.prefetch_error = kNoMemory;
  }
}

void Statistics::reset() {
  for (std::vector<LayerStats>& phase : counts_.layers) {
    std::fill(phase.begin(), phase.end(), LayerStats{});
  }
  std::fill(counts_.experts.begin(), counts_.experts.end(), ExpertStats{});
  counts_.prefetch_error.reset();
  counts_.shrinks = counts_.grows = 0;
  ++counts_.resets;
}

PoolTotals Statistics::totals() const {
  PoolTotals sum;
  sum.resets = counts_.resets;
  for (const LayerStats& layer : by_layer()) sum.counts += layer;
  return sum;
}

std::vector<LayerStats> Statistics::by_layer() const {
  std::vector<LayerStats> sum(forwards_.size());
  for (const std::vector<LayerStats>& phase : counts_.layers) {
    for (size_t layer = 0; layer < sum.size(); ++layer) sum[layer] += phase[layer];
  }
  return sum;
}

}  // namespace torch_mesh
