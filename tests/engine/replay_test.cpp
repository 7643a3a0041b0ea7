// Replay: counts that can be worked out by hand, and laws that hold for any trace.
#include "residency/replay.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <numeric>
#include <random>
#include <string>
#include <vector>

#include "base/error.h"
#include "residency/policies/policy.h"
#include "residency/predictor.h"

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
  // One layer, experts 0 1 2 0 1 2 ... in two slots: lru never hits, the optimum every second time
  // after the start.
  Routing routing{12, 1, 3, 1, {}};
  for (int32_t token = 0; token < 12; ++token) routing.ids.push_back(token % 3);
  EXPECT_EQ(hits(replay(routing.trace(), {.policy = "lru", .slots = 2})), 0);
  EXPECT_EQ(hits(replay(routing.trace(), {.policy = "belady", .slots = 2})), 5);
  const ReplayResult all = replay(routing.trace(), {.policy = "lru", .slots = 3});
  EXPECT_EQ(hits(all), 9);
  EXPECT_EQ(all.cold_misses, 3);
}

TEST(Replay, NoPolicyBeatsTheBoundAndNothingIsLost) {
  const auto seed = std::random_device{}();
  SCOPED_TRACE("seed " + std::to_string(seed));
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
      for (const char* predictor : {"off", "previous", "coactivation", "standin"}) {
        options.predictor = predictor;
        options.prefetch = routing.top_k;
        const ReplayResult result = replay(routing.trace(), options);
        EXPECT_EQ(result.accesses, int64_t{60} * routing.layers * routing.top_k);
        EXPECT_EQ(hits(result) + result.inflight_misses + result.cold_misses, result.accesses);
        EXPECT_LE(result.prefetch_used, result.prefetched);
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
                                                       .predictor = "standin",
                                                       .prefetch = 2,
                                                       .recall = 1,
                                                       .read_seconds = .25,
                                                       .layer_seconds = 1});
  EXPECT_EQ(result.cold_misses, 2);
  EXPECT_EQ(result.inflight_misses, 0);
  EXPECT_EQ(result.prefetch_used, result.prefetched);
  EXPECT_EQ(result.predicted_right, result.accesses - 2);
  // The first two reads take half of the layer that waits for them.
  EXPECT_DOUBLE_EQ(result.virtual_seconds, 200.);
}

TEST(Replay, ASlowDiskIsWaitedForAndDemandGoesFirst) {
  // Two layers, disjoint experts on every token; the predictor is always wrong.
  Routing routing{4, 2, 8, 1, {0, 0, 1, 1, 2, 2, 3, 3}};
  ReplayOptions options{.policy = "lru", .slots = 4, .read_seconds = 3, .layer_seconds = 1};
  const double alone = replay(routing.trace(), options).virtual_seconds;
  EXPECT_DOUBLE_EQ(alone, 8 * 3.);
  options.predictor = "standin";
  options.recall = 0;
  options.prefetch = 4;
  const ReplayResult misled = replay(routing.trace(), options);
  EXPECT_EQ(misled.predicted_right, 0);
  // A prefetch under way is not interrupted, and no second one goes before a demand read.
  EXPECT_LE(misled.virtual_seconds, 8 * 6.);
}

TEST(Replay, WhatIsNotBegunWhenItsLayerBeginsIsNotRead) {
  // A layer is as long as one read, and seven wrong guesses follow each right one.
  const Routing routing{4, 2, 8, 1, {0, 0, 1, 1, 2, 2, 3, 3}};
  const ReplayResult result =
      replay(routing.trace(),
             {.policy = "lru", .slots = 16, .predictor = "standin", .prefetch = 8, .recall = 1});
  EXPECT_EQ(result.predicted_right, 7);
  EXPECT_GE(result.prefetch_used, 1);
  EXPECT_LE(result.prefetched + result.cold_misses, 8 + 1);
}

// Deferred reads of one layer may take every slot before the next one begins.
TEST(Replay, AForwardWaitsForSlotsThatAreReadIntoForOthers) {
  const Routing routing{1, 2, 8, 4, {0, 1, 2, 3, 4, 5, 6, 7}};
  const ReplayResult result =
      replay(routing.trace(), {.policy = "lru", .slots = 4, .deferred = 4, .layer_seconds = .1});
  EXPECT_EQ(result.deferred, 4);
  EXPECT_EQ(result.cold_misses, 4);
}

TEST(Replay, RefusesWhatMakesNoSense) {
  const Routing routing{1, 1, 4, 2, {1, 2}};
  EXPECT_THROW(replay(routing.trace(), {.slots = 1}), Error);
  EXPECT_THROW(replay(routing.trace(), {.slots = 5}), Error);
  EXPECT_THROW(replay(routing.trace(), {.policy = "mru", .slots = 2}), Error);
  EXPECT_THROW(replay(routing.trace(), {.slots = 2, .predictor = "oracle"}), Error);
  EXPECT_THROW(replay(routing.trace(), {.slots = 2, .predictor = "lookahead"}), Error);
  for (const std::vector<int32_t>& ids : {std::vector<int32_t>{1, 1}, {1, 4}, {-1, 2}, {1}}) {
    const Routing wrong{1, 1, 4, 2, ids};
    EXPECT_THROW(replay(wrong.trace(), {.slots = 2}), Error);
  }
}

TEST(Predictor, PreviousRanksByLastUse) {
  auto predictor = make_predictor("previous", 2, 8);
  std::vector<int32_t> out(3);
  EXPECT_EQ(predictor->predict(0, out), 0);
  predictor->observe(0, std::vector<int32_t>{4});
  predictor->observe(0, std::vector<int32_t>{6, 2});
  predictor->observe(1, std::vector<int32_t>{7});
  EXPECT_EQ(predictor->predict(0, out), 3);
  EXPECT_EQ(out, (std::vector<int32_t>{2, 6, 4}));
  predictor->reset();
  EXPECT_EQ(predictor->predict(0, out), 0);
}

TEST(Predictor, CoactivationCountsWhatFollowsALayer) {
  auto predictor = make_predictor("coactivation", 2, 8);
  std::vector<int32_t> out(2);
  for (int32_t follower : {5, 5, 3}) {
    predictor->observe(0, std::vector<int32_t>{1});
    predictor->observe(1, std::vector<int32_t>{follower});
  }
  predictor->reset();  // forgets where it was, not what it has learned
  EXPECT_EQ(predictor->predict(1, out), 0);
  predictor->observe(0, std::vector<int32_t>{1});
  EXPECT_EQ(predictor->predict(1, out), 2);
  EXPECT_EQ(out, (std::vector<int32_t>{5, 3}));
}

}  // namespace
}  // namespace torch_mesh
