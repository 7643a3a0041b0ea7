// The counts of a pool. An "access" is one distinct expert of one forward of a layer: a hit, a cold
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
#include "store/source.h"

namespace torch_mesh {

// Counts of one layer in one phase since the pool was opened or its counts were reset. A read is
// counted in the phase that queued it, an eviction in the phase that needed the slot, both at the
// expert's own layer. All code that sums, shows or copies counts goes through these lists.
#define TORCH_MESH_LAYER_COUNTS(X)                                                                \
  X(forwards)       /* that ended, in an error too */                                             \
  X(rerouted)       /* choices of tokens that went to a resident expert; no accesses */           \
  X(early_accesses) /* of the accesses: to early experts, see soft_pins.h */                      \
  X(early_hits)                                                                                   \
  X(bytes_read)            /* from the disk or the page cache */                                  \
  X(prefetches_used)       /* of the prefetches: a forward came for the expert */                 \
  X(prefetches_unused)     /* of the prefetches: evicted, or failed, before any forward came */   \
  X(unused_prefetch_bytes) /* read by those */                                                    \
  X(prefetches_failed)     /* prefetch reads that ended in an error */                            \
  X(failed)                /* reads that ended in an error and were not begun anew */             \
  X(second_reads)          /* of a record, after one with a wrong checksum */                     \
  X(stall_nanoseconds)     /* forwards that had nothing to compute and waited */                  \
  X(prefetch_stall_nanoseconds) /* of these: only for reads that were begun as prefetches */      \
  X(decision_nanoseconds)       /* under the lock: choosing slots, queueing reads, handing out */ \
  X(expert_nanoseconds)  /* forwards, from their claim to their last product: all the above */    \
  X(outside_nanoseconds) /* since the thread's last forward of this model, see claim.cpp */

// Counts of one layer, and of one expert over all phases.
#define TORCH_MESH_COMMON_COUNTS(X)                                                \
  X(accesses)                                                                      \
  X(hits)            /* was READY */                                               \
  X(cold_misses)     /* had to be read */                                          \
  X(inflight_misses) /* was being read: a prefetch, or another forward's demand */ \
  X(deferred)        /* was not READY, and is used one layer later */              \
  X(promoted)        /* reads that became READY */                                 \
  X(evicted)                                                                       \
  X(prefetches) /* prefetch reads queued */

#define TORCH_MESH_DEFINE(name) int64_t name = 0;
struct ExpertStats {
  TORCH_MESH_COMMON_COUNTS(TORCH_MESH_DEFINE)
};
struct LayerStats : ExpertStats {
  TORCH_MESH_LAYER_COUNTS(TORCH_MESH_DEFINE)

  LayerStats& operator+=(const LayerStats& other);
};
#undef TORCH_MESH_DEFINE

#define TORCH_MESH_NAME(name) {#name, &LayerStats::name},
inline constexpr std::pair<const char*, int64_t LayerStats::*> kLayerCounts[] = {
    TORCH_MESH_LAYER_COUNTS(TORCH_MESH_NAME) TORCH_MESH_COMMON_COUNTS(TORCH_MESH_NAME)};
inline constexpr std::pair<const char*, int64_t ExpertStats::*> kExpertCounts[] = {
    TORCH_MESH_COMMON_COUNTS(TORCH_MESH_NAME)};
#undef TORCH_MESH_NAME

// All counts at one moment.
struct PoolStats {
  std::array<std::vector<LayerStats>, kPhases> layers;  // by phase, by layer
  std::vector<ExpertStats> experts;                     // layer * experts + expert
  std::optional<Error> prefetch_error;                  // of the last prefetch read that failed
  int64_t shrinks = 0;  // calls of Pool::resize() after which fewer slots could be used,
  int64_t grows = 0;    // or more
  int64_t resets = 0;   // times that all counts but this one were set to zero
  int32_t slots = 0;    // at this moment
  int32_t early = 0;    // soft-pinned early experts, at this moment

  PoolStats(int32_t layers, int32_t experts);
};

// The counts of all layers and phases together, at one moment.
struct PoolTotals {
  LayerStats counts;
  int64_t resets = 0;  // as in PoolStats
};

// A count of layers and of experts.
using CommonCount = int64_t ExpertStats::*;

// Counts the events of a pool.
class Statistics {
 public:
  Statistics(int32_t layers, int32_t experts)
      : counts_(layers, experts), forwards_(static_cast<size_t>(layers)), experts_(experts) {}

  LayerStats& of(int32_t layer, Phase phase) {
    return counts_.layers[static_cast<size_t>(phase)][layer];
  }
  LayerStats& of_layer_of(ExpertId id, Phase phase) { return of(id / experts_, phase); }
  void count(ExpertId id, Phase phase, CommonCount what);
  // Counts an access that ends in `how`. `early`: of an early expert, which is soft-pinned.
  void count_access(ExpertId id, Phase phase, CommonCount how, bool early);
  void end_forward(int32_t layer, Phase phase) {
    ++of(layer, phase).forwards;
    ++forwards_[layer];
  }
  void keep_prefetch_error(const Error& error);
  // Sets the counts to zero in place: callers keep references to them.
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
};

}  // namespace torch_mesh
