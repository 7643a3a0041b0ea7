// Failures: reads that fail or stall, wrong bytes, interrupts, forks, a pool that closes.
#include <gtest/gtest.h>
#include <sys/wait.h>

#include <array>
#include <atomic>
#include <cerrno>
#include <cstring>
#include <filesystem>
#include <functional>
#include <iterator>
#include <memory>
#include <new>
#include <optional>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "allocations.h"
#include "claim_fixture.h"
#include "error_of.h"
#include "pool_fixture.h"
#include "residency/core/expected.h"
#include "residency/core/slots.h"

namespace torch_mesh {
namespace {

using namespace std::chrono_literals;
using namespace testing;

TEST(Pool, AFailedReadReachesAllForwardsThatJoinedAndThePoolRecovers) {
  const TestStore store(2, 4);
  Pool pool(slow_options(2, 20ms), {}, store.source(), nullptr);
  store.truncate(5 * kRecord);  // experts 1 to 3 of layer 1 are gone
  std::atomic<int32_t> errors = 0;
  std::vector<std::thread> threads;
  for (int32_t i = 0; i < 4; ++i) {
    threads.emplace_back([&] {
      const Error error = error_of([&] { forward(pool, 1, {2}); });
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

TEST(Pool, AWrongChecksumIsRetriedOnceAndThenAnError) {
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
  EXPECT_EQ(total(pool).second_reads, 1);
  store.write(2 * kRecord, record_of(0, 2));
  forward(pool, 0, all_of(4));
  expect_at_rest(pool);
}

// A store whose second file, with the same records, is on another drive.
Source with_copy(const TestStore& store, const TestStore& copy) {
  Source source = store.source();
  source.files[0].copies = {copy.path()};
  return source;
}

TEST(Pool, AWrongCopyIsReplacedByTheFileItself) {
  const TestStore store(1, 8), copy(1, 8);
  if (direct_io_alignment(store.path()) < 0) GTEST_SKIP() << "no direct I/O";
  for (int32_t expert = 0; expert < 8; ++expert) {
    auto wrong = record_of(0, expert);
    for (const size_t chunk : {0, 4096}) wrong[chunk + 100] ^= std::byte{4};
    copy.write(expert * kRecord, wrong);
  }
  Pool pool(options_of(4), {}, with_copy(store, copy), nullptr);
  forward(pool, 0, all_of(8));
  expect_at_rest(pool);
  const LayerStats counts = total(pool);
  EXPECT_GT(counts.second_reads, 0);
  EXPECT_EQ(counts.bytes_read, (8 + counts.second_reads) * kRecord);
  EXPECT_EQ(counts.failed, 0);
  const auto error = pool.take_wrong_copy();
  ASSERT_TRUE(error);
  EXPECT_EQ(error->kind(), ErrorKind::kChecksum);
  EXPECT_EQ(error->place().file, copy.path());
  for (const std::string& part : {copy.path(), store.path(), std::string("of layer 0")}) {
    EXPECT_NE(std::string(error->what()).find(part), std::string::npos) << error->what();
  }
  EXPECT_FALSE(pool.take_wrong_copy()) << "each copy is named once";
}

TEST(Pool, AnOriginalThatIsWrongIsAnErrorWhateverTheCopyHolds) {
  const TestStore store(1, 2), copy(1, 2);
  if (direct_io_alignment(store.path()) < 0) GTEST_SKIP() << "no direct I/O";
  auto wrong = record_of(0, 0);
  for (const size_t chunk : {0, 4096}) wrong[chunk + 100] ^= std::byte{4};
  store.write(0, wrong);
  Pool pool(options_of(2), {}, with_copy(store, copy), nullptr);
  const Error error = error_of([&] { pool.promote(0, std::vector<int32_t>{0}); });
  EXPECT_EQ(error.kind(), ErrorKind::kChecksum);
  EXPECT_EQ(error.place().file, store.path());
  EXPECT_EQ(total(pool).second_reads, 1);
  EXPECT_FALSE(pool.take_wrong_copy());
  pool.drain();
  expect_at_rest(pool);
}

TEST(Pool, VerifyModesDecideWhenChecksumsAreCompared) {
  const TestStore store(1, 4);
  for (const auto& [verify, fails] : {std::pair{Verify::kFirst, false}, {Verify::kAlways, true}}) {
    for (const bool has_checksums : {true, false}) {
      store.write(0, record_of(0, 0));
      Source source = store.source();
      if (!has_checksums) source.checksums.clear();
      PoolOptions options = options_of(2);
      options.verify = verify;
      Pool pool(options, {}, source, nullptr);
      forward(pool, 0, {0});
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

TEST(Pool, ATimedOutReadKeepsItsBufferUntilItCompletes) {
  const TestStore store(1, 4);
  PoolOptions options = options_of(1);
  options.timeout = 30ms;
  options.reader.interpose = with_faults({.seed = 7, .delay = 1, .max_delay = 1s});
  Pool pool(options, {}, store.source(), nullptr);
  const Error error = error_of([&] {
    for (;;) forward(pool, 0, {1}), pool.evict(0, std::vector<int32_t>{1});
  });
  EXPECT_EQ(error.kind(), ErrorKind::kTimeout);
  EXPECT_EQ(error.place().expert, 1);
  EXPECT_EQ(error.place().file, store.path());
  EXPECT_EQ(state_of(pool, 0, 1), SlotState::kLoading);
  EXPECT_EQ(pool.pinned(), 0);
  pool.validate();
  // The only slot stays occupied until then, so another claim that waits for it times out too.
  try {
    forward(pool, 0, {2});
  } catch (const Error& full) {
    EXPECT_EQ(full.kind(), ErrorKind::kTimeout);
  }
  const auto state_of_either = [&](SlotState state) {
    return state_of(pool, 0, 1) == state || state_of(pool, 0, 2) == state;
  };
  while (state_of_either(SlotState::kLoading)) std::this_thread::sleep_for(5ms);
  ASSERT_TRUE(state_of_either(SlotState::kReady));
  forward(pool, 0, {state_of(pool, 0, 1) == SlotState::kReady ? 1 : 2});
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
  EXPECT_EQ(error_of([&] { forward(pool, 0, {0, 1}); }).kind(), ErrorKind::kInterrupted);
  EXPECT_EQ(pool.pinned(), 0);
  pool.validate();
}

// As a signal handler may. The interrupted forward waits for slots and for the handler.
TEST(Pool, TheInterruptHookMayRunAForward) {
  const TestStore store(2, 4);
  PoolOptions options = options_of(2);
  options.timeout = 5s;
  static std::function<void()> once;
  Runtime runtime;
  runtime.interrupted = [] {
    if (const auto call = std::exchange(once, nullptr)) call();
    return false;
  };
  Pool pool(options, runtime, store.source(), nullptr);
  const std::vector<int32_t> experts{0, 1};
  std::array<Claim::Entry, 2> entries;
  std::array<ReadyExpert, 2> ready;
  std::optional<Claim> held(std::in_place, pool, 0, experts, entries);
  for (int32_t count = 0; count < 2;) count += held->next(ready);
  once = [&] {
    held.reset();
    forward(pool, 1, {2, 3});
  };
  forward(pool, 0, {2, 3});
  EXPECT_EQ(once, nullptr);
  expect_at_rest(pool);
}

TEST(Pool, EveryAllocationMayFail) {
  const TestStore store(2, 4);
  const auto descriptors = [] {
    const std::filesystem::directory_iterator all("/proc/self/fd");
    return std::distance(begin(all), end(all));
  };
  const std::vector<int32_t> experts = all_of(4);
  for (const auto& [backend, direct] :
       {std::pair{"threads", true}, {"auto", true}, {"auto", false}}) {
    PoolOptions options = options_of(3);
    options.reader.backend = backend;
    options.reader.direct = direct;
    const auto before = descriptors();
    const int64_t allocations = with_each_allocation_failing([&] {
      try {
        Pool pool(options, {}, store.source(), nullptr);
        pool.promote(1, experts);
        pool.validate();
      } catch (const std::bad_alloc&) {
      } catch (const Error& error) {
        EXPECT_EQ(error.kind(), ErrorKind::kMemory) << error.what();
      }
    });
    EXPECT_GT(allocations, 50) << backend;
    EXPECT_EQ(descriptors(), before) << backend;
  }
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
  pool.expect(0, experts);  // of a forward that may run to its end
  expect_at_rest(pool);
}

TEST(Pool, AForkedChildGetsErrorsAndEnds) {
  const TestStore store(1, 4);
  auto pool = make_owned<Pool>(slow_options(2, 100ms), Runtime{}, store.source(), nullptr);
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
    count([&] { static_cast<void>(state_of(*pool, 0, 0)); });
    count([&] { static_cast<void>(pool->stats()); });
    count([&] { pool->drain(); });
    count([&] { pool->close(); });
    pool.reset();
    _exit(forked == 9 ? 0 : 1);
  }
  int status = 0;
  ASSERT_EQ(waitpid(child, &status, 0), child);
  EXPECT_TRUE(WIFEXITED(status) && WEXITSTATUS(status) == 0) << status;
  while (claim->next(ready) == 1) claim->release(ready);
  claim.reset();
  expect_at_rest(*pool);
}

}  // namespace
}  // namespace torch_mesh
