// The pool: states, claims, waves, many threads.
#include <gtest/gtest.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <cstring>
#include <random>
#include <string>
#include <thread>
#include <vector>

#include "claim_fixture.h"
#include "error_of.h"
#include "pool_fixture.h"
#include "residency/core/slots.h"
#include "seed.h"

namespace torch_mesh {
namespace {

using namespace std::chrono_literals;
using namespace testing;

TEST(Pool, CountsHitsAndMissesExactly) {
  const TestStore store(2, 8);
  Pool pool(options_of(6), {}, store.source(), nullptr);
  forward(pool, 0, {0, 1, 2});
  forward(pool, 0, {1, 2, 3});
  forward(pool, 1, {5, 6});
  forward(pool, 1, {7});
  const auto stats = pool.stats();
  EXPECT_EQ(stats[0].accesses, 6);
  EXPECT_EQ(stats[0].hits, 2);
  EXPECT_EQ(stats[0].cold_misses, 4);
  EXPECT_EQ(stats[0].promoted, 4);
  EXPECT_EQ(stats[0].bytes_read, 4 * kRecord);
  EXPECT_EQ(stats[0].evicted, 1);
  EXPECT_EQ(stats[1].accesses, 3);
  EXPECT_EQ(stats[1].cold_misses, 3);
  EXPECT_EQ(state_of(pool, 0, 0), SlotState::kEmpty);
  EXPECT_EQ(state_of(pool, 0, 1), SlotState::kReady);
  expect_at_rest(pool);
  pool.reset_stats();
  EXPECT_EQ(total(pool).accesses, 0);
}

TEST(Pool, RecordsWhenMissesWereClaimedReadAndComputed) {
  const TestStore store(2, 8);
  Pool pool(options_of(6), {}, store.source(), nullptr);
  forward(pool, 1, {0, 1});
  EXPECT_TRUE(pool.misses().empty());
  const auto before = Miss::Time::clock::now();
  pool.record_misses(3);
  forward(pool, 1, {1, 2, 3});  // 1 is a hit
  forward(pool, 0, {5, 6});     // 5 is the third and last recorded miss
  const auto after = Miss::Time::clock::now();
  const std::vector<Miss> misses = pool.misses();
  std::vector<std::pair<int32_t, int32_t>> found;
  for (const Miss& miss : misses) {
    found.emplace_back(miss.layer, miss.expert);
    EXPECT_LE(before, miss.claimed);
    EXPECT_LE(miss.claimed, miss.begun);
    EXPECT_LE(miss.begun, miss.landed);
    EXPECT_LE(miss.landed, miss.handed);
    EXPECT_LE(miss.handed, miss.released);
    EXPECT_LE(miss.released, after);
  }
  ASSERT_EQ(found.size(), 3U);
  std::sort(found.begin(), found.begin() + 2);  // they land in any order
  EXPECT_EQ(found[0], std::pair(1, 2));
  EXPECT_EQ(found[1], std::pair(1, 3));
  EXPECT_EQ(found[2].first, 0);
  pool.record_misses(0);
  forward(pool, 0, {7});
  EXPECT_TRUE(pool.misses().empty());
  EXPECT_EQ(error_of([&] { pool.record_misses(-1); }).kind(), ErrorKind::kInvalid);
}

TEST(Pool, RecordsNoMoreMissesThanAskedForAfterALargerCall) {
  const TestStore store(1, 8);
  Pool pool(options_of(6), {}, store.source(), nullptr);
  pool.record_misses(1000);
  pool.record_misses(1);
  forward(pool, 0, {0, 1, 2});
  EXPECT_EQ(pool.misses().size(), 1U);
}

TEST(Pool, TheReleaseOfAHitIsNotThatOfAnEarlierMiss) {
  const TestStore store(1, 8);
  Pool pool(options_of(6), {}, store.source(), nullptr);
  pool.record_misses(8);
  {
    const std::vector<int32_t> experts{3};
    std::array<Claim::Entry, 1> entries;
    ReadyExpert ready;
    Claim fails(pool, 0, experts, entries);
    ASSERT_EQ(fails.next({&ready, 1}), 1);
  }
  const Miss::Time ended = Miss::Time::clock::now();
  forward(pool, 0, {3});
  ASSERT_EQ(pool.misses().size(), 1U);
  EXPECT_GT(pool.misses()[0].released, Miss::Time{});
  EXPECT_LE(pool.misses()[0].released, ended);
}

TEST(Timeline, AReadThatEndedBeforeTheClaimIsAHit) {
  const Miss::Time begun = Miss::Time::clock::now();
  const Miss::Time ended = begun + 2ms;
  Timeline timeline;
  timeline.start(8, 4);
  timeline.landed(2, {.begun = begun, .ended = ended});
  timeline.handed(2, 0, 5, ended + 1ms);
  EXPECT_TRUE(timeline.misses().empty());
  timeline.handed(2, 0, 5, begun + 1ms);  // by a forward that began during the read
  ASSERT_EQ(timeline.misses().size(), 1U);
  EXPECT_EQ(timeline.misses()[0].begun, begun);
  EXPECT_EQ(timeline.misses()[0].claimed, begun + 1ms);
  EXPECT_EQ(timeline.misses()[0].landed, ended);
}

TEST(Pool, AVictimIsNeverNeededByTheSameClaim) {
  const TestStore store(1, 8);
  Pool pool(options_of(4), {}, store.source(), nullptr);
  forward(pool, 0, {0, 1, 2, 3});
  forward(pool, 0, {4, 5, 0, 1});  // 0 and 1 are the least recently used
  EXPECT_EQ(total(pool).hits, 2);
}

TEST(Pool, ResidentExpertsComeBeforeColdOnes) {
  const TestStore store(1, 8);
  Pool pool(slow_options(6, 100ms), {}, store.source(), nullptr);
  forward(pool, 0, {6, 7});
  std::vector<int32_t> experts{0, 6, 1, 7};
  std::array<Claim::Entry, 4> entries;
  std::array<ReadyExpert, 4> ready;
  Claim claim(pool, 0, experts, entries);
  ASSERT_EQ(claim.next(ready), 2);
  EXPECT_EQ(ready[0].index, 1);
  EXPECT_EQ(ready[1].index, 3);
}

TEST(Pool, ForwardsRunInWavesDownToOneSlot) {
  const TestStore store(2, 16);
  for (int32_t slots : {1, 2, 5, 16}) {
    Pool pool(options_of(slots), {}, store.source(), nullptr);
    const auto check = [&] { pool.validate(); };
    for (int32_t layer : {0, 1, 0}) forward(pool, layer, all_of(16), {}, 4, check);
    expect_at_rest(pool);
    EXPECT_EQ(total(pool).accesses, 48);
  }
}

TEST(Pool, NextRefusesToWaitForSlotsThatTheClaimItselfHolds) {
  const TestStore store(1, 4);
  Pool pool(options_of(2), {}, store.source(), nullptr);
  const std::vector<int32_t> experts = all_of(4);
  std::array<Claim::Entry, 4> entries;
  std::array<ReadyExpert, 1> ready;
  Claim claim(pool, 0, experts, entries);
  ASSERT_EQ(claim.next(ready), 1);
  const int32_t first = ready[0].index;
  ASSERT_EQ(claim.next(ready), 1);
  EXPECT_EQ(error_of([&] { claim.next(ready); }).kind(), ErrorKind::kInvalid);
  release(claim, first);
  EXPECT_EQ(claim.next(ready), 1);
  EXPECT_EQ(error_of([&] { release(claim, first); }).kind(), ErrorKind::kInvalid);
}

TEST(Pool, ADroppedClaimLeavesItsReadsBehindAsPrefetches) {
  const TestStore store(1, 4);
  Pool pool(slow_options(4, 20ms), {}, store.source(), nullptr);
  {
    const std::vector<int32_t> experts = all_of(4);
    std::array<Claim::Entry, 4> entries;
    Claim claim(pool, 0, experts, entries);
    pool.validate();
  }
  EXPECT_EQ(pool.pinned(), 0);
  pool.drain();
  for (int32_t expert = 0; expert < 4; ++expert)
    EXPECT_EQ(state_of(pool, 0, expert), SlotState::kReady);
  expect_at_rest(pool);
}

TEST(Pool, EvictRemovesOnlyReadyUnpinnedExperts) {
  const TestStore store(1, 8);
  Pool pool(options_of(8), {}, store.source(), nullptr);
  pool.promote(0, std::vector<int32_t>{0, 1, 2});
  const std::vector<int32_t> held{1};
  std::array<Claim::Entry, 1> entries;
  std::array<ReadyExpert, 1> ready;
  Claim claim(pool, 0, held, entries);
  ASSERT_EQ(claim.next(ready), 1);
  EXPECT_EQ(pool.evict(0, all_of(8)), 2);
  EXPECT_EQ(state_of(pool, 0, 1), SlotState::kReady);
  EXPECT_TRUE(is_record(ready[0].record, 0, 1));
  pool.validate();
}

TEST(Pool, PromoteInWavesKeepsTheLast) {
  const TestStore store(1, 16);
  Pool pool(options_of(4), {}, store.source(), nullptr);
  pool.promote(0, all_of(16));
  int32_t ready = 0;
  for (int32_t expert = 0; expert < 16; ++expert)
    ready += state_of(pool, 0, expert) == SlotState::kReady;
  EXPECT_EQ(ready, 4);
  EXPECT_EQ(state_of(pool, 0, 15), SlotState::kReady);
  expect_at_rest(pool);
}

TEST(Pool, APoolInMemoryServesFilledExpertsAndEvictsNothing) {
  Pool pool(options_of(6), {}, 2, 3);
  for (int32_t id = 0; id < 5; ++id) pool.fill(id / 3, id % 3, record_of(id / 3, id % 3));
  forward(pool, 0, all_of(3));
  EXPECT_EQ(total(pool).hits, 3);
  const Error missing = error_of([&] { forward(pool, 1, all_of(3)); });
  EXPECT_EQ(missing.kind(), ErrorKind::kInvalid);
  EXPECT_EQ(missing.place().expert, 2);
  pool.fill(1, 2, record_of(1, 2));
  pool.fill(1, 2, record_of(1, 2));
  forward(pool, 1, all_of(3));
  pool.prefetch(0, all_of(3));
  EXPECT_EQ(error_of([&] { pool.evict(0, all_of(3)); }).kind(), ErrorKind::kInvalid);
  EXPECT_EQ(error_of([&] { Pool short_of(options_of(5), {}, 2, 3); }).kind(), ErrorKind::kInvalid);
  EXPECT_EQ(total(pool).bytes_read, 0);
  expect_at_rest(pool);
}

TEST(Pool, RefusesArgumentsThatDoNotFit) {
  const TestStore store(1, 4);
  Pool pool(options_of(2), {}, store.source(), nullptr);
  EXPECT_EQ(error_of([&] { forward(pool, 1, all_of(2)); }).kind(), ErrorKind::kInvalid);
  EXPECT_EQ(error_of([&] { forward(pool, 0, all_of(5)); }).kind(), ErrorKind::kInvalid);
  EXPECT_EQ(error_of([&] { pool.fill(0, 0, record_of(0, 0)); }).kind(), ErrorKind::kInvalid);
  for (int32_t slots : {0, -1, 5}) {
    EXPECT_EQ(error_of([&] { Pool bad(options_of(slots), {}, store.source(), nullptr); }).kind(),
              ErrorKind::kInvalid);
  }
  PoolOptions other = options_of(2);
  other.record_bytes = 4096;
  EXPECT_EQ(error_of([&] { Pool bad(other, {}, store.source(), nullptr); }).kind(),
            ErrorKind::kInvalid);
  expect_at_rest(pool);
}

TEST(Pool, ARangeOfTheExpertsUsesTheModelsNumbers) {
  const TestStore store(2, 6);
  Source source = store.source();
  source.experts = 2;
  source.first_expert = 3;
  source.routed_experts = 6;
  source.extents.clear();
  source.checksums.clear();
  for (const int32_t record : {3, 4, 9, 10}) {
    source.extents.push_back(store.source().extents[record]);
    source.checksums.push_back(store.source().checksums[record]);
  }
  Pool pool(options_of(4), {}, source, nullptr);
  EXPECT_EQ(pool.experts(), 2);
  EXPECT_EQ(pool.first_expert(), 3);
  EXPECT_EQ(pool.routed_experts(), 6);
  pool.promote(0, std::vector<int32_t>{0, 1});
  store.write(10 * kRecord, record_of(1, 5));
  const Error error = error_of([&] { pool.promote(1, std::vector<int32_t>{1}); });
  EXPECT_EQ(error.kind(), ErrorKind::kChecksum);
  EXPECT_EQ(error.place().layer, 1);
  EXPECT_EQ(error.place().expert, 4);
  EXPECT_NE(std::string(error.what()).find("expert 4 of layer 1"), std::string::npos);
  // A pool of all experts begins with expert 0.
  const Pool whole(options_of(4), {}, store.source(), nullptr);
  EXPECT_EQ(whole.first_expert(), 0);
  EXPECT_EQ(whole.routed_experts(), 6);
}

TEST(Pool, RawPiecesOfAnyAlignmentArriveWhole) {
  TestStore file(3, 8);
  Source source;
  source.layers = 2;
  source.experts = 6;
  source.pieces = 2;
  source.raw = true;
  source.files = {{file.path(), 24 * kRecord}};
  std::vector<std::byte> bytes(24 * kRecord);
  std::vector<int64_t> sizes;
  int64_t at = 37;
  for (int32_t id = 0; id < 12; ++id) {
    for (int32_t piece = 0; piece < 2; ++piece) {
      const int64_t size = 3001 + 1000 * piece + 7 * id;
      std::memset(&bytes[at], id * 2 + piece + 1, size);
      source.extents.push_back({0, at, size});
      at += size + 11;
    }
  }
  file.write(0, bytes);
  const auto pack = [&](ExpertId id, std::span<const std::byte* const> pieces, std::byte* record) {
    for (int32_t piece = 0; piece < 2; ++piece) {
      const int64_t size = 3001 + 1000 * piece + 7 * id;
      const auto value = std::byte(id * 2 + piece + 1);
      for (int64_t i = 0; i < size; ++i) {
        if (pieces[piece][i] != value) throw Error(ErrorKind::kInvalid, "wrong bytes");
      }
    }
    const auto packed = record_of(id / 6, id % 6);
    std::memcpy(record, packed.data(), kRecord);
  };
  for (const bool direct : {true, false}) {
    PoolOptions options = slow_options(6, 1ms);
    options.reader.direct = direct;
    options.staging = 2;  // fewer than the reads in flight
    options.verify = Verify::kAlways;
    Pool pool(options, {}, source, pack);
    const auto check = [&] { pool.validate(); };
    for (int32_t round = 0; round < 3; ++round) {
      pool.prefetch(1, all_of(6));
      forward(pool, 0, all_of(6), {}, 2, check);
      forward(pool, 1, all_of(6), {}, 2, check);
    }
    pool.drain();
    expect_at_rest(pool);
  }
  const auto failing = [](int32_t, std::span<const std::byte* const>, std::byte*) {
    throw std::runtime_error("no such layout");
  };
  Pool pool(options_of(6), {}, source, failing);
  const Error error = error_of([&] { pool.promote(0, all_of(6)); });
  EXPECT_NE(std::string(error.what()).find("no such layout"), std::string::npos);
  pool.drain();
  expect_at_rest(pool);
}

TEST(Pool, ManyThreadsOnAPoolOfOneForwardDoNotDeadlock) {
  constexpr int32_t kTopK = 4;
  const TestStore store(3, 8);
  for (int32_t slots : {1, kTopK, kTopK + 1}) {
    Pool pool(options_of(slots), {}, store.source(), nullptr);
    std::vector<std::thread> threads;
    for (int32_t thread = 0; thread < 8; ++thread) {
      threads.emplace_back([&, thread] {
        for (int32_t step = 0; step < 30; ++step) {
          std::vector<int32_t> experts;
          for (int32_t i = 0; i < kTopK; ++i) experts.push_back((thread + step + 2 * i) % 8);
          forward(pool, (thread + step) % 3, experts, {}, 1 + step % 4);
        }
      });
    }
    for (std::thread& thread : threads) thread.join();
    pool.drain();
    expect_at_rest(pool);
    EXPECT_EQ(total(pool).accesses, 8 * 30 * kTopK);
  }
}

// Overlapping forwards whose experts are always resident must not keep another one from getting a
// slot.
TEST(Pool, ForwardsThatHitDoNotStarveOneThatWaits) {
  const TestStore store(2, 4);
  Pool pool(options_of(2), {}, store.source(), nullptr);
  std::atomic<bool> stop = false;
  std::vector<std::thread> hitters;
  for (int32_t thread = 0; thread < 3; ++thread) {
    hitters.emplace_back([&] {
      while (!stop) forward(pool, 0, {0, 1}, {}, 2);
    });
  }
  for (int32_t round = 0; round < 20; ++round) forward(pool, 1, {0, 1}, {}, 2);
  stop = true;
  for (std::thread& thread : hitters) thread.join();
  expect_at_rest(pool);
}

// Under any injected fault a forward gets the right bytes or a typed error. Invariants hold after
// every step, and nothing is pinned at the end.
TEST(Pool, KeepsItsInvariantsUnderRandomClaimsAndFaults) {
  const uint64_t seed = testing::fresh_seed();
  SCOPED_TRACE("TORCH_MESH_TEST_SEED=" + std::to_string(seed));
  std::mt19937 random(seed);
  constexpr int32_t kLayers = 3, kExperts = 8;
  const TestStore store(kLayers, kExperts);
  const std::array<const char*, 3> policies{"lru", "lfu", "heat"};
  for (int32_t round = 0; round < 18; ++round) {
    PoolOptions options = options_of(1 + static_cast<int32_t>(random() % (kLayers * kExperts)));
    options.policy = policies[round % 3];
    options.verify = Verify::kAlways;
    Faults faults{.seed = random()};
    faults.short_read = .1, faults.eintr = .1, faults.eagain = .1, faults.eio_once = .05;
    faults.eio_always = .01, faults.delay = .3, faults.reorder = .1;
    faults.bit_flip = .02, faults.wrong_offset = .02, faults.max_delay = 500us;
    options.reader.interpose = with_faults(faults);
    Pool pool(options, {}, store.source(), nullptr);
    std::atomic<int32_t> errors = 0;
    const auto check = [&] { pool.validate(); };
    const auto work = [&](uint32_t thread_seed) {
      std::mt19937 draw(thread_seed);
      for (int32_t step = 0; step < 40; ++step) {
        std::vector<int32_t> experts = all_of(kExperts);
        std::shuffle(experts.begin(), experts.end(), draw);
        experts.resize(draw() % (kExperts + 1));
        const auto layer = static_cast<int32_t>(draw() % kLayers);
        try {
          if (draw() % 4 == 0) pool.prefetch((layer + 1) % kLayers, experts);
          if (draw() % 4 == 0) pool.expect((layer + 1) % kLayers, experts);
          if (draw() % 8 == 0) pool.evict(layer, experts);
          forward(pool, layer, experts, {}, 1 + draw() % 4, check);
        } catch (const Error& error) {
          ++errors;
          ASSERT_TRUE(error.kind() == ErrorKind::kRead || error.kind() == ErrorKind::kChecksum)
              << error.what();
          ASSERT_EQ(error.place().layer, layer);
        }
      }
    };
    std::vector<std::thread> threads;
    for (int32_t thread = 0; thread < 1 + round % 4; ++thread) threads.emplace_back(work, random());
    for (std::thread& thread : threads) thread.join();
    pool.drain();
    expect_at_rest(pool);
    const LayerStats sum = total(pool);
    EXPECT_EQ(sum.hits + sum.cold_misses + sum.inflight_misses, sum.accesses);
    EXPECT_EQ(sum.promoted + sum.failed, sum.cold_misses + sum.prefetches);
  }
}

TEST(Pool, ForwardsThroughThePageCacheFindTheirRecordsWhateverIsEvicted) {
  const uint64_t seed = testing::fresh_seed();
  SCOPED_TRACE("TORCH_MESH_TEST_SEED=" + std::to_string(seed));
  std::mt19937 draw(seed);
  const TestStore store(3, 8);
  for (const char* backend : {"threads", "auto"}) {
    PoolOptions options = options_of(9);
    options.reader.backend = backend;
    options.reader.direct = false;
    Pool pool(options, {}, store.source(), nullptr);
    EXPECT_TRUE(pool.reader()->buffered());
    for (int32_t step = 0; step < 300; ++step) {
      const auto layer = static_cast<int32_t>(draw() % 3);
      std::vector<int32_t> experts = all_of(8);
      std::shuffle(experts.begin(), experts.end(), draw);
      experts.resize(1 + draw() % 8);
      if (draw() % 8 == 0) pool.resize(1 + static_cast<int32_t>(draw() % 9));
      if (draw() % 4 == 0) pool.prefetch((layer + 1) % 3, experts);
      if (draw() % 4 == 0) pool.expect((layer + 1) % 3, experts);
      if (draw() % 4 == 0) pool.evict(layer, experts);
      forward(pool, layer, experts, {}, 1 + draw() % 4, [&] { pool.validate(); });
    }
    pool.drain();
    expect_at_rest(pool);
    EXPECT_GT(total(pool).evicted, 0);
  }
}

}  // namespace
}  // namespace torch_mesh
