// The pool's counters by phase and layer, and failed prefetches.
#include <gtest/gtest.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <cstring>
#include <future>
#include <thread>
#include <vector>

#include "pool_fixture.h"

namespace torch_mesh {
namespace {

using namespace testing;
using namespace std::chrono_literals;

using Experts = std::vector<int32_t>;

const LayerStats& layer_of(const PoolStats& stats, Phase phase, int32_t layer = 0) {
  return stats.layers[static_cast<size_t>(phase)][layer];
}

constexpr ForwardPart kDecodeStep{Phase::kDecode, true};
constexpr ForwardPart kPrompt{Phase::kPrefill, true};

TEST(PoolStats, TimeOutsideIsBetweenLayersAndDecodeStepsOfOneThread) {
  const TestStore store(3, 8);
  Pool pool(options_of(24), {}, store.source(), nullptr);
  const auto outside = [&](Phase phase, int32_t layer) {
    return layer_of(pool.detailed_stats(), phase, layer).outside_nanoseconds;
  };
  forward(pool, 0, {0}, kDecodeStep);
  EXPECT_EQ(outside(Phase::kDecode, 0), 0);  // the first forward has no time before it
  forward(pool, 1, {0}, kDecodeStep);
  EXPECT_GT(outside(Phase::kDecode, 1), 0);
  pool.promote(2, Experts{0});         // no forward
  forward(pool, 0, {0}, kDecodeStep);  // the next step
  EXPECT_GT(outside(Phase::kDecode, 0), 0);
  forward(pool, 0, {0}, kPrompt);
  forward(pool, 2, {0}, kPrompt);
  EXPECT_GT(outside(Phase::kPrefill, 2), 0);
  forward(pool, 0, {0}, kPrompt);
  EXPECT_EQ(outside(Phase::kPrefill, 0), 0);
  std::thread([&] { forward(pool, 1, {1}, kPrompt); }).join();
  EXPECT_EQ(outside(Phase::kPrefill, 1), 0);
  pool.reset_stats();
  forward(pool, 2, {1}, kPrompt);
  EXPECT_EQ(outside(Phase::kPrefill, 2), 0);
}

TEST(PoolStats, PhasesAreKeptApartAndAddUp) {
  const TestStore store(2, 8);
  Pool pool(options_of(6), {}, store.source(), nullptr);
  forward(pool, 0, {0, 1, 2, 3, 4}, {Phase::kPrefill, false});
  forward(pool, 0, {4, 5}, kPrompt);
  forward(pool, 1, {0, 1}, kDecodeStep);
  forward(pool, 1, {0, 2}, kDecodeStep);
  pool.promote(0, Experts{7});
  const PoolStats stats = pool.detailed_stats();
  EXPECT_EQ(layer_of(stats, Phase::kPrefill).forwards, 1);  // in two parts
  EXPECT_EQ(layer_of(stats, Phase::kPrefill).accesses, 7);
  EXPECT_EQ(layer_of(stats, Phase::kPrefill).hits, 1);
  EXPECT_EQ(layer_of(stats, Phase::kPrefill).promoted, 6);
  EXPECT_EQ(layer_of(stats, Phase::kDecode).accesses, 0);
  EXPECT_EQ(layer_of(stats, Phase::kDecode, 1).forwards, 2);
  EXPECT_EQ(layer_of(stats, Phase::kDecode, 1).cold_misses, 3);
  // An eviction counts at the victim's layer, in the phase of the read that needed the slot.
  EXPECT_EQ(layer_of(stats, Phase::kDecode).evicted, 3);
  EXPECT_EQ(layer_of(stats, Phase::kNone).cold_misses, 1);
  EXPECT_EQ(layer_of(stats, Phase::kNone).forwards, 0);
  EXPECT_GT(layer_of(stats, Phase::kDecode, 1).decision_nanoseconds, 0);
  EXPECT_GT(layer_of(stats, Phase::kDecode, 1).expert_nanoseconds,
            layer_of(stats, Phase::kDecode, 1).stall_nanoseconds);

  const std::vector<LayerStats> sums = pool.stats();
  for (int32_t layer = 0; layer < 2; ++layer) {
    LayerStats sum;
    ExpertStats experts;
    for (Phase phase : {Phase::kNone, Phase::kPrefill, Phase::kDecode}) {
      sum += layer_of(stats, phase, layer);
    }
    for (int32_t expert = 0; expert < 8; ++expert) {
      const ExpertStats& one = stats.experts[layer * 8 + expert];
      experts.accesses += one.accesses, experts.hits += one.hits;
      experts.cold_misses += one.cold_misses, experts.promoted += one.promoted;
      experts.evicted += one.evicted;
    }
    EXPECT_EQ(sum.accesses, sums[layer].accesses);
    EXPECT_EQ(sum.bytes_read, sums[layer].bytes_read);
    EXPECT_EQ(experts.accesses, sums[layer].accesses);
    EXPECT_EQ(experts.hits, sums[layer].hits);
    EXPECT_EQ(experts.cold_misses, sums[layer].cold_misses);
    EXPECT_EQ(experts.promoted, sums[layer].promoted);
    EXPECT_EQ(experts.evicted, sums[layer].evicted);
  }
  EXPECT_EQ(stats.experts[8].hits, 1);  // expert 0 of layer 1
  pool.validate();
}

// A forward of layer 0 that uses experts 0 and 1 and defers 2 and 3. Afterwards 2 and 3 are the
// least recently used.
void forward_that_defers(Pool& pool) {
  const Experts experts{0, 1, 2, 3};
  std::array<Claim::Entry, 2> entries;
  Claim claim(pool, 0, experts, entries,
              {.phase = Phase::kDecode, .deferral = {.experts = std::span(experts).last(2)}});
  ReadyExpert ready;
  std::vector<int32_t> handed_out;
  while (claim.next({&ready, 1}) > 0) handed_out.push_back(ready.index);
  std::ranges::sort(handed_out);
  EXPECT_EQ(handed_out, (Experts{0, 1}));
  pool.drain();
  pool.validate();
  release(claim, 0);
  release(claim, 1);
}

constexpr ForwardPart kVisit{.kind = ClaimKind::kVisit};

TEST(PoolStats, AnExpertThatIsNamedTwiceIsReadOnce) {
  const TestStore store(1, 8);
  Pool pool(options_of(6), {}, store.source(), nullptr);
  forward(pool, 0, {3, 1, 3}, kDecodeStep);
  const PoolStats stats = pool.detailed_stats();
  const LayerStats& decode = layer_of(stats, Phase::kDecode);
  EXPECT_EQ(decode.accesses, 3);
  EXPECT_EQ(decode.cold_misses, 2);
  EXPECT_EQ(decode.inflight_misses, 1);
  EXPECT_EQ(decode.promoted, 2);
}

TEST(PoolStats, AVisitIsNoAccessAndNoForward) {
  const TestStore store(2, 8);
  Pool pool(options_of(4), {}, store.source(), nullptr);
  forward(pool, 0, {0, 1}, kDecodeStep);
  forward(pool, 0, {1, 2, 3}, kVisit);
  const PoolStats stats = pool.detailed_stats();
  EXPECT_EQ(layer_of(stats, Phase::kNone).accesses, 0);
  EXPECT_EQ(layer_of(stats, Phase::kNone).promoted, 2);  // its reads are counted nevertheless
  EXPECT_EQ(layer_of(stats, Phase::kNone).bytes_read, 2 * kRecord);
  EXPECT_EQ(layer_of(stats, Phase::kDecode).accesses, 2);
  EXPECT_EQ(stats.experts[1].accesses, 1);
  EXPECT_EQ(pool.forwards(0), 1);
  EXPECT_EQ(pool.model_use().tokens[0], 1);
  pool.validate();
}

TEST(PoolStats, AVisitDoesNotCountAPrefetchAsUsed) {
  const TestStore store(2, 8);
  Pool pool(options_of(4), {}, store.source(), nullptr);
  pool.prefetch(0, Experts{0, 1});
  pool.drain();
  forward(pool, 0, {0, 1}, kVisit);
  EXPECT_EQ(pool.stats()[0].prefetches_used, 0);
  forward(pool, 0, {0}, kDecodeStep);
  EXPECT_EQ(pool.stats()[0].prefetches_used, 1);
  pool.evict(0, Experts{0, 1});
  EXPECT_EQ(pool.stats()[0].prefetches_unused, 1);
  pool.validate();
}

TEST(PoolStats, VisitsDoNotChangeThePolicysState) {
  const TestStore store(1, 8);
  for (const char* policy : {"lfu", "heat"}) {
    // Returns the experts that are resident in the end.
    const auto after = [&](int32_t visits) {
      PoolOptions options = options_of(4);
      options.policy = policy;
      Pool pool(options, {}, store.source(), nullptr);
      for (int32_t round = 0; round < 8; ++round) {
        for (const int32_t expert : {0, 1, 2}) forward(pool, 0, {expert}, kDecodeStep);
      }
      for (int32_t visit = 0; visit < visits; ++visit) forward(pool, 0, {3}, kVisit);
      for (const int32_t expert : {4, 5, 4, 6}) forward(pool, 0, {expert}, kDecodeStep);
      pool.validate();
      Experts resident;
      for (int32_t expert = 0; expert < 8; ++expert) {
        if (state_of(pool, 0, expert) == SlotState::kReady) resident.push_back(expert);
      }
      return resident;
    };
    EXPECT_EQ(after(1), after(40)) << policy;
  }
}

TEST(PoolStats, AVisitKeepsThePredictionsOfItsLayer) {
  const TestStore store(2, 16);
  PoolOptions options = options_of(12);
  // Slow reads, one at a time, so that most predictions wait.
  options.reader.depth = 1;
  options.reader.interpose = with_faults({.delay = 1, .max_delay = 20ms});
  Pool pool(options, {}, store.source(), nullptr);
  pool.expect(1, Experts{0, 1, 2, 3}, Phase::kDecode);
  forward(pool, 1, {7}, kVisit);
  const auto there = [&] {
    int32_t count = 0;
    for (int32_t expert = 0; expert < 4; ++expert) {
      count += state_of(pool, 1, expert) == SlotState::kReady;
    }
    return count;
  };
  for (int32_t look = 0; look < 1000 && there() < 4; ++look) {
    std::this_thread::sleep_for(10ms);
  }
  EXPECT_EQ(there(), 4);
}

TEST(PoolStats, DeferredExpertsAreCountedAndReadOnce) {
  const TestStore store(2, 8);
  Pool pool(options_of(5), {}, store.source(), nullptr);
  forward_that_defers(pool);
  forward(pool, 1, {0, 1, 2}, kDecodeStep);  // evicts experts already used, not deferred ones
  EXPECT_EQ(state_of(pool, 0, 2), SlotState::kReady);
  EXPECT_EQ(state_of(pool, 0, 3), SlotState::kReady);
  forward(pool, 0, {2, 3}, {.phase = Phase::kDecode, .last = false, .kind = ClaimKind::kDeferred});
  const PoolStats stats = pool.detailed_stats();
  const LayerStats& layer = layer_of(stats, Phase::kDecode);
  EXPECT_EQ(layer.forwards, 1);
  EXPECT_EQ(layer.accesses, 4);
  EXPECT_EQ(layer.cold_misses, 2);
  EXPECT_EQ(layer.deferred, 2);
  EXPECT_EQ(layer.promoted, 4);
  EXPECT_EQ(layer.prefetches, 0);
  EXPECT_EQ(stats.experts[2].deferred, 1);
  EXPECT_EQ(stats.experts[2].accesses, 1);
  pool.validate();
}

TEST(PoolStats, DeferredExpertsAreEvictedWhenNothingElseIsEvictable) {
  const TestStore store(2, 8);
  Pool pool(options_of(5), {}, store.source(), nullptr);
  forward_that_defers(pool);
  forward(pool, 1, {0, 1, 2, 3, 4}, kDecodeStep);
  EXPECT_EQ(state_of(pool, 0, 2), SlotState::kEmpty);
  forward(pool, 0, {2, 3}, {.phase = Phase::kDecode, .last = false, .kind = ClaimKind::kDeferred});
  EXPECT_EQ(layer_of(pool.detailed_stats(), Phase::kDecode).promoted, 6);
  pool.validate();
}

TEST(PoolStats, APrefetchedExpertThatIsDeferredCountsAsUsed) {
  const TestStore store(2, 8);
  Pool pool(options_of(8), {}, store.source(), nullptr);
  pool.prefetch(0, Experts{2}, Phase::kDecode);
  forward_that_defers(pool);
  const LayerStats layer = layer_of(pool.detailed_stats(), Phase::kDecode);
  EXPECT_EQ(layer.prefetches_used, 1);
  EXPECT_EQ(layer.deferred, 2);
  EXPECT_EQ(layer.promoted, 4);
}

TEST(PoolStats, APrefetchIsUsedUnusedOrPending) {
  const TestStore store(2, 8);
  Pool pool(options_of(8), {}, store.source(), nullptr);
  pool.prefetch(0, Experts{0, 1, 2, 3}, Phase::kDecode);
  pool.drain();
  forward(pool, 0, {0, 1}, kPrompt);  // used; counted in the phase that queued the reads
  forward(pool, 0, {0, 1}, kDecodeStep);
  pool.validate();
  LayerStats decode = layer_of(pool.detailed_stats(), Phase::kDecode);
  EXPECT_EQ(decode.prefetches, 4);
  EXPECT_EQ(decode.prefetches_used, 2);
  EXPECT_EQ(decode.prefetches_unused, 0);
  EXPECT_EQ(decode.bytes_read, 4 * kRecord);
  EXPECT_EQ(layer_of(pool.detailed_stats(), Phase::kPrefill).hits, 2);

  EXPECT_EQ(pool.evict(0, Experts{0, 2}), 2);  // 0 has been used
  forward(pool, 1, {0, 1, 2, 3, 4, 5, 6, 7}, kPrompt);
  pool.validate();
  decode = layer_of(pool.detailed_stats(), Phase::kDecode);
  EXPECT_EQ(decode.prefetches_used, 2);
  EXPECT_EQ(decode.prefetches_unused, 2);
  EXPECT_EQ(decode.unused_prefetch_bytes, 2 * kRecord);
  EXPECT_EQ(pool.detailed_stats().experts[2].prefetches, 1);
}

TEST(PoolStats, AResetForgetsPendingPrefetches) {
  const TestStore store(1, 8);
  Pool pool(options_of(8), {}, store.source(), nullptr);
  pool.prefetch(0, Experts{0, 1}, Phase::kDecode);
  pool.drain();
  pool.reset_stats();
  pool.validate();
  forward(pool, 0, {0}, kDecodeStep);
  pool.evict(0, Experts{1});
  const LayerStats decode = layer_of(pool.detailed_stats(), Phase::kDecode);
  EXPECT_EQ(decode.prefetches_used, 0);
  EXPECT_EQ(decode.prefetches_unused, 0);
  EXPECT_EQ(decode.hits, 1);
  pool.validate();
}

// Counts from after a reset may be larger than earlier ones. Only the number of resets tells them
// apart.
TEST(PoolStats, ResetsAreCounted) {
  const TestStore store(1, 8);
  Pool pool(options_of(8), {}, store.source(), nullptr);
  for (int64_t resets = 0; resets < 3; ++resets) {
    forward(pool, 0, {0, 1}, kDecodeStep);
    EXPECT_EQ(pool.totals().resets, resets);
    EXPECT_EQ(pool.detailed_stats().resets, resets);
    EXPECT_EQ(pool.totals().counts.accesses, 2);
    pool.reset_stats();
    EXPECT_EQ(pool.totals().counts.accesses, 0);
  }
}

TEST(PoolStats, AFailedPrefetchIsKeptAndReachesNoForward) {
  const TestStore store(2, 4);
  Pool pool(options_of(8), {}, store.source(), nullptr);
  store.truncate(4 * kRecord);  // layer 1 is gone
  pool.prefetch(1, Experts{0, 1}, Phase::kDecode);
  pool.prefetch(0, Experts{0}, Phase::kDecode);
  pool.drain();
  PoolStats stats = pool.detailed_stats();
  const LayerStats& failed = layer_of(stats, Phase::kDecode, 1);
  EXPECT_EQ(failed.prefetches_failed, 2);
  EXPECT_EQ(failed.prefetches_unused, 2);
  EXPECT_EQ(failed.unused_prefetch_bytes, 0);
  EXPECT_EQ(failed.failed, 2);
  ASSERT_TRUE(stats.prefetch_error);
  EXPECT_EQ(stats.prefetch_error->kind(), ErrorKind::kRead);
  EXPECT_EQ(stats.prefetch_error->place().layer, 1);
  EXPECT_EQ(stats.prefetch_error->place().file, store.path());
  EXPECT_EQ(state_of(pool, 0, 0), SlotState::kReady);  // prefetching went on
  forward(pool, 0, {0, 1}, kDecodeStep);
  for (int32_t expert = 0; expert < 4; ++expert) {
    store.write((4 + expert) * kRecord, record_of(1, expert));
  }
  forward(pool, 1, {0, 1}, kDecodeStep);
  pool.reset_stats();
  EXPECT_FALSE(pool.detailed_stats().prefetch_error);
  pool.validate();
}

// A prefetch holds the only staging buffer. Another prefetch and then a forward's read wait for it.
TEST(PoolStats, AForwardGetsABufferBeforeAPrefetch) {
  const TestStore store(1, 8);
  std::promise<void> queued;
  std::vector<int32_t> packed;
  const auto pack = [&](int32_t, std::span<const std::byte* const> pieces, std::byte* record) {
    if (packed.empty()) queued.get_future().wait();
    packed.push_back(static_cast<int32_t>(pieces[0][2]));
    std::memcpy(record, pieces[0], kRecord);
  };
  PoolOptions options = options_of(8);
  options.staging = 1;
  Pool pool(options, {}, store.raw(), pack);
  pool.prefetch(0, Experts{1}, Phase::kDecode);
  pool.prefetch(0, Experts{2}, Phase::kDecode);
  const Experts experts{3};
  std::array<Claim::Entry, 1> entries;
  std::array<ReadyExpert, 1> ready;
  {
    Claim claim(pool, 0, experts, entries, kDecodeStep);
    queued.set_value();
    ASSERT_EQ(claim.next(ready), 1);
    release(claim, 0);
  }
  pool.drain();
  EXPECT_EQ(packed, (std::vector<int32_t>{1, 3, 2}));
}

// The first packing of expert 2 fails after a forward has begun to wait for it.
TEST(PoolStats, AForwardThatJoinsAFailingPrefetchGetsAReadOfItsOwn) {
  const TestStore store(1, 4);
  std::promise<void> joined;
  std::atomic<int32_t> packings = 0;
  const auto pack = [&](int32_t, std::span<const std::byte* const> pieces, std::byte* record) {
    if (++packings == 1) {
      joined.get_future().wait();
      throw Error(ErrorKind::kInvalid, "not this time");
    }
    std::memcpy(record, pieces[0], kRecord);
  };
  Pool pool(options_of(4), {}, store.raw(), pack);
  pool.prefetch(0, Experts{2}, Phase::kDecode);
  const Experts experts{2};
  std::array<Claim::Entry, 1> entries;
  std::array<ReadyExpert, 1> ready;
  {
    Claim claim(pool, 0, experts, entries, kDecodeStep);
    joined.set_value();
    ASSERT_EQ(claim.next(ready), 1);
    EXPECT_TRUE(is_record(ready[0].record, 0, 2));
    release(claim, 0);
  }
  const PoolStats stats = pool.detailed_stats();
  const LayerStats& decode = layer_of(stats, Phase::kDecode);
  ASSERT_TRUE(stats.prefetch_error);
  EXPECT_NE(std::string(stats.prefetch_error->what()).find("not this time"), std::string::npos);
  EXPECT_EQ(decode.prefetches_failed, 1);
  EXPECT_EQ(decode.prefetches_used, 1);
  EXPECT_EQ(decode.failed, 0);
  EXPECT_EQ(decode.promoted, 1);
  EXPECT_EQ(decode.inflight_misses, 1);
  EXPECT_EQ(decode.bytes_read, 2 * kRecord);
  pool.validate();
}

TEST(PoolStats, AForwardFailsIfItsOwnReadFails) {
  const TestStore store(1, 4);
  std::promise<void> joined;
  std::atomic<int32_t> packings = 0;
  const auto pack = [&](int32_t, std::span<const std::byte* const>, std::byte*) {
    if (++packings == 1) joined.get_future().wait();
    throw Error(ErrorKind::kInvalid, "never");
  };
  Pool pool(options_of(4), {}, store.raw(), pack);
  pool.prefetch(0, Experts{2}, Phase::kDecode);
  const Experts experts{2};
  std::array<Claim::Entry, 1> entries;
  std::array<ReadyExpert, 1> ready;
  {
    Claim claim(pool, 0, experts, entries, kDecodeStep);
    joined.set_value();
    EXPECT_THROW(claim.next(ready), Error);
  }
  EXPECT_EQ(packings, 2);
  EXPECT_EQ(layer_of(pool.detailed_stats(), Phase::kDecode).failed, 1);
  EXPECT_EQ(layer_of(pool.detailed_stats(), Phase::kDecode).forwards, 1);
  EXPECT_EQ(pool.pinned(), 0);
  pool.validate();
}

TEST(PoolStats, WaitingForForwardsEndsWithThemOrWithThePool) {
  const TestStore store(2, 4);
  Pool pool(options_of(8), {}, store.source(), nullptr);
  EXPECT_FALSE(pool.wait_for_forwards(1, 1, 1ms));
  EXPECT_TRUE(pool.wait_for_forwards(1, 0, 1ms));
  auto third = std::async(std::launch::async, [&] { return pool.wait_for_forwards(1, 3, 30s); });
  forward(pool, 1, {0}, {Phase::kDecode, false});  // not the last part of a forward
  for (int32_t step = 0; step < 3; ++step) {
    EXPECT_EQ(pool.forwards(1), step);
    forward(pool, 0, {0}, kDecodeStep);
    forward(pool, 1, {1}, kDecodeStep);
    pool.reset_stats();
  }
  EXPECT_TRUE(third.get());
  auto never = std::async(std::launch::async, [&] { return pool.wait_for_forwards(0, 9, 30s); });
  pool.close();
  EXPECT_FALSE(never.get());
}

// Counters are read and reset while forwards run. ThreadSanitizer checks this for races.
TEST(PoolStats, ResetsAndReadsAtAnyMomentLeaveSumsThatAddUp) {
  const TestStore store(2, 8);
  PoolOptions options = options_of(4);
  options.reader.interpose = with_faults({.delay = .5, .max_delay = 200us});
  Pool pool(options, {}, store.source(), nullptr);
  std::atomic<bool> stop = false;
  std::thread reader([&] {
    while (!stop) {
      pool.validate();
      const PoolStats stats = pool.detailed_stats();
      const LayerStats& decode = layer_of(stats, Phase::kDecode);
      EXPECT_EQ(decode.hits + decode.cold_misses + decode.inflight_misses, decode.accesses);
      pool.reset_stats();
    }
  });
  std::vector<std::thread> threads;
  for (int32_t thread = 0; thread < 2; ++thread) {
    threads.emplace_back([&, thread] {
      for (int32_t step = 0; step < 60; ++step) {
        const int32_t at = (3 * thread + step) % 8;
        pool.prefetch(1 - thread, Experts{at, (at + 1) % 8}, Phase::kDecode);
        forward(pool, thread, {at, (at + 2) % 8}, step % 2 == 0 ? kDecodeStep : kPrompt);
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  stop = true;
  reader.join();
  pool.drain();
  pool.validate();
  EXPECT_EQ(pool.forwards(0) + pool.forwards(1), 120);
}

}  // namespace
}  // namespace torch_mesh
