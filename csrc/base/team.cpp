#include "base/team.h"

#include <linux/futex.h>
#include <sys/resource.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <new>
#include <utility>
#if defined(__x86_64__)
#include <immintrin.h>
#endif

#include "base/short_slices.h"
#include "base/start_thread.h"

namespace torch_mesh {
namespace {

constexpr uint32_t kTaken = 1u << 31;                           // a caller has it
constexpr uint32_t kSleeps = 1u << 30;                          // the caller sleeps until all leave
constexpr uint32_t kSeat = 1u << 15, kSeats = kSleeps - kSeat;  // free seats
constexpr uint32_t kInside = kSeat - 1;                         // threads that run parts
static_assert(kMaxThreads <= static_cast<int32_t>(kInside));

// Usually covers the gap between two regions of a decode step. Waking a thread takes tens of
// microseconds in a virtual machine.
constexpr std::chrono::microseconds kSpin{500};
// How long a caller spins for parts that other threads compute, before it sleeps.
constexpr std::chrono::microseconds kSpinForOthers{20};
// How long a thread that was descheduled does not spin.
constexpr std::chrono::milliseconds kModest{50};

// Ranges of a region for each of its threads. A thread takes one at a time, so that one that loses
// its core holds up little.
constexpr int64_t kRangesPerThread = 8;

thread_local bool inside_region = false;

// Sleeps while `word` equals `value`; may return early.
void sleep_on(std::atomic<uint32_t>& word, uint32_t value) {
  syscall(SYS_futex, &word, FUTEX_WAIT_PRIVATE, value, nullptr, nullptr, 0);
}

void wake_sleepers(std::atomic<uint32_t>& word, int32_t count) {
  syscall(SYS_futex, &word, FUTEX_WAKE_PRIVATE, count, nullptr, nullptr, 0);
}

int64_t since_epoch(std::chrono::steady_clock::time_point at) {
  return at.time_since_epoch().count();
}

void pause() {
#if defined(__x86_64__)
  _mm_pause();
#endif
}

// Spins until done(), for at most `patience`. Returns done().
template <typename Done>
bool spin_until(const Done& done, std::chrono::nanoseconds patience) {
  using Clock = std::chrono::steady_clock;
  const auto begin = Clock::now();
  do {
    for (int i = 0; i < 16; ++i) {
      if (done()) return true;
      pause();
    }
  } while (Clock::now() - begin < patience);
  return done();
}

// How often the calling thread lost its processor to another one.
int64_t times_descheduled() {
  rusage usage{};
  getrusage(RUSAGE_THREAD, &usage);
  return usage.ru_nivcsw;
}

}  // namespace

int32_t ThreadLimit::at(Time now) {
  const int32_t limit = limit_.load(std::memory_order_relaxed);
  if (limit >= kMaxThreads || since_epoch(now) < raise_at_) return limit;
  raise_at_ = since_epoch(now + kRaise);
  limit_ = limit + 1;
  return limit + 1;
}

void ThreadLimit::note(int32_t threads, Time begun, Time done, Time ended) {
  if (ended - done < late_ || 4 * (ended - done) < ended - begun) return;
  limit_ = threads - 1;
  raise_at_ = since_epoch(ended + kRaise);
}

bool Team::Region::enter() {
  uint32_t seen = state.load(std::memory_order_relaxed);
  do {
    if ((seen & kSeats) == 0) return false;
  } while (!state.compare_exchange_weak(seen, seen - kSeat + 1, std::memory_order_acquire,
                                        std::memory_order_relaxed));
  return true;
}

void Team::Region::leave() {
  const uint32_t before = state.fetch_sub(1, std::memory_order_acq_rel);
  if ((before & kInside) == 1 && (before & kSleeps) != 0) wake_sleepers(state, 1);
}

void Team::Region::close() {
  state.fetch_and(kTaken | kInside, std::memory_order_relaxed);
  const auto empty = [this] { return (state.load(std::memory_order_acquire) & kInside) == 0; };
  if (spin_until(empty, kSpinForOthers)) return;
  // The caller sleeps, so that the threads that it waits for can use its core.
  uint32_t seen = state.fetch_or(kSleeps, std::memory_order_acquire) | kSleeps;
  while ((seen & kInside) != 0) {
    sleep_on(state, seen);
    seen = state.load(std::memory_order_acquire);
  }
}

void Team::Region::run() {
  inside_region = true;
  try {
    for (int64_t at; !failed.load(std::memory_order_relaxed) &&
                     (at = next.fetch_add(grain, std::memory_order_relaxed)) < count;) {
      body(context, at, std::min(at + grain, count));
    }
  } catch (...) {
    if (!failed.exchange(true)) failure = std::current_exception();
  }
  inside_region = false;
}

Team::Region* Team::open(int64_t count, int32_t threads, ParallelBody body, void* context) {
  for (Region& region : regions_) {
    uint32_t free = 0;
    if (!region.state.compare_exchange_strong(free, kTaken, std::memory_order_acquire,
                                              std::memory_order_relaxed)) {
      continue;
    }
    region.body = body;
    region.context = context;
    region.count = count;
    region.grain = std::max<int64_t>(1, count / (threads * kRangesPerThread));
    region.next.store(0, std::memory_order_relaxed);
    region.failed.store(false, std::memory_order_relaxed);
    region.state.store(kTaken | static_cast<uint32_t>(threads - 1) * kSeat,
                       std::memory_order_release);
    return &region;
  }
  return nullptr;
}

void Team::parallel_for(int64_t count, int32_t threads, ParallelBody body, void* context) {
  threads = static_cast<int32_t>(std::min<int64_t>({threads, count, kMaxThreads}));
  const Clock::time_point begun = Clock::now();
  threads = std::min(threads, limit_.at(begun));
  if (threads > 1 && !inside_region) {
    make_threads(threads - 1);
    if (Region* region = open(count, threads, body, context)) {
      wake(threads - 1);
      region->run();
      const Clock::time_point done = Clock::now();
      region->close();
      limit_.note(threads, begun, done, Clock::now());
      const std::exception_ptr failure = std::exchange(region->failure, nullptr);
      region->state.store(0, std::memory_order_release);
      if (failure != nullptr) std::rethrow_exception(failure);
      return;
    }
  }
  body(context, 0, count);
}

void Team::wake(int32_t threads) {
  // Either a thread that goes to sleep sees the new number, or it is counted here.
  offers_.fetch_add(1, std::memory_order_seq_cst);
  threads = std::min(threads, asleep_.load(std::memory_order_seq_cst));
  if (threads > 0) wake_sleepers(offers_, threads);
}

bool Team::help(int32_t first) {
  for (int32_t i = 0; i < kRegions; ++i) {
    Region& region = regions_[(first + i) % kRegions];
    if (!region.enter()) continue;
    region.run();
    region.leave();
    return true;
  }
  return false;
}

void Team::work(int32_t thread) {
  ask_for_short_slices();
  int64_t descheduled = times_descheduled();
  Clock::time_point spins_from{};
  for (;;) {
    // Before `stopping_`: the destructor's offer has no work, and must not be slept on.
    const uint32_t offers = offers_.load(std::memory_order_seq_cst);
    if (stopping_.load(std::memory_order_seq_cst)) return;
    if (help(thread)) continue;
    const int64_t now_descheduled = times_descheduled();
    const auto now = Clock::now();
    if (now_descheduled != descheduled) {
      descheduled = now_descheduled;
      spins_from = now + kModest;
    }
    const auto offered = [&] { return offers_.load(std::memory_order_relaxed) != offers; };
    if (now >= spins_from && spin_until(offered, kSpin)) continue;
    asleep_.fetch_add(1, std::memory_order_seq_cst);
    sleep_on(offers_, offers);
    asleep_.fetch_sub(1, std::memory_order_relaxed);
  }
}

void Team::make_threads(int32_t wanted) {
  if (made_.load(std::memory_order_relaxed) >= wanted || refused_.load(std::memory_order_relaxed)) {
    return;
  }
  const std::lock_guard<std::mutex> lock(making_);
  try {
    // Reserved first: if push_back() threw, destroying the running thread would terminate the
    // process.
    members_.reserve(static_cast<size_t>(wanted));
    while (std::ssize(members_) < wanted) {
      const auto thread = static_cast<int32_t>(std::ssize(members_));
      members_.push_back(start_thread("a thread that computes", [this, thread] { work(thread); }));
      made_.store(thread + 1, std::memory_order_relaxed);
    }
  } catch (const Error&) {  // the system has no more of them
    refused_ = true;
  } catch (const std::bad_alloc&) {
    refused_ = true;
  }
}

Team::~Team() {
  stopping_ = true;
  offers_.fetch_add(1, std::memory_order_seq_cst);
  wake_sleepers(offers_, kMaxThreads);
  for (std::thread& member : members_) member.join();
}

}  // namespace torch_mesh
