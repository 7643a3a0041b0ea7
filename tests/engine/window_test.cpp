// The window through which prompts stream their experts: its reads, their timing and what stays.
#include <gtest/gtest.h>

#include <algorithm>
#include <array>
#include <random>
#include <vector>

#include "pool_fixture.h"
#include "seed.h"

namespace torch_mesh {
namespace {

using namespace std::chrono_literals;

using testing::all_of;
using testing::kRecord;
using testing::state_of;
using testing::TestStore;

PoolOptions options_of(int32_t slots) {
  PoolOptions options = testing::options_of(slots);
  options.policy = "auto";
  return options;
}

// A layer of a prompt. Every token chooses two of the first `hot` experts, and a cold one while
// some have not been chosen yet.
struct Prompt {
  int32_t experts, hot;
  std::vector<int64_t> ids;
  std::vector<int32_t> by_rows;  // in the engine's order

  Prompt(int32_t experts, int32_t hot, int32_t tokens) : experts(experts), hot(hot) {
    std::vector<int32_t> rows(experts);
    for (int32_t token = 0; token < tokens; ++token) {
      const int32_t cold = hot + token % (experts - hot);
      for (const int32_t id : {token % hot, (token + 1) % hot, cold}) {
        // Each cold expert is chosen once; later tokens have a sentinel instead.
        const bool over = id == cold && token >= experts - hot;
        ids.push_back(over ? experts : id);
        if (!over) ++rows[id];
      }
    }
    by_rows = all_of(experts);
    std::stable_sort(by_rows.begin(), by_rows.end(),
                     [&](int32_t a, int32_t b) { return rows[a] > rows[b]; });
  }

  ForwardPart part() const {
    return {.phase = Phase::kPrefill, .ids = ids, .top_k = 3, .streams = true};
  }
};

void forward(Pool& pool, int32_t layer, const std::vector<int32_t>& experts,
             const ForwardPart& part) {
  testing::forward(pool, layer, experts, part, 16, [&] { pool.validate(); });
}

int32_t present(const Pool& pool, int32_t layer, int32_t begin, int32_t end) {
  int32_t count = 0;
  for (int32_t expert = begin; expert < end; ++expert) {
    count += state_of(pool, layer, expert) != SlotState::kEmpty;
  }
  return count;
}

TEST(Window, ReadsTheNextLayerIntoSlotsThatThisLayerHasReleased) {
  const TestStore store(4, 40);
  Pool pool(options_of(40), {}, store.source(), nullptr);
  const std::vector<int32_t> all = all_of(40);
  std::vector<Claim::Entry> entries(all.size());
  std::array<ReadyExpert, 10> ready;
  Claim claim(pool, 0, all, entries, {.phase = Phase::kPrefill, .streams = true});
  pool.drain();  // so that each batch is full
  for (int32_t batch = 0; batch < 3; ++batch) {
    ASSERT_EQ(claim.next(ready), 10);
    EXPECT_EQ(present(pool, 1, 0, 40), 0);
    claim.release(ready);
  }
  // Half of the pool is the next layer's window. This layer still uses ten of those slots.
  ASSERT_EQ(claim.next(ready), 10);
  EXPECT_EQ(present(pool, 1, 0, 40), 10);
  pool.validate();
  claim.release(ready);
  EXPECT_EQ(present(pool, 1, 0, 40), 20);
  EXPECT_EQ(present(pool, 0, 0, 40), 20);
  pool.drain();
  pool.validate();
}

TEST(Window, ReadsNothingAheadBeforeTheLastChunkOrUnlessStreaming) {
  const TestStore store(2, 8);
  for (const ForwardPart& part :
       {ForwardPart{.phase = Phase::kPrefill, .last = false, .streams = true},
        ForwardPart{.phase = Phase::kPrefill}}) {
    Pool pool(options_of(10), {}, store.source(), nullptr);
    forward(pool, 0, all_of(8), part);
    EXPECT_EQ(present(pool, 0, 0, 8), 8);
    EXPECT_EQ(present(pool, 1, 0, 8), 0);
  }
}

TEST(Window, ReadsEachExpertOnceAndEvictsNoneUnused) {
  constexpr int32_t kLayers = 4, kExperts = 64;
  const TestStore store(kLayers, kExperts);
  for (const char* policy : {"auto", "lru", "lfu"}) {
    for (const int32_t slots : {1, 2, 9, 64, 100}) {
      PoolOptions options = options_of(slots);
      options.policy = policy;
      options.reader.interpose =
          with_faults({.seed = testing::seed(), .delay = .2, .reorder = .2, .max_delay = 200us});
      Pool pool(options, {}, store.source(), nullptr);
      for (int32_t round = 1; round <= 2; ++round) {
        for (int32_t layer = 0; layer < kLayers; ++layer) {
          const Prompt prompt(kExperts, 16, 200);
          forward(pool, layer, prompt.by_rows, prompt.part());
        }
        const PoolStats stats = pool.detailed_stats();
        for (const ExpertStats& expert : stats.experts) {
          ASSERT_LE(expert.promoted, round) << policy << ", " << slots << " slots";
        }
        for (const LayerStats& layer : pool.stats()) {
          EXPECT_EQ(layer.prefetches_used, layer.prefetches);
          EXPECT_EQ(layer.prefetches_unused, 0);
        }
      }
      EXPECT_EQ(pool.pinned(), 0);
    }
  }
}

TEST(Window, KeepsThePromptsMostUsedExpertsOfEveryLayer) {
  constexpr int32_t kLayers = 4, kExperts = 64, kHot = 16;
  const TestStore store(kLayers, kExperts);
  const Prompt prompt(kExperts, kHot, 200);
  const auto hot_after = [&](bool window) {
    Pool pool(options_of(kLayers * kHot), {}, store.source(), nullptr);
    ForwardPart part = prompt.part();
    part.streams = window;
    for (int32_t layer = 0; layer < kLayers; ++layer) forward(pool, layer, prompt.by_rows, part);
    int32_t hot = 0;
    for (int32_t layer = 0; layer < kLayers; ++layer) hot += present(pool, layer, 0, kHot);
    return hot;
  };
  EXPECT_GE(hot_after(true), kLayers * kHot * 9 / 10);
  EXPECT_LE(hot_after(false), 2 * kHot);  // the last layer used all slots
}

// The hit rate, once the pool is full, of forwards that use `used` random experts of each layer.
double hits_of_steps(int32_t used, ForwardPart part) {
  constexpr int32_t kLayers = 4, kExperts = 128, kRounds = 40;
  const TestStore store(kLayers, kExperts);
  Pool pool(options_of(kLayers * kExperts / 2), {}, store.source(), nullptr);
  std::mt19937 random(testing::seed());
  int64_t hits = 0, all = 0;
  for (int32_t round = 0; round < kRounds; ++round) {
    if (round == kRounds / 2) pool.reset_stats();
    for (int32_t layer = 0; layer < kLayers; ++layer) {
      std::vector<int32_t> experts = all_of(kExperts);
      std::ranges::shuffle(experts, random);
      experts.resize(used);
      const std::vector<int64_t> ids(experts.begin(), experts.end());
      if (part.phase == Phase::kPrefill) part.ids = ids, part.top_k = 1;
      forward(pool, layer, experts, part);
    }
  }
  for (const LayerStats& layer : pool.stats()) hits += layer.hits, all += layer.accesses;
  return static_cast<double>(hits) / static_cast<double>(all);
}

// Half of the experts have slots, of which at most sixteen are used for streaming.
TEST(Window, StepsOfManySequencesKeepResidentExperts) {
  const ForwardPart decode{.phase = Phase::kDecode, .rows = 12, .streams = true};
  const ForwardPart many{.phase = Phase::kPrefill, .rows = 24, .streams = true};
  EXPECT_GE(hits_of_steps(96, decode), .45);
  EXPECT_GE(hits_of_steps(96, many), .45);
  EXPECT_LE(hits_of_steps(96, {.phase = Phase::kDecode}), .43);  // misses may take any slot
}

TEST(Window, AFailedReadAheadDoesNotFailAForwardThatDoesNotNeedIt) {
  const TestStore store(2, 40);
  PoolOptions options = options_of(40);
  options.reader.retries = 0;
  Pool pool(options, {}, store.source(), nullptr);
  store.truncate(40 * kRecord);  // the second layer is gone
  forward(pool, 0, all_of(40), {.phase = Phase::kPrefill, .streams = true});
  pool.drain();
  EXPECT_TRUE(pool.detailed_stats().prefetch_error.has_value());
  EXPECT_EQ(present(pool, 1, 0, 40), 0);
  pool.validate();
}

}  // namespace
}  // namespace torch_mesh
