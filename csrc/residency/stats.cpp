#include "residency/stats.h"

namespace torch_mesh {

LayerStats& LayerStats::operator+=(const LayerStats& other) {
  forwards += other.forwards;
  accesses += other.accesses;
  hits += other.hits;
  cold_misses += other.cold_misses;
  inflight_misses += other.inflight_misses;
  kept_accesses += other.kept_accesses;
  kept_hits += other.kept_hits;
  deferred += other.deferred;
  rerouted += other.rerouted;
  promoted += other.promoted;
  evicted += other.evicted;
  bytes_read += other.bytes_read;
  prefetches += other.prefetches;
  prefetches_used += other.prefetches_used;
  prefetches_wasted += other.prefetches_wasted;
  wasted_bytes += other.wasted_bytes;
  prefetches_failed += other.prefetches_failed;
  failed += other.failed;
  stall_nanoseconds += other.stall_nanoseconds;
  decision_nanoseconds += other.decision_nanoseconds;
  return *this;
}

PoolStats::PoolStats(int32_t layers, int32_t experts)
    : experts(static_cast<size_t>(layers) * experts) {
  for (std::vector<LayerStats>& phase : this->layers) phase.resize(static_cast<size_t>(layers));
}

}  // namespace torch_mesh
