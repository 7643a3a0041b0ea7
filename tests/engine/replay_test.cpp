// Replay: counts computed by hand, and properties that hold for any trace.
#include "residency/replay.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <numeric>
#include <random>
#include <string>
#include <vector>

#include "base/error.h"
#include "error_of.h"
#include "residency/policies/policy.h"
#include "seed.h"

namespace torch_mesh {
namespace {

struct Routing {
  int32_t tokens, layers, experts, top_k;
  std::vector<int32_t> ids;

  RoutingTrace trace() const {
    RoutingTrace trace;
    trace.tokens = tokens;
    trace.layers = layers;
    trace.experts = experts;
    trace.top_k = top_k;
    trace.ids = ids;
    return trace;
  }
};

Routing random_routing(std::mt19937& random, int32_t tokens) {
  const auto between = [&](int32_t low, int32_t high) {
    return low + static_cast<int32_t>(random() % (high - low + 1));
  };
  Routing routing{tokens, between(1, 4), between(2, 12), 1, {}};
  routing.top_k = between(1, routing.experts);
  std::vector<int32_t> all(routing.experts);
  std::iota(all.begin(), all.end(), 0);
  for (int32_t step = 0; step < tokens * routing.layers; ++step) {
    std::shuffle(all.begin(), all.end(), random);
    routing.ids.insert(routing.ids.end(), all.begin(), all.begin() + routing.top_k);
  }
  return routing;
}

int64_t hits(const ReplayResult& result) {
  return std::accumulate(result.hits.begin(), result.hits.end(), int64_t{0});
}

TEST(Replay, CountsALoopThatLruMissesAndBeladyDoesNot) {
  // One layer, experts 0 1 2 0 1 2 ... in two slots: lru never hits; the optimum hits every second
  // time after the start.
  Routing routing{12, 1, 3, 1, {}};
  for (int32_t token = 0; token < 12; ++token) routing.ids.push_back(token % 3);
  EXPECT_EQ(hits(replay(routing.trace(), {.policy = "lru", .slots = 2})), 0);
  EXPECT_EQ(hits(replay(routing.trace(), {.policy = "belady", .slots = 2})), 5);
  const ReplayResult all = replay(routing.trace(), {.policy = "lru", .slots = 3});
  EXPECT_EQ(hits(all), 9);
  EXPECT_EQ(all.counts.cold_misses, 3);
}

TEST(Replay, CtrlCEndsIt) {
  Routing routing{12, 1, 3, 1, std::vector<int32_t>(12)};
  const Runtime interrupted{.interrupted = [] { return true; }};
  EXPECT_EQ(testing::error_of([&] { replay(routing.trace(), {.slots = 2}, interrupted); }).kind(),
            ErrorKind::kInterrupted);
}

TEST(Replay, NoPolicyBeatsTheBoundAndNothingIsLost) {
  const uint64_t seed = testing::fresh_seed();
  SCOPED_TRACE("TORCH_MESH_TEST_SEED=" + std::to_string(seed));
  std::mt19937 random(seed);
  for (int round = 0; round < 20; ++round) {
    const Routing routing = random_routing(random, 60);
    const int32_t all = routing.layers * routing.experts;
    const auto slots = static_cast<int32_t>(routing.top_k + random() % (all - routing.top_k + 1));
    const int64_t bound = hits(replay(routing.trace(), {.policy = "belady", .slots = slots}));
    for (std::string_view name : policy_names()) {
      SCOPED_TRACE(name);
      ReplayOptions options{.policy = std::string(name), .slots = slots};
      const ReplayResult plain = replay(routing.trace(), options);
      EXPECT_LE(hits(plain), bound);
      for (const char* predictor : {"off", "simulated"}) {
        options.predictor = predictor;
        options.prefetch = routing.top_k;
        const ReplayResult result = replay(routing.trace(), options);
        EXPECT_EQ(result.counts.accesses, int64_t{60} * routing.layers * routing.top_k);
        EXPECT_EQ(hits(result) + result.counts.inflight_misses + result.counts.cold_misses,
                  result.counts.accesses);
        EXPECT_LE(result.counts.prefetches_used, result.counts.prefetches);
        EXPECT_GE(result.stalled_seconds, -1e-9);
      }
    }
  }
}

TEST(Replay, APerfectPredictorOfAFastDiskHidesAllButTheFirstLayer) {
  std::mt19937 random(7);
  Routing routing{50, 4, 16, 2, {}};
  for (int32_t step = 0; step < 200; ++step) {
    const auto first = static_cast<int32_t>(random() % 16);
    routing.ids.insert(routing.ids.end(), {first, (first + 5) % 16});
  }
  const ReplayResult result = replay(routing.trace(), {.policy = "lru",
                                                       .slots = 16,
                                                       .predictor = "simulated",
                                                       .prefetch = 2,
                                                       .recall = 1,
                                                       .read_seconds = .25,
                                                       .expert_seconds = .5});
  EXPECT_EQ(result.counts.cold_misses, 2);
  EXPECT_EQ(result.counts.inflight_misses, 0);
  EXPECT_EQ(result.counts.prefetches_used, result.counts.prefetches);
  EXPECT_EQ(result.predicted_right, result.counts.accesses - 2);
  // The first two reads take half of the layer that waits for them.
  EXPECT_DOUBLE_EQ(result.virtual_seconds, 200.);
}

TEST(Replay, ASlowDiskIsWaitedForAndDemandGoesFirst) {
  // Two layers, disjoint experts on every token; the predictor is always wrong.
  Routing routing{4, 2, 8, 1, {0, 0, 1, 1, 2, 2, 3, 3}};
  ReplayOptions options{.policy = "lru", .slots = 4, .read_seconds = 3};
  const double alone = replay(routing.trace(), options).virtual_seconds;
  EXPECT_DOUBLE_EQ(alone, 8 * 3.);
  options.predictor = "simulated";
  options.recall = 0;
  options.prefetch = 4;
  const ReplayResult misled = replay(routing.trace(), options);
  EXPECT_EQ(misled.predicted_right, 0);
  // A prefetch in flight is not interrupted, and a second one goes behind demand reads.
  EXPECT_LE(misled.virtual_seconds, 8 * 6.);
}

TEST(Replay, PredictedReadsThatHaveNotBegunAreDroppedWhenTheirLayerBegins) {
  // A layer takes as long as one read, and seven wrong predictions follow each right one.
  const Routing routing{4, 2, 8, 1, {0, 0, 1, 1, 2, 2, 3, 3}};
  const ReplayResult result =
      replay(routing.trace(),
             {.policy = "lru", .slots = 16, .predictor = "simulated", .prefetch = 8, .recall = 1});
  EXPECT_EQ(result.predicted_right, 7);
  EXPECT_GE(result.counts.prefetches_used, 1);
  EXPECT_LE(result.counts.prefetches + result.counts.cold_misses, 8 + 1);
}

// Deferred reads of one layer may take every slot before the next layer begins.
TEST(Replay, AForwardWaitsForSlotsThatDeferredReadsOccupy) {
  const Routing routing{1, 2, 8, 4, {0, 1, 2, 3, 4, 5, 6, 7}};
  const ReplayResult result =
      replay(routing.trace(), {.policy = "lru", .slots = 4, .deferred = 4, .expert_seconds = .025});
  EXPECT_EQ(result.counts.deferred, 4);
  EXPECT_EQ(result.counts.cold_misses, 4);
}

TEST(Replay, RefusesInvalidOptions) {
  const Routing routing{1, 1, 4, 2, {1, 2}};
  EXPECT_THROW(replay(routing.trace(), {.slots = 1}), Error);
  EXPECT_THROW(replay(routing.trace(), {.slots = 5}), Error);
  EXPECT_THROW(replay(routing.trace(), {.policy = "mru", .slots = 2}), Error);
  EXPECT_THROW(replay(routing.trace(), {.slots = 2, .predictor = "oracle"}), Error);
  EXPECT_THROW(replay(routing.trace(), {.slots = 2, .predictor = "lookahead"}), Error);
  for (const std::vector<int32_t>& ids :
       {std::vector<int32_t>{1, 1}, {1, 4}, {-2, 2}, {-1, 2}, {1}}) {
    const Routing wrong{1, 1, 4, 2, ids};
    EXPECT_THROW(replay(wrong.trace(), {.slots = 2}), Error);
  }
}

// Splits `routing` among ranks that own equal numbers of consecutive experts.
std::vector<Routing> divided(const Routing& routing, int32_t ranks) {
  const int32_t own = routing.experts / ranks;
  std::vector<Routing> parts;
  for (int32_t rank = 0; rank < ranks; ++rank) {
    Routing part{routing.tokens, routing.layers, own, routing.top_k, {}};
    for (size_t first = 0; first < routing.ids.size(); first += routing.top_k) {
      for (int32_t i = 0; i < routing.top_k; ++i) {
        const int32_t id = routing.ids[first + i];
        if (id / own == rank) part.ids.push_back(id % own);
      }
      part.ids.resize(first + routing.top_k, RoutingTrace::kOtherRank);
    }
    parts.push_back(part);
  }
  return parts;
}

std::vector<ReplayResult> replay_parts(const std::vector<Routing>& parts,
                                       const ReplayOptions& options, double exchange,
                                       const std::vector<int64_t>& forwards = {}) {
  std::vector<RoutingTrace> traces;
  for (const Routing& part : parts) traces.push_back(part.trace());
  for (RoutingTrace& trace : traces) trace.forwards = forwards;
  const std::vector<double> seconds(traces[0].forward_count() * traces[0].layers, exchange);
  return replay_ranks(traces, options, seconds);
}

TEST(ReplayRanks, WaitForTheSlowestRankAndForTheExchange) {
  // Of two tokens the first needs two experts of rank 0, the second one of each rank.
  const Routing routing{2, 1, 4, 2, {0, 1, 0, 2}};
  const ReplayOptions options{.policy = "lru", .slots = 2, .read_seconds = 3, .rest_seconds = 5};
  const std::vector<ReplayResult> ranks = replay_parts(divided(routing, 2), options, 7);
  EXPECT_EQ(ranks[0].hits, (std::vector<int64_t>{0, 1}));
  EXPECT_EQ(ranks[0].accesses_of, (std::vector<int64_t>{2, 1}));
  EXPECT_EQ(ranks[1].accesses_of, (std::vector<int64_t>{0, 1}));
  // Each step: the rest of the model, rank 0's two reads or rank 1's one, then the exchange.
  for (const ReplayResult& rank : ranks) {
    EXPECT_EQ(rank.seconds_of, (std::vector<double>{5 + 6 + 7, 5 + 3 + 7}));
    EXPECT_DOUBLE_EQ(rank.virtual_seconds, 18 + 15);
  }
  EXPECT_DOUBLE_EQ(ranks[0].stalled_seconds, 6 - 2);
  EXPECT_DOUBLE_EQ(ranks[0].idle_seconds, 7 + 2 + 7);
  EXPECT_DOUBLE_EQ(ranks[1].stalled_seconds, 3 - 1);
  EXPECT_DOUBLE_EQ(ranks[1].idle_seconds, 6 + 7 + 7);
}

TEST(ReplayRanks, MayShareADisk) {
  // One read for each rank. A shared disk serves them one after the other.
  const Routing routing{1, 1, 4, 2, {0, 2}};
  ReplayOptions options{.policy = "lru", .slots = 2, .read_seconds = 3};
  EXPECT_DOUBLE_EQ(replay_parts(divided(routing, 2), options, 0)[0].virtual_seconds, 3);
  options.one_disk = true;
  EXPECT_DOUBLE_EQ(replay_parts(divided(routing, 2), options, 0)[0].virtual_seconds, 6);
}

TEST(ReplayRanks, DisksReadWhileTheirRankWaits) {
  // Rank 1 has no expert in layer 0, and its expert of layer 1 is predicted.
  const Routing routing{1, 2, 2, 1, {0, 1}};
  const ReplayOptions options{.policy = "lru",
                              .slots = 2,  // of which half may be read ahead

                              .predictor = "simulated",
                              .prefetch = 1,
                              .recall = 1,
                              .read_seconds = 3,
                              .expert_seconds = 1};
  const std::vector<ReplayResult> ranks = replay_parts(divided(routing, 2), options, 0);
  EXPECT_EQ(ranks[1].counts.cold_misses, 0);
  EXPECT_EQ(ranks[1].counts.prefetches_used, 1);
  EXPECT_DOUBLE_EQ(ranks[1].virtual_seconds, 3 + 1);
}

TEST(ReplayRanks, TogetherUseTheExpertsOfOneProcess) {
  const uint64_t seed = testing::fresh_seed();
  SCOPED_TRACE("TORCH_MESH_TEST_SEED=" + std::to_string(seed));
  std::mt19937 random(seed);
  for (int round = 0; round < 20; ++round) {
    Routing routing = random_routing(random, 60);
    const auto ranks = static_cast<int32_t>(1 + random() % 4);
    routing.experts *= ranks;
    for (int32_t& id : routing.ids) id = id * ranks + static_cast<int32_t>(random() % ranks);
    // Steps alone, and steps with prompts of 20 tokens among them.
    for (const std::vector<int64_t>& forwards :
         {std::vector<int64_t>{}, {0, 20, 21, 22, 23, 43, 44, 59}}) {
      RoutingTrace whole = routing.trace();
      whole.forwards = forwards;
      const std::vector<Routing> parts = divided(routing, ranks);
      const int32_t own = routing.experts / ranks, min_slots = std::min(own, routing.top_k);
      for (std::string_view policy : policy_names()) {
        SCOPED_TRACE(policy);
        ReplayOptions options{.policy = std::string(policy),
                              .slots = min_slots + static_cast<int32_t>(random() % 3)};
        options.slots = std::min(options.slots, own * routing.layers);
        const std::vector<ReplayResult> results = replay_parts(parts, options, .25, forwards);
        int64_t accesses = 0;
        for (const ReplayResult& result : results) {
          accesses += result.counts.accesses;
          EXPECT_EQ(hits(result) + result.counts.inflight_misses + result.counts.cold_misses,
                    result.counts.accesses);
          EXPECT_EQ(result.seconds_of, results[0].seconds_of);
          EXPECT_GE(result.stalled_seconds, -1e-9);
          EXPECT_NEAR(std::accumulate(result.seconds_of.begin(), result.seconds_of.end(), 0.),
                      result.virtual_seconds, 1e-6);
        }
        int64_t asked = 0;
        for (int64_t forward = 0; forward < whole.forward_count(); ++forward) {
          for (int32_t layer = 0; layer < whole.layers; ++layer) {
            asked += std::ssize(experts_of(whole, forward, layer));
          }
        }
        EXPECT_EQ(accesses, asked);
        if (ranks > 1) continue;
        EXPECT_EQ(hits(replay(whole, options)), hits(results[0]));
      }
    }
  }
}

TEST(ReplayRanks, RefuseInvalidOptions) {
  const Routing routing{1, 1, 4, 2, {0, 1}};
  std::vector<Routing> parts = divided(routing, 2);
  EXPECT_THROW(replay_parts(parts, {.slots = 2, .deferred = 1}, 0), Error);
  EXPECT_THROW(replay_parts(parts, {.slots = 2}, -1), Error);
  EXPECT_THROW(replay_ranks({}, {.slots = 2}, {}), Error);
  const std::vector<RoutingTrace> traces{parts[0].trace(), parts[1].trace()};
  EXPECT_THROW(replay_ranks(traces, {.slots = 2}, std::vector<double>(2)), Error);
  parts[1].tokens = 2;
  parts[1].ids.resize(4, RoutingTrace::kOtherRank);
  EXPECT_THROW(replay_parts(parts, {.slots = 2}, 0), Error);
}

}  // namespace
}  // namespace torch_mesh
