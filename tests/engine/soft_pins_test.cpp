// Profiles and soft-pinned experts.
#include "residency/core/soft_pins.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <atomic>
#include <numeric>
#include <random>
#include <string>
#include <thread>
#include <vector>

#include "base/error.h"
#include "profile_fixture.h"
#include "residency/replay.h"
#include "seed.h"

namespace torch_mesh {
namespace {

using namespace std::chrono_literals;
using Ids = std::vector<int32_t>;

using testing::falling;
using testing::forward;
using testing::message_of;
using testing::options_of;
using testing::resident;
using testing::TestStore;

TEST(ModelUse, CountsTokensOfPromptsAndForwardsOfDecode) {
  ModelUse use(2, 4);
  const Ids chosen{1, 3};
  use.count(1, chosen, {}, 0);
  const std::vector<int64_t> ids{1, 0, 1, 2, 4, -1};  // three tokens; the last has no valid expert
  use.count(1, Ids{0, 1, 2}, ids, 2);
  EXPECT_EQ(use.tokens, (std::vector<int64_t>{0, 4}));
  EXPECT_EQ(use.uses, (std::vector<int64_t>{0, 0, 0, 0, 1, 3, 1, 1}));
  EXPECT_EQ(use.rate(5), .75f);
  EXPECT_EQ(use.rate(1), 0.f);
  EXPECT_EQ(hottest(use), (Ids{5, 4, 6, 7}));
}

TEST(SoftPins, RefusesInvalidOptions) {
  EXPECT_EQ(message_of(SoftPinOptions{.early_layers = 1, .early_experts = 2}), "");
  EXPECT_NE(message_of(SoftPinOptions{.early_layers = -1}).find("0 or more"), -1ul);
}

// Under random changes of slots and soft pins no victim is soft-pinned, and invariants hold.
TEST(SoftPins, AreNeverVictimsOfAnyPolicy) {
  const uint64_t seed = testing::fresh_seed();
  SCOPED_TRACE("TORCH_MESH_TEST_SEED=" + std::to_string(seed));
  for (const std::string_view name : policy_names()) {
    SCOPED_TRACE(name);
    std::mt19937 random(seed);
    constexpr int32_t kLayers = 3, kExperts = 8, kSlots = 10;
    SlotTable slots(kLayers, kExperts, kSlots, make_policy(name, {kLayers, kExperts}));
    Ids held;
    for (int32_t step = 0; step < 2000; ++step) {
      const auto id = static_cast<ExpertId>(random() % (kLayers * kExperts));
      switch (random() % 4) {
        case 0:
          if (slots.early(id) || slots.slots_without_early() > kSlots / 2) {
            slots.soft_pin(id, SoftPin::kEarly, !slots.early(id));
          }
          break;
        case 1:
          if (held.empty()) break;
          slots.unpin(held.back());
          held.pop_back();
          break;
        default: {
          slots.policy().tick(id / kExperts, Ids{id % kExperts});
          int32_t slot = slots.find(id);
          if (slot < 0) {
            if (!slots.has_empty()) {
              const ExpertId victim = slots.victim();
              if (victim == kNoExpert) break;
              ASSERT_FALSE(slots.early(victim));
            }
            slot = slots.read(id, Urgency::kDemand, Phase::kNone);
            if (random() % 8 == 0) {
              slots.failed(slot, 0, Error(ErrorKind::kRead, "no such luck"));
              break;
            }
            slots.landed(slot, 0);
          }
          slots.pin_for_use(slot);
          held.push_back(slot);
          if (held.size() > 3) {
            slots.unpin(held.front());
            held.erase(held.begin());
          }
        }
      }
      slots.validate();
    }
  }
}

// Soft-pinned experts are evicted only for a claim that is stuck otherwise, pinned ones never.
TEST(SoftPins, AreEvictedOnlyForAClaimThatIsStuck) {
  for (const std::string_view name : policy_names()) {
    SCOPED_TRACE(name);
    SlotTable slots(1, 8, 3, make_policy(name, {1, 8}));
    for (ExpertId id : {0, 1, 2}) slots.landed(slots.read(id, Urgency::kDemand, Phase::kNone), 0);
    slots.soft_pin(0, SoftPin::kEarly, true);
    slots.pin(slots.find(2));
    slots.pin(slots.find(1));
    EXPECT_EQ(slots.read(3, Urgency::kPrefetch, Phase::kNone), -1);
    EXPECT_EQ(slots.read(3, Urgency::kDemand, Phase::kNone), -1);
    const int32_t slot = slots.read(3, Urgency::kDemand, Phase::kNone, /*stuck=*/true);
    ASSERT_GE(slot, 0);
    EXPECT_EQ(slots.find(0), -1);
    EXPECT_TRUE(slots.early(0)) << "and is soft-pinned again once it is back";
    slots.validate();
    EXPECT_EQ(slots.read(4, Urgency::kDemand, Phase::kNone, /*stuck=*/true), -1);
    slots.landed(slot, 0);
    slots.unpin(slots.find(1));
    slots.pin(slot);
    slots.soft_pin(1, SoftPin::kDeferred, true);
    EXPECT_GE(slots.read(4, Urgency::kDemand, Phase::kNone), 0) << "what is deferred goes sooner";
    EXPECT_EQ(slots.find(1), -1);
    slots.validate();
  }
}

TEST(SoftPins, TakeAtMostHalfOfASmallerPoolAndComeBack) {
  constexpr int32_t kSlots = 12;
  SlotTable slots(2, 8, kSlots, make_policy("lru", {2, 8}));
  SoftPins pins({.early_layers = 2, .early_experts = 3}, {.profile = falling(2, 8)}, slots);
  EXPECT_EQ(slots.slots_without_early(), 6);
  for (ExpertId id : {0, 8, 1, 9, 2, 10}) EXPECT_TRUE(slots.early(id)) << id;
  for (const auto& [limit, pinned] : {std::pair{12, 6}, {11, 4}, {4, 2}, {1, 0}, {12, 6}}) {
    slots.set_limit(limit);
    pins.resize();
    slots.validate();
    EXPECT_EQ(slots.slots_without_early(), limit - pinned);
    for (int32_t place = 0; place < 6; ++place) {
      EXPECT_EQ(slots.early(Ids{0, 8, 1, 9, 2, 10}[place]), place < pinned);
    }
  }
}

TEST(SoftPins, EarlyLayersKeepTheirMostUsedRecentExperts) {
  constexpr int32_t kSlots = 12;
  SlotTable slots(3, 8, kSlots, make_policy("heat", {3, 8}));
  SoftPins kept({.early_layers = 2, .early_experts = 2}, {}, slots);
  for (int32_t step = 0; step < 300; ++step) {
    kept.tick(0, Ids{step % 2 ? 5 : 3, 6}, {}, 0);
    kept.tick(1, Ids{1}, {}, 0);
    kept.tick(2, Ids{1}, {}, 0);
  }
  EXPECT_TRUE(slots.early(6));
  EXPECT_TRUE(slots.early(3) != slots.early(5));
  EXPECT_TRUE(slots.early(9));  // the second expert of layer 1 that was used does not exist
  EXPECT_EQ(kSlots - slots.slots_without_early(), 3);
  // A prompt is one forward, in which each expert counts by its fraction of the tokens.
  const std::vector<int64_t> ids{4, 7, 4, 8};
  for (int32_t step = 0; step < 300; ++step) kept.tick(0, Ids{4, 7}, ids, 1);
  EXPECT_TRUE(slots.early(4) && slots.early(7) && !slots.early(6));
  slots.set_limit(4);
  kept.resize();
  EXPECT_TRUE(slots.early(4) && !slots.early(7) && slots.early(9));
  slots.validate();
}

TEST(SoftPins, StayDuringForwardsAndResizes) {
  const uint64_t seed = testing::fresh_seed();
  SCOPED_TRACE("TORCH_MESH_TEST_SEED=" + std::to_string(seed));
  const TestStore store(3, 8);
  PoolOptions options =
      options_of(12, {.profile = falling(3, 8)}, {.early_layers = 2, .early_experts = 3});
  options.min_slots = 2;
  Pool pool(options, {}, store.source(), nullptr);
  pool.drain();
  std::atomic<bool> over = false;
  std::vector<std::thread> threads;
  for (uint32_t worker = 0; worker < 3; ++worker) {
    threads.emplace_back([&, worker] {
      std::mt19937 random(seed + worker);
      while (!over) {
        Ids experts(8);
        std::iota(experts.begin(), experts.end(), 0);
        std::shuffle(experts.begin(), experts.end(), random);
        experts.resize(1 + random() % 4);
        forward(pool, static_cast<int32_t>(random() % 3), experts, {.phase = Phase::kDecode});
      }
    });
  }
  std::mt19937 random(seed);
  for (int32_t round = 0; round < 30; ++round) {
    pool.resize(static_cast<int32_t>(2 + random() % 11));
    pool.validate();
    std::this_thread::sleep_for(1ms);
  }
  over = true;
  for (std::thread& thread : threads) thread.join();
  pool.resize(12);
  // Soft pins dropped when the pool shrank come back with use, and then stay.
  for (int32_t round = 0; round < 2; ++round) {
    for (int32_t layer = 0; layer < 3; ++layer) {
      for (int32_t expert = 0; expert < 8; ++expert) forward(pool, layer, {expert});
    }
    pool.validate();
    if (round == 0) pool.reset_stats();
  }
  LayerStats all;
  for (const LayerStats& layer : pool.stats()) all += layer;
  EXPECT_LE(all.early_hits, all.early_accesses);
  EXPECT_LE(all.early_accesses, 2 * 8);  // in the two early layers
  EXPECT_EQ(all.accesses, 24);
}

// Expert 0 is the model's most used, expert 1 the current text's. A prompt begins a sequence.
TEST(Sequence, APromptForgetsTheLastTextButNotTheModel) {
  const TestStore store(1, 4);
  for (bool prompt : {false, true}) {
    PoolOptions options = options_of(2, {});
    options.policy = "heat";
    Pool pool(options, {}, store.source(), nullptr);
    const ForwardPart decode{.phase = Phase::kDecode};
    for (int32_t step = 0; step < 200; ++step) forward(pool, 0, {0}, decode);
    for (int32_t step = 0; step < 60; ++step) forward(pool, 0, {1}, decode);
    const std::vector<int64_t> ids(20, 2);
    const ForwardPart prefill{.phase = Phase::kPrefill, .ids = ids, .top_k = 1};
    forward(pool, 0, {2}, prompt ? prefill : decode);
    EXPECT_EQ(resident(pool, 0), prompt ? (Ids{0, 2}) : (Ids{1, 2}));
    const ModelUse use = pool.model_use();
    EXPECT_EQ(use.tokens[0], prompt ? 280 : 261);
    EXPECT_EQ(use.uses, (std::vector<int64_t>{200, 60, prompt ? 20 : 1, 0}));
  }
}

TEST(Profile, SetsTheInitialOrderOfPolicies) {
  for (const char* name : {"heat", "lfu"}) {
    auto policy = make_policy(name, {2, 4});
    ModelUse use(2, 4);
    use.tokens = {1000, 1000};
    use.uses = {500, 100, 300, 400, 600, 50, 700, 20};
    policy->start_from(use);
    for (ExpertId id : {3, 5, 0, 7, 1, 6, 2, 4}) policy->admit(id);
    Ids order;
    for (ExpertId id = policy->victim(); id != kNoExpert; id = policy->victim()) {
      order.push_back(id);
      policy->remove(id);
    }
    EXPECT_EQ(order, (Ids{7, 5, 1, 2, 3, 0, 4, 6})) << name;
  }
}

TEST(Profile, ReplaySoftPinsAsThePoolDoes) {
  // Two layers. Every token uses expert 0 of each; the others alternate, and lru misses them.
  RoutingTrace trace;
  trace.tokens = 70, trace.layers = 2, trace.experts = 8, trace.top_k = 2;
  Ids ids;
  for (int32_t step = 0; step < trace.tokens * trace.layers; ++step) {
    ids.insert(ids.end(), {0, 1 + step / 2 % 7});
  }
  trace.ids = ids;
  ReplayOptions options{.policy = "lru", .slots = 4};
  const auto hits = [](const ReplayResult& result) {
    return std::accumulate(result.hits.begin(), result.hits.end(), int64_t{0});
  };
  const ReplayResult plain = replay(trace, options);
  EXPECT_EQ(plain.counts.early_accesses, 0);
  options.soft_pins = {.early_layers = 2, .early_experts = 1};
  const ReplayResult pinned = replay(trace, options);
  EXPECT_EQ(pinned.counts.early_accesses, 140);
  EXPECT_GE(pinned.counts.early_hits, 138);
  EXPECT_EQ(hits(pinned), pinned.counts.early_hits);
  EXPECT_GE(hits(pinned), hits(plain));
}

}  // namespace
}  // namespace torch_mesh
