// Resizing a pool in use: no forward fails or gets wrong bytes, and memory is allocated and freed.
#include <gtest/gtest.h>
#include <linux/filter.h>
#include <linux/seccomp.h>
#include <sys/prctl.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <cerrno>
#include <cstring>
#include <fstream>
#include <future>
#include <optional>
#include <random>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "pool_fixture.h"
#include "seed.h"

namespace torch_mesh {
namespace {

using namespace std::chrono_literals;
using Experts = std::vector<int32_t>;

using testing::all_of;
using testing::eventually;
using testing::forward;
using testing::kRecord;
using testing::state_of;
using testing::TestStore;

constexpr int32_t kPerSegment = 4;
constexpr int64_t kLarge = int64_t{1} << 18;  // bytes of a record that a resident set shows

PoolOptions options_of(int32_t slots) {
  PoolOptions options = testing::options_of(slots);
  options.segment_bytes = kPerSegment * kRecord;
  return options;
}

void forward_large(Pool& pool, int32_t layer) {
  forward(
      pool, layer, all_of(24), {}, 3, [] {}, kLarge);
}

int32_t resident(const Pool& pool) {
  int32_t count = 0;
  for (int32_t layer = 0; layer < pool.layers(); ++layer) {
    for (int32_t expert = 0; expert < pool.experts(); ++expert) {
      count += state_of(pool, layer, expert) == SlotState::kReady;
    }
  }
  return count;
}

template <typename Call>
ErrorKind kind_of(const Call& call) {
  try {
    call();
  } catch (const Error& error) {
    return error.kind();
  }
  ADD_FAILURE() << "no error was thrown";
  return ErrorKind::kInvalid;
}

// A claim that has been handed all of its experts.
class Holder {
 public:
  Holder(Pool& pool, int32_t layer, Experts experts)
      : experts_(std::move(experts)), entries_(experts_.size()), ready_(experts_.size()) {
    claim_.emplace(pool, layer, experts_, entries_);
    for (size_t held = 0; held < experts_.size();) held += claim_->next(ready_);
  }
  void end() { claim_.reset(); }

 private:
  Experts experts_;
  std::vector<Claim::Entry> entries_;
  std::vector<ReadyExpert> ready_;
  std::optional<Claim> claim_;
};

TEST(Resize, MemoryIsFreedBySegmentsAndComesBack) {
  const TestStore store(1, 16);
  Pool pool(options_of(16), {}, store.source(), nullptr);
  pool.promote(0, all_of(16));
  EXPECT_EQ(pool.resize(5), 5);
  pool.validate();
  EXPECT_EQ(pool.slots(), 5);
  EXPECT_EQ(pool.max_slots(), 16);
  EXPECT_EQ(resident(pool), 5);
  EXPECT_EQ(pool.memory_bytes(), 8 * kRecord);  // two segments of four
  EXPECT_EQ(pool.stats()[0].evicted, 11);
  forward(pool, 0, all_of(16));
  EXPECT_EQ(resident(pool), 5);
  EXPECT_EQ(pool.resize(16), 16);
  pool.validate();
  EXPECT_EQ(pool.memory_bytes(), 16 * kRecord);
  forward(pool, 0, all_of(16));
  EXPECT_EQ(resident(pool), 16);
  const PoolStats stats = pool.detailed_stats();
  EXPECT_EQ(stats.shrinks, 1);
  EXPECT_EQ(stats.grows, 1);
  EXPECT_EQ(stats.slots, 16);
  pool.validate();
}

int64_t resident_set_bytes() {
  std::ifstream file("/proc/self/statm");
  int64_t size = 0, pages = 0;
  file >> size >> pages;
  return pages * sysconf(_SC_PAGESIZE);
}

// Pages of registered buffers stay until the ring unregisters them, even after an unmap. Such pages
// count against the limit of locked memory, and exceeding that would leave a note.
TEST(Resize, ShrinkingReducesTheResidentSet) {
  const TestStore store(2, 24, kLarge);
  for (const char* backend : {"threads", "uring"}) {
    if (std::string(backend) == "uring" && !uring_unavailable().empty()) continue;
    SCOPED_TRACE(backend);
    PoolOptions options = options_of(48);
    options.record_bytes = kLarge;
    options.segment_bytes = 8 * kLarge;
    options.reader.backend = backend;
    Pool pool(options, {}, store.source(), nullptr);
    for (int32_t round = 0; round < 3; ++round) {
      forward_large(pool, 0);
      forward_large(pool, 1);
      const int64_t before = resident_set_bytes();
      pool.resize(8);
      EXPECT_LT(resident_set_bytes(), before - 36 * kLarge);
      forward_large(pool, 0);
      pool.resize(48);
      EXPECT_GT(resident_set_bytes(), before - 4 * kLarge);
      pool.validate();
    }
    EXPECT_TRUE(pool.reader()->notes().empty()) << pool.reader()->notes()[0];
  }
}

int64_t pinned_kib() {
  std::ifstream file("/proc/self/status");
  int64_t kib = 0;
  for (std::string line; std::getline(file, line);) {
    if (std::sscanf(line.c_str(), "VmPin: %ld kB", &kib) == 1) return kib;
  }
  return -1;
}

// Makes every update of registered buffers fail with `error`, in this thread and its children.
bool refuse_buffer_updates(uint32_t error) {
  constexpr uint32_t kBuffersUpdate = 16;  // IORING_REGISTER_BUFFERS_UPDATE
  const auto load = [](size_t at) {
    return sock_filter BPF_STMT(BPF_LD | BPF_W | BPF_ABS, static_cast<uint32_t>(at));
  };
  std::array<sock_filter, 7> code{
      load(offsetof(seccomp_data, nr)),
      BPF_JUMP(BPF_JMP | BPF_JEQ | BPF_K, SYS_io_uring_register, 0, 4),
      load(offsetof(seccomp_data, args[1])),
      BPF_STMT(BPF_ALU | BPF_AND | BPF_K, 0x7fffffff),  // the rest is a flag
      BPF_JUMP(BPF_JMP | BPF_JEQ | BPF_K, kBuffersUpdate, 0, 1),
      BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_ERRNO | error),
      BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_ALLOW)};
  const sock_fprog program{code.size(), code.data()};
  return prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) == 0 &&
         prctl(PR_SET_SECCOMP, SECCOMP_MODE_FILTER, &program) == 0;
}

// A segment that the ring fails to unregister is not read into as a registered buffer. The other
// segments stay registered. A kernel without the call (EINVAL) makes the ring unregister all.
TEST(Resize, ARingThatKeepsASegmentKeepsTheOthersToo) {
  if (!uring_unavailable().empty()) GTEST_SKIP() << uring_unavailable();
  const TestStore store(1, 24, kLarge);
  for (const uint32_t error : {ENOMEM, EINVAL}) {
    SCOPED_TRACE(strerror(static_cast<int>(error)));
    std::thread([&] {
      if (!refuse_buffer_updates(error)) GTEST_SKIP() << "no seccomp filter can be set";
      PoolOptions options = options_of(24);
      options.record_bytes = kLarge;
      options.segment_bytes = 8 * kLarge;
      options.reader.backend = "uring";
      const int64_t others = pinned_kib();
      Pool pool(options, {}, store.source(), nullptr);
      const int64_t pinned = pinned_kib() - others;
      if (pinned == 0) GTEST_SKIP() << "no buffer can be registered";
      for (int32_t round = 0; round < 2; ++round) {
        forward_large(pool, 0);
        EXPECT_EQ(pool.resize(8), 8);
        forward_large(pool, 0);
        EXPECT_EQ(pool.resize(24), 24);
        EXPECT_EQ(pinned_kib() - others, error == ENOMEM ? pinned : 0);
      }
      forward_large(pool, 0);
      EXPECT_FALSE(pool.reader()->notes().empty());
      pool.validate();
    }).join();
  }
}

TEST(Resize, SlotsInUseAreFreedWhenTheirForwardEnds) {
  const TestStore store(2, 16);
  Pool pool(options_of(16), {}, store.source(), nullptr);
  Holder holder(pool, 0, all_of(14));
  EXPECT_EQ(pool.resize(2), 2);
  EXPECT_EQ(pool.slots(), 2);
  EXPECT_EQ(pool.memory_bytes(), 16 * kRecord);
  pool.validate();
  EXPECT_EQ(pool.resize(9), 9);  // the size may change again meanwhile
  EXPECT_EQ(pool.resize(1), 1);
  holder.end();
  EXPECT_TRUE(eventually([&] { return pool.memory_bytes() == 4 * kRecord; }));
  EXPECT_EQ(resident(pool), 1);
  pool.validate();
  forward(pool, 1, all_of(16));
}

TEST(Resize, NothingIsEvictedWhileAllSlotsAreInUse) {
  const TestStore store(1, 16);
  Pool pool(options_of(16), {}, store.source(), nullptr);
  Holder holder(pool, 0, all_of(16));
  EXPECT_EQ(pool.resize(1), 1);
  EXPECT_EQ(pool.resize(16), 16);
  holder.end();
  EXPECT_EQ(resident(pool), 16);
  pool.validate();
}

TEST(Resize, AReadUnderWayKeepsItsBufferUntilItEnds) {
  const TestStore store(1, 16);
  PoolOptions options = options_of(16);
  options.reader.interpose = with_faults({.delay = 1, .max_delay = 20000us});
  Pool pool(options, {}, store.source(), nullptr);
  pool.prefetch(0, all_of(16));  // into eight slots
  EXPECT_EQ(pool.resize(1), 1);
  pool.validate();
  pool.drain();
  EXPECT_TRUE(eventually([&] { return pool.memory_bytes() == 4 * kRecord; }));
  EXPECT_LE(resident(pool), 1);
  EXPECT_GE(pool.stats()[0].prefetches_unused, 7);
  pool.validate();
}

// Segments of four slots, and an I/O thread that block() keeps busy.
class BusyPool {
 public:
  explicit BusyPool(std::chrono::milliseconds timeout = 30s, const Runtime& runtime = {})
      : store_(1, 16) {
    PoolOptions options = options_of(16);
    options.timeout = timeout;
    const auto pack = [this](int32_t, std::span<const std::byte* const> pieces, std::byte* record) {
      blocked_ = true;
      opened_.wait();
      std::copy_n(pieces[0], kRecord, record);
    };
    pool_.emplace(options, runtime, store_.raw(), pack);
  }
  ~BusyPool() { unblock(); }
  Pool* operator->() { return &*pool_; }
  // Makes the I/O thread pack a record until unblock(). A resident record keeps its slot.
  void block() {
    pool_->prefetch(0, Experts{0});
    ASSERT_TRUE(eventually([&] { return blocked_.load(); }));
  }
  void unblock() {
    if (!std::exchange(unblocked_, true)) gate_.set_value();
  }
  int64_t records() {  // that the memory holds, without the staging buffers
    return pool_->slot_bytes() / kRecord;
  }

 private:
  TestStore store_;
  std::promise<void> gate_;
  std::shared_future<void> opened_ = gate_.get_future().share();
  std::atomic<bool> blocked_ = false;
  bool unblocked_ = false;
  std::optional<Pool> pool_;
};

TEST(Resize, TimesOutAndCompletesLater) {
  BusyPool pool(100ms);
  pool.block();
  EXPECT_EQ(kind_of([&] { pool->resize(4); }), ErrorKind::kTimeout);
  pool->validate();
  pool.unblock();
  EXPECT_TRUE(eventually([&] { return pool.records() == 4; }));
  EXPECT_EQ(pool->resize(4), 4);
}

TEST(Resize, CountsCompletedChangesAndNotRequests) {
  BusyPool pool(100ms);
  EXPECT_EQ(pool->resize(4), 4);
  pool.block();
  EXPECT_EQ(kind_of([&] { pool->resize(16); }), ErrorKind::kTimeout);
  EXPECT_EQ(kind_of([&] { pool->resize(4); }), ErrorKind::kTimeout);
  pool.unblock();
  EXPECT_TRUE(eventually([&] { return pool.records() == 4; }));
  const PoolStats stats = pool->detailed_stats();
  EXPECT_EQ(stats.shrinks, 1);
  EXPECT_EQ(stats.grows, 0);
  EXPECT_EQ(pool->resize(13), 13);  // by three segments
  EXPECT_EQ(pool->detailed_stats().grows, 1);
}

// Slots above a detached segment cannot be used.
TEST(Resize, ADetachingSegmentIsWaitedForBeforeThoseAboveItAttach) {
  BusyPool pool;
  EXPECT_EQ(pool->resize(8), 8);
  pool.block();
  auto smaller = std::async(std::launch::async, [&] { return pool->resize(4); });
  ASSERT_TRUE(eventually([&] { return pool->slots() == 4; }));
  auto larger = std::async(std::launch::async, [&] { return pool->resize(16); });
  EXPECT_EQ(larger.wait_for(100ms), std::future_status::timeout);
  EXPECT_EQ(pool.records(), 8);
  pool.unblock();
  EXPECT_EQ(larger.get(), 16);
  EXPECT_EQ(smaller.get(), 16);  // the last call decides
  pool->validate();
}

TEST(Resize, AnInterruptEndsTheWait) {
  static std::atomic<bool> interrupted;
  interrupted = false;
  Runtime runtime{};
  runtime.interrupted = [] { return interrupted.load(); };
  BusyPool pool(30s, runtime);
  pool.block();
  interrupted = true;
  EXPECT_EQ(kind_of([&] { pool->resize(1); }), ErrorKind::kInterrupted);
  pool->validate();
}

TEST(Resize, CloseEndsTheWait) {
  BusyPool pool;
  pool.block();
  auto resized = std::async(std::launch::async, [&] { pool->resize(1); });
  ASSERT_TRUE(eventually([&] { return pool->slots() == 1; }));
  pool->close();
  EXPECT_EQ(kind_of([&] { resized.get(); }), ErrorKind::kClosed);
  EXPECT_EQ(kind_of([&] { pool->resize(8); }), ErrorKind::kClosed);
}

TEST(Resize, RefusesInvalidSizes) {
  const TestStore store(1, 8);
  PoolOptions options = options_of(6);
  options.min_slots = 2;
  Pool pool(options, {}, store.source(), nullptr);
  for (const int32_t slots : {-1, 0, 1, 7}) {
    EXPECT_EQ(kind_of([&] { pool.resize(slots); }), ErrorKind::kInvalid);
  }
  EXPECT_EQ(pool.resize(2), 2);
  options.min_slots = 7;
  EXPECT_EQ(kind_of([&] { Pool(options, {}, store.source(), nullptr); }), ErrorKind::kInvalid);
  Pool memory(options_of(8), {}, 1, 8);
  EXPECT_EQ(kind_of([&] { memory.resize(4); }), ErrorKind::kInvalid);
}

// Random forwards, hints, faults and sizes, for every policy; invariants hold after every step.
TEST(Resize, KeepsItsInvariantsUnderForwardsAndFaults) {
  const uint64_t seed = testing::fresh_seed();
  SCOPED_TRACE("TORCH_MESH_TEST_SEED=" + std::to_string(seed));
  std::mt19937 random(seed);
  constexpr int32_t kLayers = 3, kExperts = 8, kSlots = 20;
  const TestStore store(kLayers, kExperts);
  std::vector<std::string> backends{"threads"};
  if (uring_unavailable().empty()) backends.push_back("uring");
  for (const std::string_view policy : policy_names()) {
    for (const std::string& backend : backends) {
      SCOPED_TRACE(std::string(policy) + " " + backend);
      PoolOptions options = options_of(kSlots);
      options.policy = policy;
      options.verify = Verify::kAlways;
      options.reader.backend = backend;
      Faults faults{.seed = random()};
      faults.short_read = .1, faults.eintr = .1, faults.eagain = .1, faults.eio_once = .05;
      faults.eio_always = .01, faults.delay = .3, faults.reorder = .1, faults.bit_flip = .01;
      faults.max_delay = 300us;
      options.reader.interpose = with_faults(faults);
      Pool pool(options, {}, store.source(), nullptr);
      const auto work = [&](uint32_t thread_seed) {
        std::mt19937 draw(thread_seed);
        for (int32_t step = 0; step < 40; ++step) {
          Experts experts = all_of(kExperts);
          std::shuffle(experts.begin(), experts.end(), draw);
          experts.resize(draw() % (kExperts + 1));
          const auto layer = static_cast<int32_t>(draw() % kLayers);
          try {
            if (draw() % 4 == 0) pool.prefetch((layer + 1) % kLayers, experts);
            if (draw() % 8 == 0) pool.evict(layer, experts);
            forward(pool, layer, experts);
          } catch (const Error& error) {
            ASSERT_TRUE(error.kind() == ErrorKind::kRead || error.kind() == ErrorKind::kChecksum)
                << error.what();
          }
        }
      };
      std::atomic<bool> stop = false;
      const auto resize = [&](uint32_t thread_seed) {
        std::mt19937 draw(thread_seed);
        while (!stop) {
          pool.resize(1 + static_cast<int32_t>(draw() % kSlots));
          pool.validate();
        }
      };
      std::vector<std::thread> threads, resizers;
      for (int32_t thread = 0; thread < 3; ++thread) threads.emplace_back(work, random());
      for (int32_t thread = 0; thread < 2; ++thread) resizers.emplace_back(resize, random());
      for (std::thread& thread : threads) thread.join();
      stop = true;
      for (std::thread& thread : resizers) thread.join();
      pool.drain();
      EXPECT_EQ(pool.pinned(), 0);
      pool.resize(kSlots);
      pool.validate();
      EXPECT_EQ(pool.memory_bytes(), kSlots * kRecord);
      pool.resize(3);
      pool.validate();
      EXPECT_EQ(pool.memory_bytes(), kPerSegment * kRecord);
    }
  }
}

}  // namespace
}  // namespace torch_mesh
