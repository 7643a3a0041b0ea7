// What a pool counts. "Access" is one distinct expert of one forward of a layer: a hit, a cold
// miss, an in-flight miss, or deferred.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <optional>
#include <vector>

#include "base/error.h"

namespace torch_mesh {

// What a claim or a prefetch is for. kNone: neither, such as promote(), a backward, or a caller's
// own hint.
enum class Phase : uint8_t { kNone, kPrefill, kDecode };
inline constexpr size_t kPhases = 3;

// A forward of a layer with more rows than this is prefill. Generation of up to as many sequences
// at a time counts as decode, and so does a prompt as short as that: both choose few of the
// experts, and wait for each.
inline constexpr int64_t kMostDecodeRows = 16;

constexpr Phase phase_of(int64_t rows) {
  return rows > kMostDecodeRows ? Phase::kPrefill : Phase::kDecode;
}

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
  int64_t bytes_read = 0;         // of a mapped store those that were asked for, cached or not
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

// All counts at one moment.
struct PoolStats {
  std::array<std::vector<LayerStats>, kPhases> layers;  // by phase, by layer
  std::vector<ExpertStats> experts;                     // layer * experts + expert
  std::optional<Error> prefetch_error;                  // of the last prefetch read that failed
  int64_t shrinks = 0;  // calls of Pool::resize() after which fewer slots could be used,
  int64_t grows = 0;    // or more
  int32_t slots = 0;    // at this moment
  int32_t kept = 0;     // experts that are never given up, at this moment

  PoolStats(int32_t layers, int32_t experts);
};

}  // namespace torch_mesh
