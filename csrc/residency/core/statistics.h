// What a pool counts. "Access" is one distinct expert of one forward of a layer: a hit, a cold
// miss, an in-flight miss, or deferred.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <optional>
#include <utility>
#include <vector>

#include "base/error.h"
#include "residency/core/forward.h"
#include "residency/policies/policy.h"

namespace torch_mesh {

// Counts of one layer in one phase since the pool was opened or its counts were reset. A read is
// counted in the phase that queued it, an eviction in the phase that needed the slot, both at the
// expert's own layer.
struct LayerStats {
  int64_t forwards = 0;  // that ended, in an error too
  int64_t accesses = 0;
  int64_t hits = 0;             // was READY
  int64_t cold_misses = 0;      // had to be read
  int64_t inflight_misses = 0;  // was being read already: a prefetch, or another forward's demand
  int64_t kept_accesses = 0;    // of the accesses: to experts that are never given up, see kept.h
  int64_t kept_hits = 0;
  int64_t deferred = 0;  // was not READY, and is used one layer later
  int64_t rerouted = 0;  // choices of tokens that went to a resident expert instead; no accesses
  int64_t promoted = 0;  // reads that became READY
  int64_t evicted = 0;
  int64_t bytes_read = 0;         // from the disk or the page cache
  int64_t prefetches = 0;         // prefetch reads queued
  int64_t prefetches_used = 0;    // of those: a forward came for the expert
  int64_t prefetches_wasted = 0;  // of those: evicted, or failed, before any forward came
  int64_t wasted_bytes = 0;       // read by those
  int64_t prefetches_failed = 0;  // prefetch reads that ended in an error
  int64_t failed = 0;             // reads that ended in an error and were not begun anew
  int64_t stall_nanoseconds = 0;  // forwards that had nothing to compute and waited
  // Under the lock: choosing slots and victims, queueing reads, handing out.
  int64_t decision_nanoseconds = 0;

  LayerStats& operator+=(const LayerStats& other);
};

// All of them by name: what sums and shows counts goes through this list.
inline constexpr std::pair<const char*, int64_t LayerStats::*> kLayerCounts[] = {
    {"forwards", &LayerStats::forwards},
    {"accesses", &LayerStats::accesses},
    {"hits", &LayerStats::hits},
    {"cold_misses", &LayerStats::cold_misses},
    {"inflight_misses", &LayerStats::inflight_misses},
    {"kept_accesses", &LayerStats::kept_accesses},
    {"kept_hits", &LayerStats::kept_hits},
    {"deferred", &LayerStats::deferred},
    {"rerouted", &LayerStats::rerouted},
    {"promoted", &LayerStats::promoted},
    {"evicted", &LayerStats::evicted},
    {"bytes_read", &LayerStats::bytes_read},
    {"prefetches", &LayerStats::prefetches},
    {"prefetches_used", &LayerStats::prefetches_used},
    {"prefetches_wasted", &LayerStats::prefetches_wasted},
    {"wasted_bytes", &LayerStats::wasted_bytes},
    {"prefetches_failed", &LayerStats::prefetches_failed},
    {"failed", &LayerStats::failed},
    {"stall_nanoseconds", &LayerStats::stall_nanoseconds},
    {"decision_nanoseconds", &LayerStats::decision_nanoseconds}};
static_assert(sizeof(kLayerCounts) / sizeof(*kLayerCounts) * sizeof(int64_t) == sizeof(LayerStats),
              "a count is missing from the list");

// Counts of one expert over all phases.
struct ExpertStats {
  int64_t accesses = 0;
  int64_t hits = 0;
  int64_t cold_misses = 0;
  int64_t inflight_misses = 0;
  int64_t deferred = 0;
  int64_t promoted = 0;
  int64_t evicted = 0;
  int64_t prefetches = 0;
};

inline constexpr std::pair<const char*, int64_t ExpertStats::*> kExpertCounts[] = {
    {"accesses", &ExpertStats::accesses},       {"hits", &ExpertStats::hits},
    {"cold_misses", &ExpertStats::cold_misses}, {"inflight_misses", &ExpertStats::inflight_misses},
    {"deferred", &ExpertStats::deferred},       {"promoted", &ExpertStats::promoted},
    {"evicted", &ExpertStats::evicted},         {"prefetches", &ExpertStats::prefetches}};
static_assert(sizeof(kExpertCounts) / sizeof(*kExpertCounts) * sizeof(int64_t) ==
              sizeof(ExpertStats));

// All counts at one moment.
struct PoolStats {
  std::array<std::vector<LayerStats>, kPhases> layers;  // by phase, by layer
  std::vector<ExpertStats> experts;                     // layer * experts + expert
  std::optional<Error> prefetch_error;                  // of the last prefetch read that failed
  int64_t shrinks = 0;  // calls of Pool::resize() after which fewer slots could be used,
  int64_t grows = 0;    // or more
  int64_t resets = 0;   // times that all counts but this one were set to zero
  int32_t slots = 0;    // at this moment
  int32_t kept = 0;     // experts that are never given up, at this moment

  PoolStats(int32_t layers, int32_t experts);
};

// The counts of all layers and phases together, at one moment.
struct PoolTotals {
  LayerStats counts;
  int64_t resets = 0;  // as in PoolStats
};

// One way in which an access ends, in the counts of layers and of experts.
struct AccessCount {
  int64_t LayerStats::*of_layer;
  int64_t ExpertStats::*of_expert;
};
inline constexpr AccessCount kHit{&LayerStats::hits, &ExpertStats::hits};
inline constexpr AccessCount kColdMiss{&LayerStats::cold_misses, &ExpertStats::cold_misses};
inline constexpr AccessCount kInflightMiss{&LayerStats::inflight_misses,
                                           &ExpertStats::inflight_misses};
inline constexpr AccessCount kDeferred{&LayerStats::deferred, &ExpertStats::deferred};

// The counts of a pool while it counts.
class Statistics {
 public:
  Statistics(int32_t layers, int32_t experts)
      : counts_(layers, experts), forwards_(static_cast<size_t>(layers)), experts_(experts) {}

  LayerStats& of(int32_t layer, Phase phase) {
    return counts_.layers[static_cast<size_t>(phase)][layer];
  }
  LayerStats& of_layer_of(ExpertId id, Phase phase) { return of(id / experts_, phase); }
  ExpertStats& of(ExpertId id) { return counts_.experts[id]; }
  // `kept`: the expert is never given up.
  void count(ExpertId id, Phase phase, AccessCount how, bool kept);
  void end_forward(int32_t layer, Phase phase) {
    ++of(layer, phase).forwards;
    ++forwards_[layer];
  }
  void keep_prefetch_error(const Error& error);
  // In place: who adds to a count holds on to it.
  void reset();

  PoolStats& counts() { return counts_; }
  const PoolStats& counts() const { return counts_; }
  std::vector<LayerStats> by_layer() const;  // over all phases
  PoolTotals totals() const;
  int64_t forwards(int32_t layer) const { return forwards_[layer]; }  // that ended; never reset

 private:
  PoolStats counts_;
  std::vector<int64_t> forwards_;
  int32_t experts_;  // per layer
  // Ready to be copied, which takes no memory.
  const Error no_memory_{ErrorKind::kMemory, "no memory to read an expert"};
};

}  // namespace torch_mesh
