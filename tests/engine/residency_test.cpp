// The pool: states, claims, faults, waits. Records carry their own layer and expert in every word,
// so that a wrong buffer shows wherever it is read.
#include <fcntl.h>
#include <gtest/gtest.h>
#include <sys/mman.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <cerrno>
#include <cstdio>
#include <cstring>
#include <functional>
#include <memory>
#include <numeric>
#include <random>
#include <string>
#include <thread>
#include <vector>

#include "claim_fixture.h"
#include "error_of.h"
#include "residency/core/expected.h"
#include "residency/core/slots.h"
#include "residency/memory/arena.h"
#include "residency/pool.h"
#include "store_fixture.h"

namespace torch_mesh {
namespace {

using namespace std::chrono_literals;
using testing::error_of;
using testing::release;

constexpr int64_t kRecord = 8192;

std::vector<std::byte> record_of(int32_t layer, int32_t expert) {
  std::vector<uint32_t> words(kRecord / 4);
  for (size_t i = 0; i < words.size(); ++i) {
    words[i] = static_cast<uint32_t>(layer) << 24 | static_cast<uint32_t>(expert) << 16 |
               static_cast<uint32_t>(i);
  }
  std::vector<std::byte> record(kRecord);
  std::memcpy(record.data(), words.data(), kRecord);
  return record;
}

bool is_record(const std::byte* data, int32_t layer, int32_t expert) {
  return std::memcmp(data, record_of(layer, expert).data(), kRecord) == 0;
}

struct TestStore : testing::RecordFile {
  TestStore(int32_t layers, int32_t experts) : RecordFile(layers, experts, record_of) {}
};

PoolOptions options_of(int32_t slots) {
  PoolOptions options;
  options.slots = slots;
  options.record_bytes = kRecord;
  options.policy = "lru";
  options.reader.backend = "threads";
  options.reader.chunk_bytes = 4096;
  return options;
}

// Every read takes up to `delay` longer.
PoolOptions slow_options(int32_t slots, std::chrono::microseconds delay) {
  PoolOptions options = options_of(slots);
  options.reader.interpose = with_faults({.delay = 1, .max_delay = delay});
  return options;
}

std::vector<int32_t> all_of(int32_t experts) {
  std::vector<int32_t> ids(experts);
  std::iota(ids.begin(), ids.end(), 0);
  return ids;
}

// One forward: takes every expert, checks its bytes, gives it back.
void forward(
    Pool& pool, int32_t layer, std::span<const int32_t> experts, size_t batch = 3,
    const std::function<void()>& step = [] {}) {
  std::vector<Claim::Entry> entries(experts.size());
  std::vector<ReadyExpert> ready(batch);
  std::vector<bool> seen(experts.size(), false);
  Claim claim(pool, layer, experts, entries);
  step();
  while (const int32_t count = claim.next(ready)) {
    step();
    for (int32_t i = 0; i < count; ++i) {
      ASSERT_FALSE(seen[ready[i].index]) << "handed out twice";
      seen[ready[i].index] = true;
      ASSERT_TRUE(is_record(ready[i].record, layer, experts[ready[i].index]));
      claim.release({&ready[i], 1});
      step();
    }
  }
  ASSERT_TRUE(std::all_of(seen.begin(), seen.end(), [](bool s) { return s; }));
}

void expect_at_rest(const Pool& pool) {
  EXPECT_EQ(pool.pinned(), 0);
  pool.validate();
}

LayerStats total(const Pool& pool) {
  LayerStats sum;
  for (const LayerStats& layer : pool.stats()) {
    sum.accesses += layer.accesses, sum.hits += layer.hits, sum.cold_misses += layer.cold_misses;
    sum.inflight_misses += layer.inflight_misses, sum.promoted += layer.promoted;
    sum.evicted += layer.evicted, sum.bytes_read += layer.bytes_read;
    sum.prefetches += layer.prefetches, sum.failed += layer.failed;
  }
  return sum;
}

TEST(Arena, PiecesAreAlignedDistinctAndWritable) {
  Arena arena(70, int64_t{1} << 20);  // crosses a segment
  EXPECT_EQ(arena.bytes(), int64_t{70} << 20);
  EXPECT_EQ(arena.segments().size(), 2u);
  for (int32_t i = 0; i < 70; ++i) {
    EXPECT_EQ(reinterpret_cast<uintptr_t>(arena.piece(i)) % 4096, 0u);
    std::memset(arena.piece(i), i, size_t{1} << 20);
  }
  for (int32_t i = 0; i < 70; ++i) {
    EXPECT_EQ(arena.piece(i)[0], std::byte(i));
    EXPECT_EQ(arena.piece(i)[(1 << 20) - 1], std::byte(i));
  }
  EXPECT_GE(arena.huge_page_bytes(), 0);
  EXPECT_LE(arena.huge_page_bytes(), arena.bytes());
}

TEST(Arena, SaysWhatItCannotHave) {
  const Error error = error_of([] { Arena arena(int64_t{1} << 20, int64_t{1} << 30); });
  EXPECT_EQ(error.kind(), ErrorKind::kMemory);
  EXPECT_NE(std::string(error.what()).find("1073741824 MiB"), std::string::npos) << error.what();
  EXPECT_EQ(error_of([] { Arena arena(1, 1000); }).kind(), ErrorKind::kInvalid);
}

TEST(Pool, CountsHitsAndMissesExactly) {
  const TestStore store(2, 8);
  Pool pool(options_of(6), {}, store.source(), nullptr);
  forward(pool, 0, std::vector<int32_t>{0, 1, 2});
  forward(pool, 0, std::vector<int32_t>{1, 2, 3});
  forward(pool, 1, std::vector<int32_t>{5, 6});
  forward(pool, 1, std::vector<int32_t>{7});
  const auto stats = pool.stats();
  EXPECT_EQ(stats[0].accesses, 6);
  EXPECT_EQ(stats[0].hits, 2);
  EXPECT_EQ(stats[0].cold_misses, 4);
  EXPECT_EQ(stats[0].promoted, 4);
  EXPECT_EQ(stats[0].bytes_read, 4 * kRecord);
  EXPECT_EQ(stats[0].evicted, 1);
  EXPECT_EQ(stats[1].accesses, 3);
  EXPECT_EQ(stats[1].cold_misses, 3);
  EXPECT_EQ(pool.state(0, 0), SlotState::kEmpty);
  EXPECT_EQ(pool.state(0, 1), SlotState::kReady);
  expect_at_rest(pool);
  pool.reset_stats();
  EXPECT_EQ(total(pool).accesses, 0);
}

TEST(Pool, AVictimIsNeverNeededByTheSameClaim) {
  const TestStore store(1, 8);
  Pool pool(options_of(4), {}, store.source(), nullptr);
  forward(pool, 0, std::vector<int32_t>{0, 1, 2, 3});
  forward(pool, 0, std::vector<int32_t>{4, 5, 0, 1});  // 0 and 1 are the least recently used
  EXPECT_EQ(total(pool).hits, 2);
}

TEST(Pool, ResidentExpertsComeBeforeColdOnes) {
  const TestStore store(1, 8);
  Pool pool(slow_options(6, 100ms), {}, store.source(), nullptr);
  forward(pool, 0, std::vector<int32_t>{6, 7});
  std::vector<int32_t> experts{0, 6, 1, 7};
  std::array<Claim::Entry, 4> entries;
  std::array<ReadyExpert, 4> ready;
  Claim claim(pool, 0, experts, entries);
  ASSERT_EQ(claim.next(ready), 2);
  EXPECT_EQ(ready[0].index, 1);
  EXPECT_EQ(ready[1].index, 3);
}

TEST(Pool, GoesInWavesDownToOneSlot) {
  const TestStore store(2, 16);
  for (int32_t slots : {1, 2, 5, 16}) {
    Pool pool(options_of(slots), {}, store.source(), nullptr);
    const auto check = [&] { pool.validate(); };
    for (int32_t layer : {0, 1, 0}) forward(pool, layer, all_of(16), 4, check);
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
    EXPECT_EQ(pool.state(0, expert), SlotState::kReady);
  expect_at_rest(pool);
}

TEST(Pool, PrefetchIsJoinedByTheClaimThatNeedsIt) {
  const TestStore store(2, 8);
  Pool pool(slow_options(8, 50ms), {}, store.source(), nullptr);
  pool.prefetch(1, std::vector<int32_t>{2, 3});
  EXPECT_EQ(pool.state(1, 2), SlotState::kLoading);
  pool.validate();
  forward(pool, 1, std::vector<int32_t>{2, 3, 4});
  const LayerStats layer = pool.stats()[1];
  EXPECT_EQ(layer.prefetches, 2);
  EXPECT_EQ(layer.inflight_misses, 2);
  EXPECT_EQ(layer.cold_misses, 1);
  EXPECT_EQ(layer.bytes_read, 3 * kRecord);
  expect_at_rest(pool);
}

TEST(Pool, PrefetchNeitherWaitsNorTakesMoreThanHalf) {
  const TestStore store(1, 16);
  Pool pool(slow_options(8, 20ms), {}, store.source(), nullptr);
  forward(pool, 0, std::vector<int32_t>{0, 1, 2, 3, 4, 5, 6, 7});
  // 0 to 2 are the oldest, but are wanted too.
  pool.prefetch(0, std::vector<int32_t>{0, 1, 2, 8, 9, 10, 11, 12, 13});
  EXPECT_EQ(total(pool).prefetches, 4);
  pool.validate();
  pool.drain();
  for (int32_t expert : {0, 1, 2, 8, 9, 10, 11}) {
    EXPECT_EQ(pool.state(0, expert), SlotState::kReady) << expert;
  }
  expect_at_rest(pool);
}

TEST(Pool, WhatIsExpectedIsReadInTurnUntilItsLayerBegins) {
  const TestStore store(2, 16);
  PoolOptions options = slow_options(16, 20ms);
  options.reader.depth = 4;  // a chunk for prefetches, so that two records are under way
  Pool pool(options, {}, store.source(), nullptr);
  pool.expect(1, std::vector<int32_t>{9, 3, 4, 5, 6});
  for (int32_t expert : {9, 3}) EXPECT_NE(pool.state(1, expert), SlotState::kEmpty) << expert;
  EXPECT_EQ(pool.state(1, 6), SlotState::kEmpty);
  pool.validate();
  pool.drain();  // each read that ends begins the next one
  for (int32_t expert : {9, 3, 4, 5, 6}) EXPECT_EQ(pool.state(1, expert), SlotState::kReady);

  pool.expect(0, all_of(16));
  forward(pool, 0, std::vector<int32_t>{0, 15});
  pool.drain();
  EXPECT_EQ(pool.state(0, 15), SlotState::kReady);
  EXPECT_EQ(pool.state(0, 14), SlotState::kEmpty) << "was read after its layer had begun";
  EXPECT_EQ(pool.stats()[0].cold_misses, 1);
  expect_at_rest(pool);
}

TEST(Pool, WhatIsExpectedIsAskedForOnce) {
  SlotTable slots(8, 4, make_policy("lru", {1, 8, 4}));
  Expected expected(1, 8);
  expected.set(0, std::vector<int32_t>{5, 2}, slots);
  const auto reserve = [&](ExpertId id) { return slots.reserve(id); };
  const int32_t first = expected.reserve_next(slots, reserve);
  EXPECT_EQ(slots[first].expert, 5);
  slots.fail(first, Error(ErrorKind::kClosed, "at once"));
  EXPECT_EQ(slots[expected.reserve_next(slots, reserve)].expert, 2);
  EXPECT_EQ(expected.reserve_next(slots, reserve), -1);
}

TEST(Pool, WhatIsSeldomRightIsNotRead) {
  SlotTable slots(2 * 8, 16, make_policy("lru", {2, 8, 16}));
  Expected expected(2, 8);
  const std::vector<int32_t> guesses{5, 2, 7};
  // The guesses that a layer reads; each fails, and is cold again the next time.
  const auto read = [&](int32_t layer) {
    std::vector<int32_t> ids;
    expected.set(layer, guesses, slots);
    for (;;) {
      const int32_t slot =
          expected.reserve_next(slots, [&](ExpertId id) { return slots.reserve(id); });
      if (slot < 0) return ids;
      ids.push_back(slots[slot].expert % 8);
      slots.fail(slot, Error(ErrorKind::kClosed, "at once"));
    }
  };
  const auto forwards = [&](int32_t count, const std::vector<int32_t>& used) {
    for (int32_t i = 0; i < count; ++i) {
      expected.set(0, guesses, slots);
      expected.begin(0, used, slots);
    }
  };
  EXPECT_EQ(read(0), guesses) << "nothing is known yet";
  forwards(3, {1, 5, 7});
  EXPECT_EQ(read(0), guesses) << "three are not enough to tell";
  forwards(20, {1, 5, 7});
  EXPECT_EQ(read(0), (std::vector<int32_t>{5, 7}));
  EXPECT_EQ(read(1), guesses) << "another layer";
  forwards(2000, {2, 7});
  EXPECT_EQ(read(0), (std::vector<int32_t>{2, 7})) << "what was not read is learned, too";
  const int32_t slot = slots.reserve(2);
  slots.land(slot);
  forwards(2000, {7});
  slots.evict(slot);
  EXPECT_EQ(read(0), (std::vector<int32_t>{2, 7})) << "nothing is learned of what is there";
  expected.begin(1, {}, slots);
  forwards(1, {5});
  EXPECT_EQ(read(0), (std::vector<int32_t>{2, 7})) << "one more or less changes nothing";
}

TEST(Pool, WhatIsRightHalfOfTheTimeIsReadWhereTheDiskHasTheTime) {
  for (const bool idle : {false, true}) {
    SlotTable slots(8, 8, make_policy("lru", {1, 8, 8}));
    Expected expected(1, 8);
    const std::vector<int32_t> guesses{5, 2};
    bool asked = false;
    for (int32_t i = 0; i < 400; ++i) {
      asked = false;
      std::vector<int32_t> reads;
      expected.set(0, guesses, slots);
      for (;;) {
        const int32_t slot =
            expected.reserve_next(slots, [&](ExpertId id) { return slots.reserve(id); });
        if (slot < 0) break;
        asked |= slots[slot].expert == 2;
        reads.push_back(slot);
        if (idle) slots.land(slot);
      }
      const int32_t second = i % 2 == 0 ? 2 : 3;
      expected.begin(0, std::vector<int32_t>{5, second}, slots);
      for (const int32_t slot : reads) {
        if (!idle) slots.land(slot);
        slots.evict(slot);
      }
    }
    EXPECT_EQ(asked, idle);
  }
}

TEST(Pool, WhatIsExpectedMakesNoRoomForItsLike) {
  const TestStore store(1, 16);
  PoolOptions options = slow_options(8, 5ms);
  options.policy = "lru";
  Pool pool(options, {}, store.source(), nullptr);
  for (int32_t expert = 0; expert < 8; ++expert) forward(pool, 0, {{expert}});
  // 0 to 2 are the oldest, but are wanted too.
  pool.expect(0, std::vector<int32_t>{8, 9, 10, 11, 12, 0, 1, 2});
  pool.drain();
  for (int32_t expert : {0, 1, 2, 8, 9, 10, 11, 12}) {
    EXPECT_EQ(pool.state(0, expert), SlotState::kReady) << expert;
  }
  EXPECT_EQ(error_of([&] { pool.expect(0, std::vector<int32_t>{16}); }).kind(),
            ErrorKind::kInvalid);
  expect_at_rest(pool);
}

TEST(Pool, EvictGivesUpWhatIsReadyAndUnpinned) {
  const TestStore store(1, 8);
  Pool pool(options_of(8), {}, store.source(), nullptr);
  pool.promote(0, std::vector<int32_t>{0, 1, 2});
  const std::vector<int32_t> held{1};
  std::array<Claim::Entry, 1> entries;
  std::array<ReadyExpert, 1> ready;
  Claim claim(pool, 0, held, entries);
  ASSERT_EQ(claim.next(ready), 1);
  EXPECT_EQ(pool.evict(0, all_of(8)), 2);
  EXPECT_EQ(pool.state(0, 1), SlotState::kReady);
  EXPECT_TRUE(is_record(ready[0].record, 0, 1));
  pool.validate();
}

TEST(Pool, PromoteInWavesKeepsTheLast) {
  const TestStore store(1, 16);
  Pool pool(options_of(4), {}, store.source(), nullptr);
  pool.promote(0, all_of(16));
  int32_t ready = 0;
  for (int32_t expert = 0; expert < 16; ++expert)
    ready += pool.state(0, expert) == SlotState::kReady;
  EXPECT_EQ(ready, 4);
  EXPECT_EQ(pool.state(0, 15), SlotState::kReady);
  expect_at_rest(pool);
}

TEST(Pool, ObserveSteersEviction) {
  const TestStore store(1, 4);
  PoolOptions options = options_of(2);
  options.policy = "lfu";
  Pool pool(options, {}, store.source(), nullptr);
  pool.promote(0, std::vector<int32_t>{0, 1});
  pool.observe(0, std::vector<float>{.9f, .1f, 0, 0});
  pool.promote(0, std::vector<int32_t>{2});
  EXPECT_EQ(pool.state(0, 0), SlotState::kReady);
  EXPECT_EQ(error_of([&] { pool.observe(0, std::vector<float>{1}); }).kind(), ErrorKind::kInvalid);
}

TEST(Pool, MemoryOnlyServesWhatWasFilledAndEvictsNothing) {
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

TEST(Pool, AFailedReadReachesEveryoneWhoJoinedAndThePoolRecovers) {
  const TestStore store(2, 4);
  Pool pool(slow_options(2, 20ms), {}, store.source(), nullptr);
  store.truncate(5 * kRecord);  // experts 1 to 3 of layer 1 are gone
  std::atomic<int32_t> errors = 0;
  std::vector<std::thread> threads;
  for (int32_t i = 0; i < 4; ++i) {
    threads.emplace_back([&] {
      const Error error = error_of([&] { forward(pool, 1, std::vector<int32_t>{2}); });
      EXPECT_EQ(error.kind(), ErrorKind::kRead);
      EXPECT_EQ(error.os_error(), ENODATA);
      EXPECT_EQ(error.place().layer, 1);
      EXPECT_EQ(error.place().expert, 2);
      EXPECT_EQ(error.place().file, store.path());
      EXPECT_GE(error.place().offset, 5 * kRecord);
      for (const char* word : {"expert 2", "layer 1", store.path().c_str(), "offset"}) {
        EXPECT_NE(std::string(error.what()).find(word), std::string::npos) << error.what();
      }
      ++errors;
    });
  }
  for (std::thread& thread : threads) thread.join();
  EXPECT_EQ(errors, 4);
  expect_at_rest(pool);
  EXPECT_GT(total(pool).failed, 0);
  forward(pool, 0, all_of(4));
  for (int32_t expert = 1; expert < 4; ++expert) {
    store.write((4 + expert) * kRecord, record_of(1, expert));
  }
  forward(pool, 1, all_of(4));
  expect_at_rest(pool);
}

TEST(Pool, AWrongChecksumIsReadOnceMoreAndThenAnError) {
  const TestStore store(1, 4);
  auto wrong = record_of(0, 2);
  wrong[5000] ^= std::byte{4};
  store.write(2 * kRecord, wrong);
  Pool pool(options_of(2), {}, store.source(), nullptr);
  const Error error = error_of([&] { forward(pool, 0, all_of(4)); });
  EXPECT_EQ(error.kind(), ErrorKind::kChecksum);
  EXPECT_EQ(error.place().expert, 2);
  EXPECT_EQ(error.place().offset, 2 * kRecord);
  pool.drain();
  expect_at_rest(pool);
  pool.reset_stats();
  EXPECT_THROW(pool.promote(0, std::vector<int32_t>{2}), Error);
  EXPECT_EQ(total(pool).bytes_read, 2 * kRecord);  // read twice
  store.write(2 * kRecord, record_of(0, 2));
  forward(pool, 0, all_of(4));
  expect_at_rest(pool);
}

TEST(Pool, VerifySaysWhenChecksumsAreCompared) {
  const TestStore store(1, 4);
  for (const auto& [verify, fails] : {std::pair{Verify::kFirst, false}, {Verify::kAlways, true}}) {
    for (const bool has_checksums : {true, false}) {
      store.write(0, record_of(0, 0));
      Source source = store.source();
      if (!has_checksums) source.checksums.clear();
      PoolOptions options = options_of(2);
      options.verify = verify;
      Pool pool(options, {}, source, nullptr);
      forward(pool, 0, std::vector<int32_t>{0});
      store.write(0, record_of(0, 1));
      ASSERT_EQ(pool.evict(0, std::vector<int32_t>{0}), 1);
      if (fails) {
        EXPECT_EQ(error_of([&] { pool.promote(0, std::vector<int32_t>{0}); }).kind(),
                  ErrorKind::kChecksum);
      } else {
        pool.promote(0, std::vector<int32_t>{0});
      }
      expect_at_rest(pool);
    }
  }
  PoolOptions options = options_of(2);
  options.verify = Verify::kNever;
  Pool pool(options, {}, store.source(), nullptr);
  pool.promote(0, std::vector<int32_t>{0});  // still holds the record of expert 1
}

TEST(Pool, ARangeOfTheExpertsHasTheModelsNumbers) {
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
  // As a whole it has all of them, and no number is added.
  const Pool whole(options_of(4), {}, store.source(), nullptr);
  EXPECT_EQ(whole.first_expert(), 0);
  EXPECT_EQ(whole.routed_experts(), 6);
}

TEST(Pool, ATimedOutReadKeepsItsBufferUntilItCompletes) {
  const TestStore store(1, 4);
  PoolOptions options = options_of(1);
  options.timeout = 30ms;
  options.reader.interpose = with_faults({.seed = 7, .delay = 1, .max_delay = 1s});
  Pool pool(options, {}, store.source(), nullptr);
  const Error error = error_of([&] {
    for (;;) forward(pool, 0, std::vector<int32_t>{1}), pool.evict(0, std::vector<int32_t>{1});
  });
  EXPECT_EQ(error.kind(), ErrorKind::kTimeout);
  EXPECT_EQ(error.place().expert, 1);
  EXPECT_EQ(error.place().file, store.path());
  EXPECT_EQ(pool.state(0, 1), SlotState::kLoading);
  EXPECT_EQ(pool.pinned(), 0);
  pool.validate();
  // The one slot is not to be had until then: a claim that waits for it gives up in time, too.
  try {
    forward(pool, 0, std::vector<int32_t>{2});
  } catch (const Error& full) {
    EXPECT_EQ(full.kind(), ErrorKind::kTimeout);
  }
  const auto state_of_either = [&](SlotState state) {
    return pool.state(0, 1) == state || pool.state(0, 2) == state;
  };
  while (state_of_either(SlotState::kLoading)) std::this_thread::sleep_for(5ms);
  ASSERT_TRUE(state_of_either(SlotState::kReady));
  forward(pool, 0, std::vector<int32_t>{pool.state(0, 1) == SlotState::kReady ? 1 : 2});
  expect_at_rest(pool);
}

TEST(Pool, TheInterruptHookEndsAWait) {
  const TestStore store(1, 4);
  PoolOptions options = options_of(2);
  options.reader.interpose = with_faults({.seed = 3, .delay = 1, .max_delay = 1500ms});
  static std::atomic<int32_t> asked;
  asked = 0;
  Runtime runtime;
  runtime.interrupted = [] { return ++asked >= 2; };
  Pool pool(options, runtime, store.source(), nullptr);
  EXPECT_EQ(error_of([&] {
              forward(pool, 0, std::vector<int32_t>{0, 1});
            }).kind(),
            ErrorKind::kInterrupted);
  EXPECT_EQ(pool.pinned(), 0);
  pool.validate();
}

TEST(Pool, CloseRefusesNewClaimsAndLetsOthersEnd) {
  const TestStore store(1, 8);
  Pool pool(slow_options(2, 10ms), {}, store.source(), nullptr);
  const std::vector<int32_t> experts = all_of(8);
  std::array<Claim::Entry, 8> entries;
  std::array<ReadyExpert, 2> ready;
  {
    Claim claim(pool, 0, experts, entries);
    pool.close();
    pool.close();
    int32_t handed = 0;
    while (const int32_t count = claim.next(ready)) {
      handed += count;
      for (int32_t i = 0; i < count; ++i) claim.release({&ready[i], 1});
    }
    EXPECT_EQ(handed, 8);
  }
  EXPECT_EQ(error_of([&] { forward(pool, 0, experts); }).kind(), ErrorKind::kClosed);
  EXPECT_EQ(error_of([&] { pool.prefetch(0, experts); }).kind(), ErrorKind::kClosed);
  expect_at_rest(pool);
}

TEST(Pool, AForkedChildGetsErrorsAndEnds) {
  const TestStore store(1, 4);
  auto pool = std::make_unique<Pool>(slow_options(2, 100ms), Runtime{}, store.source(), nullptr);
  const std::vector<int32_t> experts = all_of(4);
  std::array<Claim::Entry, 4> entries;
  std::array<ReadyExpert, 1> ready;
  auto claim = std::make_unique<Claim>(*pool, 0, experts, entries);
  const pid_t child = fork();
  ASSERT_GE(child, 0);
  if (child == 0) {
    alarm(10);
    int32_t forked = 0;
    const auto count = [&](const auto& call) {
      try {
        call();
      } catch (const Error& error) {
        forked += error.kind() == ErrorKind::kForked;
      }
    };
    count([&] { claim->next(ready); });
    count([&] { release(*claim, 0); });
    claim.reset();
    count([&] { pool->promote(0, experts); });
    count([&] { pool->prefetch(0, experts); });
    count([&] { pool->evict(0, experts); });
    count([&] { pool->observe(0, std::vector<float>(4)); });
    count([&] { static_cast<void>(pool->state(0, 0)); });
    count([&] { static_cast<void>(pool->stats()); });
    count([&] { pool->drain(); });
    count([&] { pool->close(); });
    pool.reset();
    _exit(forked == 10 ? 0 : 1);
  }
  int status = 0;
  ASSERT_EQ(waitpid(child, &status, 0), child);
  EXPECT_TRUE(WIFEXITED(status) && WEXITSTATUS(status) == 0) << status;
  while (claim->next(ready) == 1) claim->release(ready);
  claim.reset();
  expect_at_rest(*pool);
}

// A raw checkpoint with two pieces per expert, neither of them aligned.
TEST(Pool, RawPiecesArriveWholeWhateverTheirAlignment) {
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
  const auto pack = [&](int32_t layer, std::span<const std::byte* const> pieces,
                        std::byte* record) {
    // The callback is not told the expert: the value says it.
    const int32_t id = (static_cast<int32_t>(pieces[0][0]) - 1) / 2;
    if (id / 6 != layer) throw Error(ErrorKind::kInvalid, "wrong layer");
    for (int32_t piece = 0; piece < 2; ++piece) {
      const int64_t size = 3001 + 1000 * piece + 7 * id;
      const auto value = std::byte(id * 2 + piece + 1);
      for (int64_t i = 0; i < size; ++i) {
        if (pieces[piece][i] != value) throw Error(ErrorKind::kInvalid, "wrong bytes");
      }
    }
    const auto packed = record_of(layer, id % 6);
    std::memcpy(record, packed.data(), kRecord);
  };
  for (const bool direct : {true, false}) {
    PoolOptions options = slow_options(6, 1ms);
    options.reader.direct = direct;
    options.staging = 2;  // fewer than the reads under way
    options.verify = Verify::kAlways;
    Pool pool(options, {}, source, pack);
    const auto check = [&] { pool.validate(); };
    for (int32_t round = 0; round < 3; ++round) {
      pool.prefetch(1, all_of(6));
      forward(pool, 0, all_of(6), 2, check);
      forward(pool, 1, all_of(6), 2, check);
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
          forward(pool, (thread + step) % 3, experts, 1 + step % 4);
        }
      });
    }
    for (std::thread& thread : threads) thread.join();
    pool.drain();
    expect_at_rest(pool);
    EXPECT_EQ(total(pool).accesses, 8 * 30 * kTopK);
  }
}

// Overlapping forwards that always find their experts must not keep another one from a slot for
// ever.
TEST(Pool, ForwardsThatHitDoNotStarveOneThatWaits) {
  const TestStore store(2, 4);
  Pool pool(options_of(2), {}, store.source(), nullptr);
  std::atomic<bool> stop = false;
  std::vector<std::thread> hitters;
  for (int32_t thread = 0; thread < 3; ++thread) {
    hitters.emplace_back([&] {
      while (!stop) forward(pool, 0, std::vector<int32_t>{0, 1}, 2);
    });
  }
  for (int32_t round = 0; round < 20; ++round) forward(pool, 1, std::vector<int32_t>{0, 1}, 2);
  stop = true;
  for (std::thread& thread : hitters) thread.join();
  expect_at_rest(pool);
}

// Whatever is injected: the right bytes or a typed error, invariants after every step, nothing
// pinned at the end.
TEST(Pool, KeepsItsInvariantsUnderRandomClaimsAndFaults) {
  const auto seed = std::random_device{}();
  SCOPED_TRACE("seed " + std::to_string(seed));
  std::mt19937 random(seed);
  constexpr int32_t kLayers = 3, kExperts = 8;
  const TestStore store(kLayers, kExperts);
  const std::array<const char*, 3> policies{"lru", "lfu", "slru"};
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
          forward(pool, layer, experts, 1 + draw() % 4, check);
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

// Mapped stores.

PoolOptions mapped_options(int32_t slots) {
  PoolOptions options = options_of(slots);
  options.reader.backend = "mmap";
  return options;
}

TEST(MappedPool, ForwardsFindTheirRecordsWhateverIsEvicted) {
  const auto seed = std::random_device{}();
  SCOPED_TRACE("seed " + std::to_string(seed));
  std::mt19937 draw(seed);
  const TestStore store(3, 8);
  Pool pool(mapped_options(9), {}, store.source(), nullptr);
  EXPECT_EQ(pool.memory_bytes(), 0);
  EXPECT_EQ(pool.mapped_bytes(), 24 * kRecord);
  for (int32_t step = 0; step < 300; ++step) {
    const auto layer = static_cast<int32_t>(draw() % 3);
    std::vector<int32_t> experts = all_of(8);
    std::shuffle(experts.begin(), experts.end(), draw);
    experts.resize(1 + draw() % 8);
    if (draw() % 8 == 0) pool.resize(1 + static_cast<int32_t>(draw() % 9));
    if (draw() % 4 == 0) pool.prefetch((layer + 1) % 3, experts);
    if (draw() % 4 == 0) pool.evict(layer, experts);
    forward(pool, layer, experts, 1 + draw() % 4, [&] { pool.validate(); });
  }
  pool.drain();
  expect_at_rest(pool);
  EXPECT_GT(total(pool).evicted, 0);
}

TEST(MappedPool, SizeIsAdviceAndTakesNoMemory) {
  const TestStore store(2, 8);
  Pool pool(mapped_options(16), {}, store.source(), nullptr);
  for (int32_t layer = 0; layer < 2; ++layer) forward(pool, layer, all_of(8));
  EXPECT_EQ(pool.slot_bytes(), 16 * kRecord);
  EXPECT_EQ(pool.resize(5), 5);
  EXPECT_EQ(pool.slot_bytes(), 5 * kRecord);
  EXPECT_EQ(total(pool).evicted, 11);
  EXPECT_EQ(pool.resize(16), 16);
  for (int32_t layer = 0; layer < 2; ++layer) forward(pool, layer, all_of(8));
  expect_at_rest(pool);
}

TEST(MappedPool, FileCutOffWhileItsBytesAreInUse) {
  const TestStore store(1, 4);
  Pool pool(mapped_options(4), {}, store.source(), nullptr);
  forward(pool, 0, all_of(4));
  const std::vector<int32_t> experts = all_of(4);
  {
    std::vector<Claim::Entry> entries(4);
    std::array<ReadyExpert, 4> ready;
    Claim claim(pool, 0, experts, entries);
    ASSERT_EQ(claim.next(ready), 4);
    store.truncate(kRecord);
    EXPECT_TRUE(is_record(ready[0].record, 0, ready[0].index));
    claim.check_read();
    EXPECT_EQ(ready[3].record[0], std::byte{0});  // and the process goes on
    const Error error = error_of([&] { claim.release({&ready[0], 1}); });
    EXPECT_EQ(error.kind(), ErrorKind::kRead);
    EXPECT_EQ(error.place().file, store.path());
  }
  pool.validate();
  // From now on at the promotion, before anybody touches it.
  const Error error = error_of([&] { forward(pool, 0, {{3}}); });
  EXPECT_EQ(error.kind(), ErrorKind::kRead);
  EXPECT_EQ(error.os_error(), ENODATA);
  EXPECT_EQ(error.place().expert, 3);
  forward(pool, 0, {{0}});
  for (int32_t expert = 1; expert < 4; ++expert)
    store.write(expert * kRecord, record_of(0, expert));
  forward(pool, 0, all_of(4));
  expect_at_rest(pool);
}

TEST(MappedPool, WhatTheKernelTookBackIsReadAgain) {
  const TestStore store(1, 4);
  Pool pool(mapped_options(4), {}, store.source(), nullptr);
  forward(pool, 0, all_of(4));
  // Cut off and written again, the last record's pages are mapped no more, and so can be dropped.
  store.truncate(3 * kRecord);
  store.truncate(4 * kRecord);
  store.write(3 * kRecord, record_of(0, 3));
  const int descriptor = ::open(store.path().c_str(), O_RDONLY);
  ASSERT_GE(descriptor, 0);
  posix_fadvise(descriptor, 0, 0, POSIX_FADV_DONTNEED);
  ::close(descriptor);
  forward(pool, 0, all_of(4));
  if (total(pool).hits == 4) GTEST_SKIP() << "this file system keeps what it was told to drop";
  EXPECT_EQ(total(pool).cold_misses, 5);
  EXPECT_EQ(total(pool).hits, 3);
  expect_at_rest(pool);
}

TEST(MappedPool, WrongBytesAreFound) {
  const TestStore store(1, 2);
  store.write(kRecord, record_of(0, 0));
  Pool pool(mapped_options(2), {}, store.source(), nullptr);
  forward(pool, 0, {{0}});
  EXPECT_EQ(error_of([&] { forward(pool, 0, {{1}}); }).kind(), ErrorKind::kChecksum);
  store.write(kRecord, record_of(0, 1));
  forward(pool, 0, all_of(2));
  expect_at_rest(pool);
}

TEST(MappedPool, RefusesWhatItCannotDo) {
  const TestStore store(1, 2);
  PoolOptions options = mapped_options(2);
  options.reader.interpose = with_faults({.bit_flip = .1});
  const Error faulty = error_of([&] { Pool pool(options, {}, store.source(), nullptr); });
  EXPECT_EQ(faulty.kind(), ErrorKind::kInvalid);
  Source raw = store.source();
  raw.raw = true;
  raw.checksums.clear();
  const auto pack = [](int32_t, std::span<const std::byte* const>, std::byte*) {};
  const Error error = error_of([&] { Pool pool(mapped_options(2), {}, raw, pack); });
  EXPECT_EQ(error.kind(), ErrorKind::kInvalid);
  EXPECT_NE(std::string(error.what()).find("convert"), std::string::npos);
}

// Of a file that is none of ours: what is not ours to mend ends the process as ever.
TEST(MappedPoolDeathTest, OtherSignalsGoWhereTheyWent) {
  const TestStore store(1, 2);
  const Pool pool(mapped_options(2), {}, store.source(), nullptr);
  const TestStore other(1, 2);
  const int descriptor = ::open(other.path().c_str(), O_RDONLY);
  ASSERT_GE(descriptor, 0);
  void* mapped = mmap(nullptr, kRecord, PROT_READ, MAP_SHARED, descriptor, 0);
  ::close(descriptor);
  ASSERT_NE(mapped, MAP_FAILED);
  other.truncate(0);
  EXPECT_DEATH(std::printf("%d", static_cast<const volatile char*>(mapped)[0]), "");
  munmap(mapped, kRecord);
}

}  // namespace
}  // namespace torch_mesh
