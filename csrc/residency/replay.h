// Replays recorded routing through the live pool's own objects: its policies, its slot table and
// its order of calls, with a virtual clock in place of threads and a disk.
#pragma once

#include <cstdint>
#include <span>
#include <string>
#include <vector>

#include "residency/kept_options.h"

namespace torch_mesh {

// Spans are of whole arrays, the last index fastest.
struct RoutingTrace {
  int32_t tokens = 0;
  int32_t layers = 0;
  int32_t experts = 0;  // per layer
  int32_t top_k = 0;
  std::span<const int32_t> ids;        // [tokens][layers][top_k], distinct within a layer
  std::span<const float> scores;       // [tokens][layers][experts], router probabilities; or empty
  std::span<const float> lookahead;    // as scores: of `layer`, foretold one layer before; or empty
  std::span<const int64_t> sequences;  // first token of each, ascending; or empty: one sequence
};

struct ReplayOptions {
  std::string policy = "auto";  // or "belady": the bound, without prefetch only
  int32_t slots = 0;
  bool quotas = false;  // of the layers, see quotas.cpp
  // "off", a name of predictor_names(), "lookahead" (the trace's own), or "standin": a seeded one
  // that names each expert which will be used with probability `recall`, and others in its place.
  std::string predictor = "off";
  int32_t prefetch = 0;  // experts that are asked for ahead of each layer
  double recall = .75;
  uint64_t seed = 0;
  KeptOptions kept =
      {};  // as the pool's; a profile's experts have been read when the first token comes
  // Of the virtual clock; only ratios matter to the counts.
  double read_seconds = 1;   // for one expert; the disk reads one at a time, demand first
  double layer_seconds = 1;  // what a layer takes when nothing is cold
};

struct ReplayResult {
  std::vector<int64_t> hits;  // by token: experts that were READY when their layer began
  int64_t accesses = 0;
  int64_t inflight_misses = 0;
  int64_t cold_misses = 0;
  int64_t kept_accesses = 0;  // to experts that are never given up, see kept.h
  int64_t kept_hits = 0;
  int64_t prefetched = 0;  // prefetch reads begun, and those of them that a forward used
  int64_t prefetch_used = 0;
  int64_t predicted_right = 0;  // predicted experts that the layer used, resident or not
  double virtual_seconds = 0;
  double stalled_seconds = 0;
  double decision_seconds = 0;  // wall clock of the whole replay: policy, predictor, slot table
};

// Throws Error(kInvalid) for a trace or options that make no sense.
ReplayResult replay(const RoutingTrace& trace, const ReplayOptions& options);

}  // namespace torch_mesh
