// Reads of a pool before any forward asks for the experts.
#include "residency/core/warm_up.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <chrono>
#include <thread>
#include <vector>

#include "base/error.h"
#include "profile_fixture.h"
#include "testing/faults.h"

namespace torch_mesh {
namespace {

using namespace std::chrono_literals;
using Ids = std::vector<int32_t>;

using testing::falling;
using testing::forward;
using testing::kRecord;
using testing::message_of;
using testing::options_of;
using testing::resident;
using testing::TestStore;

TEST(WarmUp, RefusesInvalidOptions) {
  EXPECT_EQ(message_of(WarmUpOptions{.profile = falling(2, 4)}, 2, 4), "");
  EXPECT_NE(message_of(WarmUpOptions{.profile = falling(2, 5)}, 2, 4).find("2 layers of 4"), -1ul);
  WarmUpOptions odd{.profile = falling(2, 4)};
  odd.profile.uses[6] = 101;
  EXPECT_NE(message_of(odd, 2, 4).find("expert 2 by 100 tokens of layer 1"), -1ul);
  odd.profile.uses[6] = -1;
  EXPECT_NE(message_of(odd, 2, 4).find("-1 uses"), -1ul);
  EXPECT_NE(message_of(WarmUpOptions{.on_gpu = {true}}, 2, 4).find("1 entries for 8 experts"),
            -1ul);
}

TEST(WarmUp, TheHottestAreReadWhileSlotsAreEmpty) {
  const TestStore store(2, 12);
  for (bool raw : {false, true}) {
    const Source source = raw ? store.raw() : store.source();
    const PackRecord pack = [](int32_t, std::span<const std::byte* const> pieces, std::byte* to) {
      std::copy_n(pieces[0], kRecord, to);
    };
    Pool pool(options_of(10, {.profile = falling(2, 12)}), {}, source, raw ? pack : nullptr);
    pool.drain();
    pool.validate();
    EXPECT_EQ(resident(pool, 0), (Ids{0, 1, 2, 3, 4}));
    EXPECT_EQ(resident(pool, 1), (Ids{0, 1, 2, 3, 4}));
    for (int32_t expert = 0; expert < 12; ++expert) forward(pool, 1, {expert});
    pool.validate();
    const LayerStats stats = pool.stats()[1];
    EXPECT_EQ(stats.hits, 5);
    EXPECT_EQ(stats.prefetches_used, 5);
  }
}

TEST(WarmUp, SkipsExpertsOnTheGpuAndWaitsForItsStart) {
  const TestStore store(2, 12);
  WarmUpOptions known{.profile = falling(2, 12), .on_gpu = std::vector<bool>(24)};
  for (const int32_t id : {0, 1, 13}) known.on_gpu[id] = true;
  Pool pool(options_of(10, known, {.early_layers = 1, .early_experts = 2}), {}, store.source(),
            nullptr);
  pool.drain();
  EXPECT_TRUE(resident(pool, 0).empty() && resident(pool, 1).empty());
  forward(pool, 0, {9});  // its completion begins no warm-up read either
  pool.drain();
  EXPECT_EQ(resident(pool, 0), (Ids{9}));
  pool.warm_up();
  pool.drain();
  pool.validate();
  EXPECT_EQ(resident(pool, 0), (Ids{2, 3, 4, 5, 9}));
  EXPECT_EQ(resident(pool, 1), (Ids{0, 2, 3, 4, 5}));
  const ModelUse use = pool.model_use();
  EXPECT_EQ(use.uses[0], falling(2, 12).uses[0]) << "what was known of them stays known";
}

TEST(WarmUp, EvictsNothing) {
  const TestStore store(1, 12);
  PoolOptions options = options_of(6, {.profile = falling(1, 12)});
  options.reader.interpose = with_faults({.seed = 7, .delay = 1, .max_delay = 3ms});
  Pool pool(options, {}, store.source(), nullptr);
  forward(pool, 0, {11, 10, 9});  // few enough to get slots at once
  pool.drain();
  pool.validate();
  const Ids here = resident(pool, 0);
  EXPECT_EQ(here.size(), 6u);
  EXPECT_TRUE(std::equal(here.end() - 3, here.end(), Ids{9, 10, 11}.begin()));
}

TEST(WarmUp, GoesOnInSlotsThatBecomeEmpty) {
  const TestStore store(1, 12);
  Pool pool(options_of(8, {.profile = falling(1, 12)}), {}, store.source(), nullptr);
  pool.drain();
  EXPECT_EQ(pool.evict(0, Ids{0, 1}), 2);
  pool.drain();
  EXPECT_EQ(resident(pool, 0), (Ids{2, 3, 4, 5, 6, 7, 8, 9}));
  const auto resize = [&](int32_t slots) {
    pool.resize(slots);
    pool.drain();
    return resident(pool, 0);
  };
  EXPECT_EQ(std::ssize(resize(7)), 7);
  const Ids within = resize(8);  // whose memory has stayed
  EXPECT_EQ(std::ssize(within), 8);
  EXPECT_NE(std::ranges::find(within, 10), within.end());
  EXPECT_EQ(std::ssize(resize(4)), 4);
  const Ids grown = resize(8);  // with a new segment
  EXPECT_EQ(std::ssize(grown), 5) << "the profile names no more";
  EXPECT_NE(std::ranges::find(grown, 11), grown.end());
  pool.validate();
}

TEST(WarmUp, FillReadsAnEqualNumberOfEachLayer) {
  const TestStore store(2, 12);
  for (const int32_t slots : {9, 24}) {
    Pool pool(options_of(slots, {.fill = true}), {}, store.source(), nullptr);
    pool.drain();
    pool.validate();
    EXPECT_EQ(std::ssize(resident(pool, 0)), (slots + 1) / 2);
    EXPECT_EQ(std::ssize(resident(pool, 1)), slots / 2);
  }
  // The hottest experts of a profile come first, and experts on the GPU are skipped.
  WarmUpOptions known{.profile = falling(2, 12), .on_gpu = std::vector<bool>(24), .fill = true};
  known.on_gpu[11] = true;
  Pool pool(options_of(24, known), {}, store.source(), nullptr);
  pool.warm_up();
  pool.drain();
  pool.validate();
  EXPECT_EQ(std::ssize(resident(pool, 0)), 11);
  EXPECT_EQ(std::ssize(resident(pool, 1)), 12);
}

TEST(WarmUp, ReadsThatFailReachNoForward) {
  const TestStore store(2, 12);
  PoolOptions options = options_of(8, {.profile = falling(2, 12)});
  options.reader.interpose = with_faults({.seed = 5, .eio_always = 1});
  Pool pool(options, {}, store.source(), nullptr);
  pool.drain();
  pool.validate();
  EXPECT_TRUE(pool.detailed_stats().prefetch_error.has_value());
  EXPECT_TRUE(resident(pool, 0).empty());
  EXPECT_THROW(forward(pool, 0, {0}), Error);  // its own read
  pool.validate();
}

TEST(WarmUp, APoolMayCloseDuringAWarmStart) {
  const TestStore store(4, 12);
  PoolOptions options = options_of(24, {.profile = falling(4, 12)});
  options.reader.interpose = with_faults({.seed = 3, .delay = 1, .max_delay = 2ms});
  for (int32_t round = 0; round < 5; ++round) {
    Pool pool(options, {}, store.source(), nullptr);
    std::this_thread::sleep_for(std::chrono::milliseconds(round));
    pool.close();
  }
}

}  // namespace
}  // namespace torch_mesh
