// Reads that a pool begins before a forward needs them.
#include <gtest/gtest.h>

#include <atomic>
#include <cstring>
#include <memory>
#include <span>
#include <utility>
#include <vector>

#include "base/at_end.h"
#include "error_of.h"
#include "holding_backend.h"
#include "pool_fixture.h"
#include "residency/core/expected.h"

namespace torch_mesh {
namespace {

using namespace std::chrono_literals;
using namespace testing;

TEST(Pool, PrefetchIsJoinedByTheClaimThatNeedsIt) {
  const TestStore store(2, 8);
  Pool pool(slow_options(8, 50ms), {}, store.source(), nullptr);
  pool.prefetch(1, std::vector<int32_t>{2, 3});
  EXPECT_EQ(state_of(pool, 1, 2), SlotState::kLoading);
  pool.validate();
  forward(pool, 1, {2, 3, 4});
  const LayerStats layer = pool.stats()[1];
  EXPECT_EQ(layer.prefetches, 2);
  EXPECT_EQ(layer.inflight_misses, 2);
  EXPECT_EQ(layer.cold_misses, 1);
  EXPECT_EQ(layer.bytes_read, 3 * kRecord);
  expect_at_rest(pool);
}

TEST(Pool, PrefetchDoesNotWaitAndTakesAtMostHalfOfTheSlots) {
  const TestStore store(1, 16);
  Pool pool(slow_options(8, 20ms), {}, store.source(), nullptr);
  forward(pool, 0, {0, 1, 2, 3, 4, 5, 6, 7});
  // 0 to 2 are the least recently used, but are prefetched too.
  pool.prefetch(0, std::vector<int32_t>{0, 1, 2, 8, 9, 10, 11, 12, 13});
  EXPECT_EQ(total(pool).prefetches, 4);
  pool.validate();
  pool.drain();
  for (int32_t expert : {0, 1, 2, 8, 9, 10, 11}) {
    EXPECT_EQ(state_of(pool, 0, expert), SlotState::kReady) << expert;
  }
  expect_at_rest(pool);
}

TEST(Pool, PrefetchesLeaveStagingBuffersToDemandReads) {
  const TestStore store(1, 16);
  const auto pack = [](ExpertId, std::span<const std::byte* const> pieces, std::byte* record) {
    std::memcpy(record, pieces[0], kRecord);
  };
  std::atomic<bool> held = true;
  PoolOptions options = options_of(16);
  options.staging = 4;
  options.timeout = 20s;
  options.reader.interpose = [&](std::unique_ptr<Backend> inner, auto) {
    return std::make_unique<HoldingBackend>(
        std::move(inner), [&](int64_t offset) { return held && offset < 6 * kRecord; });
  };
  Pool pool(options, {}, store.raw(), pack);
  const AtEnd release([&] { held = false; });
  pool.prefetch(0, all_of(8));
  forward(pool, 0, {7, 9});  // the prefetch of 7 waits for a buffer
  EXPECT_EQ(state_of(pool, 0, 0), SlotState::kLoading);
  pool.validate();
  held = false;
  pool.drain();
  expect_at_rest(pool);
}

TEST(Pool, PredictedExpertsAreReadInOrderUntilTheirLayerBegins) {
  const TestStore store(2, 16);
  PoolOptions options = slow_options(16, 20ms);
  options.reader.depth = 4;  // one chunk is for prefetches, so two records are in flight
  Pool pool(options, {}, store.source(), nullptr);
  pool.expect(1, std::vector<int32_t>{9, 3, 4, 5, 6});
  for (int32_t expert : {9, 3}) EXPECT_NE(state_of(pool, 1, expert), SlotState::kEmpty) << expert;
  EXPECT_EQ(state_of(pool, 1, 6), SlotState::kEmpty);
  pool.validate();
  pool.drain();  // each read that ends begins the next one
  for (int32_t expert : {9, 3, 4, 5, 6}) EXPECT_EQ(state_of(pool, 1, expert), SlotState::kReady);

  pool.expect(0, all_of(16));
  forward(pool, 0, {0, 15});
  pool.drain();
  EXPECT_EQ(state_of(pool, 0, 15), SlotState::kReady);
  EXPECT_EQ(state_of(pool, 0, 14), SlotState::kEmpty) << "was read after its layer had begun";
  EXPECT_EQ(pool.stats()[0].cold_misses, 1);
  expect_at_rest(pool);
}

TEST(Pool, PredictedExpertsAreReadOnce) {
  SlotTable slots(1, 8, 4, make_policy("lru", {1, 8}));
  Expected expected(slots);
  expected.set(0, std::vector<int32_t>{5, 2}, Phase::kNone);
  const int32_t first = expected.read_next();
  EXPECT_EQ(slots[first].expert, 5);
  slots.failed(first, 0, Error(ErrorKind::kClosed, "at once"));
  EXPECT_EQ(slots[expected.read_next()].expert, 2);
  EXPECT_EQ(expected.read_next(), -1);
}

TEST(Pool, PredictionsThatAreSeldomRightAreNotRead) {
  SlotTable slots(2, 8, 16, make_policy("lru", {2, 8}));
  Expected expected(slots);
  const std::vector<int32_t> guesses{5, 2, 7};
  // The predictions that a layer reads. Each read fails, so the expert is cold the next time.
  const auto read = [&](int32_t layer) {
    std::vector<int32_t> ids;
    expected.set(layer, guesses, Phase::kNone);
    for (;;) {
      const int32_t slot = expected.read_next();
      if (slot < 0) return ids;
      ids.push_back(slots[slot].expert % 8);
      slots.failed(slot, 0, Error(ErrorKind::kClosed, "at once"));
    }
  };
  const auto forwards = [&](int32_t count, const std::vector<int32_t>& used) {
    for (int32_t i = 0; i < count; ++i) {
      expected.set(0, guesses, Phase::kNone);
      expected.begin(0, used);
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
  const int32_t slot = slots.read(2, Urgency::kDemand, Phase::kNone);
  slots.landed(slot, 0);
  forwards(2000, {7});
  slots.evict(slot, Phase::kNone);
  EXPECT_EQ(read(0), (std::vector<int32_t>{2, 7})) << "nothing is learned of what is there";
  expected.begin(1, {});
  forwards(1, {5});
  EXPECT_EQ(read(0), (std::vector<int32_t>{2, 7})) << "one more or less changes nothing";
}

TEST(Pool, PredictionsRightHalfTheTimeAreReadOnlyIfTheyEndInTime) {
  for (const bool idle : {false, true}) {
    SlotTable slots(1, 8, 8, make_policy("lru", {1, 8}));
    Expected expected(slots);
    const std::vector<int32_t> guesses{5, 2};
    bool asked = false;
    for (int32_t i = 0; i < 400; ++i) {
      asked = false;
      std::vector<int32_t> reads;
      expected.set(0, guesses, Phase::kNone);
      for (;;) {
        const int32_t slot = expected.read_next();
        if (slot < 0) break;
        asked |= slots[slot].expert == 2;
        reads.push_back(slot);
        if (idle) slots.landed(slot, 0);
      }
      const int32_t second = i % 2 == 0 ? 2 : 3;
      expected.begin(0, std::vector<int32_t>{5, second});
      for (const int32_t slot : reads) {
        if (!idle) slots.landed(slot, 0);
        slots.evict(slot, Phase::kNone);
      }
    }
    EXPECT_EQ(asked, idle);
  }
}

TEST(Pool, PredictedReadsDoNotEvictPredictedExperts) {
  const TestStore store(1, 16);
  PoolOptions options = slow_options(8, 5ms);
  options.policy = "lru";
  Pool pool(options, {}, store.source(), nullptr);
  for (int32_t expert = 0; expert < 8; ++expert) forward(pool, 0, {expert});
  // 0 to 2 are the least recently used, but are prefetched too.
  pool.expect(0, std::vector<int32_t>{8, 9, 10, 11, 12, 0, 1, 2});
  pool.drain();
  for (int32_t expert : {0, 1, 2, 8, 9, 10, 11, 12}) {
    EXPECT_EQ(state_of(pool, 0, expert), SlotState::kReady) << expert;
  }
  EXPECT_EQ(error_of([&] { pool.expect(0, std::vector<int32_t>{16}); }).kind(),
            ErrorKind::kInvalid);
  expect_at_rest(pool);
}

}  // namespace
}  // namespace torch_mesh
