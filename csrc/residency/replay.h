// Replays recorded routing: a virtual clock and a virtual disk drive the live pool's own core
// (core/core.h), which decides as in the live pool.
#pragma once

#include <algorithm>
#include <cstdint>
#include <span>
#include <string>
#include <vector>

#include "base/runtime.h"
#include "residency/core/soft_pins.h"
#include "residency/core/statistics.h"
#include "residency/core/warm_up.h"
#include "residency/core/window.h"

namespace torch_mesh {

// Spans are of whole arrays, the last index fastest.
struct RoutingTrace {
  static constexpr int32_t kOtherRank = -1;

  int32_t tokens = 0;
  int32_t layers = 0;
  int32_t experts = 0;  // per layer
  int32_t top_k = 0;
  // [tokens][layers][top_k], distinct within a layer. kOtherRank stands for an expert of another
  // rank, behind all those of this one.
  std::span<const int32_t> ids;
  std::span<const float>
      scores;  // [tokens][layers][experts], router probabilities, for deferral; or empty
  std::span<const float> lookahead;  // as scores: of `layer`, predicted one layer before; or empty
  std::span<const int64_t> sequences;  // first token of each, ascending; or empty: one sequence
  // First token of each forward, ascending from 0; or empty: each token is a decode step.
  std::span<const int64_t> forwards = {};

  int64_t forward_count() const {
    return forwards.empty() ? tokens : static_cast<int64_t>(forwards.size());
  }
  // The first token of a forward; of the one behind the last: the number of tokens.
  int64_t first_token(int64_t forward) const {
    if (forwards.empty()) return forward;
    return forward < std::ssize(forwards) ? forwards[forward] : tokens;
  }
  // The choices of a token, as the router lists them: row() with those of other ranks, chosen()
  // without.
  std::span<const int32_t> row(int64_t token, int32_t layer) const {
    return ids.subspan((token * layers + layer) * top_k, top_k);
  }
  std::span<const int32_t> chosen(int64_t token, int32_t layer) const {
    const std::span<const int32_t> all = row(token, layer);
    return all.first(std::ranges::find(all, kOtherRank) - all.begin());
  }
};

// The distinct experts of a layer in a forward, in the order in which a forward claims them: those
// of most tokens first. Of a trace that does not say what its forwards were, in the router's order.
std::vector<int32_t> experts_of(const RoutingTrace& trace, int64_t forward, int32_t layer);

struct ReplayOptions {
  std::string policy = "auto";  // or "belady": the bound, without prefetch only
  int32_t slots = 0;
  // "off", "lookahead" (the trace's own), or "simulated": a seeded one that names each expert which
  // will be used with probability `recall`, and others in place of the rest.
  std::string predictor = "off";
  int32_t prefetch = 0;  // experts that are asked for ahead of each layer of a decode step
  double recall = .75;
  uint64_t seed = 0;
  // As the pool's; a profile's experts have been read when the first token comes.
  WarmUpOptions warm_up = {};
  SoftPinOptions soft_pins = {};
  PrefillWindow prefill = PrefillWindow::kAuto;
  int32_t deferred = 0;  // cold experts of a token that are deferred by a layer, at most
  // Times of the virtual clock; only ratios matter to the counts.
  double read_seconds = 1;    // for one expert; the disk reads one at a time, in order of urgency
  double expert_seconds = 1;  // for computing one, however many tokens of the forward use it
  double rest_seconds = 0;    // of a layer, before its experts are known
  bool one_disk = false;      // that the ranks share; otherwise each has its own
};

struct ReplayResult {
  // By token, those of a forward at its first token: experts that were READY when their layer
  // began, and experts asked for.
  std::vector<int64_t> hits;
  std::vector<int64_t> accesses_of;
  std::vector<double> seconds_of;  // by token, those of a forward at its first
  LayerStats counts;               // of all layers and phases
  int64_t predicted_right = 0;     // predicted experts that the layer used, resident or not
  double virtual_seconds = 0;
  double stalled_seconds = 0;   // for reads
  double idle_seconds = 0;      // for other ranks, and for what they exchange
  double decision_seconds = 0;  // wall clock: the core and the predictor
};

// Throws Error(kInvalid) for a trace or options that make no sense, or Error(kInterrupted).
ReplayResult replay(const RoutingTrace& trace, const ReplayOptions& options,
                    const Runtime& runtime = {});

// Replays ranks that divide the experts, each with a pool of its own. `ranks` has the trace of
// each, all of the same forwards. After each layer they wait for the last one and then for the
// exchange of its outputs, while their disks go on. exchange_seconds: [forwards][layers].
std::vector<ReplayResult> replay_ranks(std::span<const RoutingTrace> ranks,
                                       const ReplayOptions& options,
                                       std::span<const double> exchange_seconds,
                                       const Runtime& runtime = {});

}  // namespace torch_mesh
