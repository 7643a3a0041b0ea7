// Policies: known orders of victims, equality with a simple model, and properties of every
// policy.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <fstream>
#include <numeric>
#include <random>
#include <set>
#include <string>
#include <tuple>
#include <vector>

#include "base/error.h"
#include "residency/policies/policy.h"
#include "seed.h"

namespace torch_mesh {
namespace {

// A use of an expert by one claim, as the pool reports it.
void use(Policy& policy, ExpertId id) {
  if (!policy.resident(id)) policy.admit(id);
  policy.touch(id);
  policy.pin(id);
  policy.unpin(id);
}

std::vector<ExpertId> victims(Policy& policy) {
  std::vector<ExpertId> order;
  for (ExpertId id = policy.victim(); id != kNoExpert; id = policy.victim()) {
    order.push_back(id);
    policy.remove(id);
  }
  return order;
}

int64_t resident_pages() {
  std::ifstream file("/proc/self/statm");
  int64_t all = 0, resident = 0;
  file >> all >> resident;
  return resident;
}

TEST(Policy, HeatsTableTakesNoMemoryBeforeItLearns) {
#if defined(__SANITIZE_THREAD__) || defined(__SANITIZE_ADDRESS__)
  GTEST_SKIP() << "the sanitizer's own memory is counted too";
#endif
  const int64_t before = resident_pages();
  const auto policy = make_policy("heat", {48, 512});  // a table of 48 MiB
  EXPECT_LT(resident_pages() - before, 16 * 256);
}

TEST(Policy, LruEvictsTheLeastRecentlyUsed) {
  auto policy = make_policy("lru", {1, 8});
  for (ExpertId id : {3, 1, 4, 5, 3, 1}) use(*policy, id);
  EXPECT_EQ(victims(*policy), (std::vector<ExpertId>{4, 5, 3, 1}));
}

TEST(Policy, LfuEvictsTheColdestAndAmongEqualsTheOldest) {
  auto policy = make_policy("lfu", {1, 8});
  for (ExpertId id : {2, 2, 2, 5, 6, 7, 7}) use(*policy, id);
  EXPECT_EQ(victims(*policy), (std::vector<ExpertId>{5, 6, 7, 2}));
}

TEST(Policy, LfuHeatDecaysByThreePercentPerTick) {
  auto policy = make_policy("lfu", {1, 8});
  for (int use_count = 0; use_count < 2; ++use_count) use(*policy, 0);
  // Two uses are worth one after ln 2 / -ln 0.97 = 22.8 ticks.
  for (int tick = 0; tick < 22; ++tick) policy->tick(0, {});
  use(*policy, 1);
  EXPECT_EQ(policy->victim(), 1);
  policy->remove(1);
  policy = make_policy("lfu", {1, 8});
  for (int use_count = 0; use_count < 2; ++use_count) use(*policy, 0);
  for (int tick = 0; tick < 23; ++tick) policy->tick(0, {});
  use(*policy, 1);
  EXPECT_EQ(policy->victim(), 0);
}

TEST(Policy, LfuRemembersHeatBeyondEviction) {
  auto policy = make_policy("lfu", {1, 4});
  for (int use_count = 0; use_count < 5; ++use_count) use(*policy, 0);
  policy->remove(0);
  use(*policy, 1);
  use(*policy, 1);
  policy->admit(0);
  EXPECT_EQ(policy->victim(), 1);
}

TEST(Policy, LfuComparesLayersByTheirOwnClocks) {
  auto policy = make_policy("lfu", {2, 4});
  use(*policy, 0);
  for (int tick = 0; tick < 100; ++tick) policy->tick(0, {});
  use(*policy, 4);
  EXPECT_EQ(policy->victim(), 0);
  for (int tick = 0; tick < 200; ++tick) policy->tick(1, {});
  EXPECT_EQ(policy->victim(), 4);
}

TEST(Policy, LfuOrderSurvivesRescalingOfItsWeights) {
  auto policy = make_policy("lfu", {1, 4});
  constexpr int kTicks = 9105;  // the weight passes 2^400 after 9103
  for (int tick = 0; tick < kTicks - 20; ++tick) policy->tick(0, {});
  for (ExpertId id : {0, 1, 1, 2, 2, 2}) use(*policy, id);
  for (int tick = 0; tick < 40; ++tick) policy->tick(0, {});
  use(*policy, 0);
  // 1 has 2 * .97^40 = .59, 2 has .89, 0 has 1.30.
  EXPECT_EQ(victims(*policy), (std::vector<ExpertId>{1, 2, 0}));
}

TEST(Policy, HeatKeepsExpertsOfTheNextLayerLongest) {
  auto policy = make_policy("heat", {3, 2});
  for (int32_t layer : {0, 1, 2, 0}) {
    policy->tick(layer, std::vector<int32_t>{0});
    if (!policy->resident(layer * 2)) use(*policy, layer * 2);
  }
  // All three were used by every forward; layer 0 has just run, layer 1 is next.
  EXPECT_EQ(policy->victim(), 4);
}

TEST(Policy, HeatEvictsTheLeastUsed) {
  auto policy = make_policy("heat", {1, 4});
  for (ExpertId id : {0, 1, 2}) use(*policy, id);
  for (int step = 0; step < 40; ++step) {
    policy->tick(0, step % 4 == 0 ? std::vector<int32_t>{0, 1} : std::vector<int32_t>{0});
  }
  EXPECT_EQ(victims(*policy), (std::vector<ExpertId>{2, 1, 0}));
}

TEST(Policy, HeatLearnsWhichExpertFollowsWhich) {
  // 0 and 1 alternate, so that 1 is expected after 0 and vice versa. 2 is not used again.
  auto policy = make_policy("heat", {1, 3});
  for (ExpertId id : {0, 1, 2}) use(*policy, id);
  for (int step = 0; step < 4000; ++step) policy->tick(0, std::vector<int32_t>{step % 2});
  EXPECT_EQ(policy->victim(), 2);
  policy->tick(0, std::vector<int32_t>{0});
  policy->remove(2);
  EXPECT_EQ(policy->victim(), 0);
  policy->tick(0, std::vector<int32_t>{1});
  EXPECT_EQ(policy->victim(), 1);
}

TEST(Policy, HeatTreatsAPromptAsItsTokensOneByOne) {
  constexpr int32_t kExperts = 12;
  auto prompted = make_policy("heat", {2, kExperts}), decoded = make_policy("heat", {2, kExperts});
  std::mt19937_64 random(5);
  std::vector<int64_t> ids;
  for (int32_t token = 0; token < 30; ++token) {
    const auto id = static_cast<int32_t>(std::min(random() % 12, random() % 12));
    const std::vector<int32_t> chosen{id, (id + 1) % kExperts};
    decoded->tick(1, chosen);
    ids.insert(ids.end(), {chosen[0], kExperts, chosen[1]});  // a sentinel between them
  }
  std::vector<int32_t> all(kExperts);
  std::iota(all.begin(), all.end(), 0);
  prompted->tick_prompt(1, all, ids, 3);
  for (ExpertId id = 0; id < 2 * kExperts; ++id) {
    prompted->admit(id);
    decoded->admit(id);
  }
  const std::vector<ExpertId> order = victims(*prompted);
  EXPECT_EQ(order, victims(*decoded));
  // One use of each would have left them in numerical order.
  EXPECT_FALSE(std::is_sorted(order.begin(), order.end()));
}

// The first part of a long prompt is processed in one pass, which must give the same means.
TEST(Policy, HeatTreatsALongPromptNearlyAsItsTokensOneByOne) {
  constexpr int32_t kExperts = 24, kTokens = 512;
  const auto prompted = make_policy("heat", {1, kExperts}),
             decoded = make_policy("heat", {1, kExperts});
  // Uses become rarer from expert to expert. The second half of the prompt uses other experts.
  std::mt19937_64 random(11);
  std::vector<int64_t> ids;
  for (int32_t token = 0; token < kTokens; ++token) {
    const auto rare = [&] { return std::min({random() % 24, random() % 24, random() % 24}); };
    const auto first = static_cast<int32_t>(token < kTokens / 2 ? rare() : 23 - rare());
    ids.insert(ids.end(), {first, (first + 7) % kExperts});
  }
  std::vector<int32_t> all(kExperts);
  std::iota(all.begin(), all.end(), 0);
  for (int32_t token = 0; token < kTokens; ++token) {
    decoded->tick(0, std::vector<int32_t>{static_cast<int32_t>(ids[2 * token]),
                                          static_cast<int32_t>(ids[2 * token + 1])});
  }
  prompted->tick_prompt(0, all, ids, 2);
  for (ExpertId id = 0; id < kExperts; ++id) {
    prompted->admit(id);
    decoded->admit(id);
  }
  const std::vector<ExpertId> order = victims(*prompted), expected = victims(*decoded);
  for (ExpertId id = 0; id < kExperts; ++id) {
    const auto place = std::find(order.begin(), order.end(), id) - order.begin();
    const auto wanted = std::find(expected.begin(), expected.end(), id) - expected.begin();
    EXPECT_LE(std::abs(place - wanted), 3) << "expert " << id;
  }
}

TEST(Policy, PolicyNamesAreAcceptedByMakePolicy) {
  for (std::string_view name : policy_names()) {
    const auto policy = make_policy(name, {1, 4});
    EXPECT_EQ(resolve_policy(name), name == "auto" ? "heat" : name);
  }
  try {
    make_policy("mru", {1, 4});
    FAIL() << "an unknown policy was accepted";
  } catch (const Error& error) {
    EXPECT_EQ(error.kind(), ErrorKind::kInvalid);
    for (std::string_view name : policy_names()) {
      EXPECT_NE(std::string(error.what()).find(name), std::string::npos) << error.what();
    }
  }
  EXPECT_THROW(make_policy("lru", {0, 4}), Error);
}

// The definition of each policy, implemented without its data structures.
class Model {
 public:
  Model(std::string policy, int32_t layers, int32_t experts)
      : policy_(std::move(policy)), experts_(experts), items_(layers * experts) {}

  struct Item {
    bool resident = false, pinned = false;
    int64_t recency = 0;
    int64_t use_clock = 0;  // of the last use, for lfu
    double heat = 0;
  };

  void admit(ExpertId id) {
    items_[id].resident = true;
    items_[id].recency = items_[id].use_clock = ++clock_;
  }
  void remove(ExpertId id) { items_[id].resident = false; }
  void touch(ExpertId id) {
    Item& item = items_[id];
    item.heat += 1;
    item.use_clock = ++clock_;
    if (!item.pinned) item.recency = clock_;
  }
  void pin(ExpertId id) { items_[id].pinned = true; }
  void unpin(ExpertId id) {
    items_[id].pinned = false;
    items_[id].recency = ++clock_;
  }
  void tick(int32_t layer) {
    for (int32_t e = 0; e < experts_; ++e) items_[layer * experts_ + e].heat *= 0.97;
  }

  // The permitted victims: one expert, or for lfu all of equal heat within rounding.
  std::set<ExpertId> victims() const {
    std::set<ExpertId> best;
    for (ExpertId id = 0; id < static_cast<ExpertId>(items_.size()); ++id) {
      if (!items_[id].resident || items_[id].pinned) continue;
      if (best.empty() || key(id) < key(*best.begin())) best = {id};
    }
    if (policy_ != "lfu" || best.empty()) return best;
    const double heat = items_[*best.begin()].heat;
    for (ExpertId id = 0; id < static_cast<ExpertId>(items_.size()); ++id) {
      const Item& item = items_[id];
      const bool tied = std::abs(item.heat - heat) <= 1e-9 * (1 + heat);
      if (item.resident && !item.pinned && tied) best.insert(id);
    }
    return best;
  }
  const Item& operator[](ExpertId id) const { return items_[id]; }

 private:
  std::tuple<double, int64_t> key(ExpertId id) const {
    const Item& item = items_[id];
    if (policy_ == "lru") return {0, item.recency};
    return {item.heat, item.use_clock};
  }

  std::string policy_;
  int32_t experts_;
  std::vector<Item> items_;
  int64_t clock_ = 0;
};

class PolicyModel : public ::testing::TestWithParam<std::string> {};

TEST_P(PolicyModel, EqualsTheModelUnderRandomOperations) {
  const uint64_t seed = testing::fresh_seed();
  SCOPED_TRACE("TORCH_MESH_TEST_SEED=" + std::to_string(seed));
  std::mt19937 random(seed);
  const auto below = [&](int32_t n) { return static_cast<int32_t>(random() % n); };
  for (int round = 0; round < 10; ++round) {
    const int32_t layers = 1 + below(4), experts = 2 + below(10),
                  slots = 1 + below(layers * experts);
    auto policy = make_policy(GetParam(), {layers, experts});
    Model model(GetParam(), layers, experts);
    int32_t resident = 0;
    for (int step = 0; step < 1500; ++step) {
      const ExpertId id = below(layers * experts);
      const int32_t layer = id / experts;
      switch (below(5)) {
        case 0:
          policy->tick(layer, {}), model.tick(layer);
          break;
        case 1:
          if (model[id].pinned) policy->unpin(id), model.unpin(id);
          break;
        default:
          if (!model[id].resident) {
            if (resident == slots) {
              const ExpertId victim = policy->victim();
              if (victim == kNoExpert) break;
              policy->remove(victim), model.remove(victim), --resident;
            }
            policy->admit(id), model.admit(id), ++resident;
          }
          if (below(5) == 0) break;  // a prefetch that is not used yet
          policy->touch(id), model.touch(id);
          if (!model[id].pinned) policy->pin(id), model.pin(id);
      }
      const std::set<ExpertId> allowed = model.victims();
      const ExpertId victim = policy->victim();
      if (allowed.empty()) {
        ASSERT_EQ(victim, kNoExpert);
      } else {
        ASSERT_TRUE(allowed.contains(victim)) << victim << " instead of " << *allowed.begin();
      }
      ASSERT_EQ(policy->resident(id), model[id].resident);
      ASSERT_EQ(policy->pinned(id), model[id].resident && model[id].pinned);
    }
  }
}

INSTANTIATE_TEST_SUITE_P(All, PolicyModel, ::testing::Values("lru", "lfu"),
                         [](const auto& info) { return info.param; });

// Properties of every policy.
class EveryPolicy : public ::testing::TestWithParam<std::string> {};

TEST_P(EveryPolicy, EvictsOnlyResidentUnpinnedExperts) {
  const uint64_t seed = testing::fresh_seed();
  SCOPED_TRACE("TORCH_MESH_TEST_SEED=" + std::to_string(seed));
  std::mt19937 random(seed);
  const auto below = [&](int32_t n) { return static_cast<int32_t>(random() % n); };
  for (int round = 0; round < 20; ++round) {
    const int32_t layers = 1 + below(4), experts = 2 + below(40),
                  slots = 1 + below(layers * experts);
    auto policy = make_policy(GetParam(), {layers, experts});
    std::set<ExpertId> resident, pinned;
    for (int step = 0; step < 1500; ++step) {
      const ExpertId id = below(layers * experts);
      switch (below(6)) {
        case 0: {
          std::vector<int32_t> wanted;
          for (int32_t expert = 0; expert < experts; ++expert) {
            if (below(4) == 0) wanted.push_back(expert);
          }
          policy->tick(id / experts, wanted);
          break;
        }
        case 1:
          if (pinned.erase(id) > 0) policy->unpin(id);
          break;
        case 2:
          if (resident.contains(id) && !pinned.contains(id)) {
            policy->remove(id), resident.erase(id);
          }
          break;
        default:
          if (!resident.contains(id)) {
            if (static_cast<int32_t>(resident.size()) == slots) {
              const ExpertId victim = policy->victim();
              if (victim == kNoExpert) break;
              policy->remove(victim), resident.erase(victim);
            }
            policy->admit(id), resident.insert(id);
          }
          if (below(5) == 0) break;  // a prefetch that is not used yet
          policy->touch(id);
          if (below(2) == 0 && pinned.insert(id).second) policy->pin(id);
      }
      const ExpertId victim = policy->victim();
      if (resident.size() == pinned.size()) {
        ASSERT_EQ(victim, kNoExpert);
      } else {
        ASSERT_TRUE(resident.contains(victim) && !pinned.contains(victim)) << victim;
      }
      ASSERT_EQ(policy->victim(), victim) << "asking twice changed the answer";
      ASSERT_EQ(policy->resident(id), resident.contains(id));
      ASSERT_EQ(policy->pinned(id), pinned.contains(id));
    }
    ASSERT_EQ(victims(*policy).size(), resident.size() - pinned.size());
  }
}

INSTANTIATE_TEST_SUITE_P(All, EveryPolicy, ::testing::Values("lru", "lfu", "heat"),
                         [](const auto& info) { return "p" + info.param; });

}  // namespace
}  // namespace torch_mesh
