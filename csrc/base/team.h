// Threads that run parallel loops together with the caller, on a machine that is busy with other
// processes too.
//
// A region, one such loop, ends when its work is done, not when all threads have arrived. A thread
// whose core is busy elsewhere comes late, or never, and the others do its part. The caller waits
// only for ranges that a thread has begun. Idle threads spin for microseconds and then sleep; if
// other processes want the cores, they sleep at once.
#pragma once

#include <array>
#include <atomic>
#include <chrono>
#include <cstdint>
#include <exception>
#include <mutex>
#include <thread>
#include <vector>

#include "base/runtime.h"

namespace torch_mesh {

// The number of threads that take part in a region. It falls by one after a region whose caller
// waited for others longer than the work explains. It rises by one each time that there was no such
// region for a while. Any number of threads may call at a time.
class ThreadLimit {
 public:
  using Time = std::chrono::steady_clock::time_point;
  static constexpr std::chrono::microseconds kLate{200};
  static constexpr std::chrono::milliseconds kRaise{100};

  explicit ThreadLimit(std::chrono::nanoseconds late = kLate) : late_(late) {}

  // The number for a region that begins now, the caller included.
  int32_t at(Time now);
  // Reports that a region of `threads` threads has ended. At `done` its caller had nothing left to
  // do.
  void note(int32_t threads, Time begun, Time done, Time ended);

 private:
  const std::chrono::nanoseconds late_;
  std::atomic<int32_t> limit_{kMaxThreads};
  std::atomic<int64_t> raise_at_{0};  // ns of the clock
};

class Team {
 public:
  explicit Team(std::chrono::nanoseconds late = ThreadLimit::kLate) : limit_(late) {}
  ~Team();  // no region may be open
  Team(const Team&) = delete;
  Team& operator=(const Team&) = delete;

  // Runs body(context, begin, end) on disjoint ranges that cover [0, count), on this thread and up
  // to `threads` - 1 others, and returns when all have ended. Called from within a region, it runs
  // on the calling thread alone. Any number of threads may call at a time. The first exception of a
  // body is thrown here; ranges that had not begun by then may be left out. If the system refuses
  // threads, it runs with fewer.
  void parallel_for(int64_t count, int32_t threads, ParallelBody body, void* context);

  // The threads made so far, callers not included.
  int32_t threads() const { return made_.load(std::memory_order_relaxed); }

 private:
  using Clock = std::chrono::steady_clock;

  // A loop that a caller offers to the other threads. `state` counts free seats and threads inside.
  // A thread that takes a seat is inside, and the caller stays until all have left.
  struct alignas(64) Region {
    std::atomic<uint32_t> state{0};
    ParallelBody body = nullptr;
    void* context = nullptr;
    int64_t count = 0, grain = 1;
    std::atomic<int64_t> next{0};
    std::atomic<bool> failed{false};
    std::exception_ptr failure;

    bool enter();
    void leave();
    void close();  // returns when all have left
    void run();    // takes ranges until there are none
  };
  static constexpr int32_t kRegions = 16;  // callers at a time that get help; others run alone

  Region* open(int64_t count, int32_t threads, ParallelBody body, void* context);
  void make_threads(int32_t wanted);
  void wake(int32_t threads);
  void work(int32_t thread);
  bool help(int32_t first);

  std::array<Region, kRegions> regions_;
  alignas(64) std::atomic<uint32_t> offers_{
      0};  // counts regions that were opened; threads wait on it
  std::atomic<int32_t> asleep_{0};
  std::atomic<bool> stopping_{false};
  ThreadLimit limit_;
  std::atomic<int32_t> made_{0};
  std::atomic<bool> refused_{false};  // by the system: it is not asked again
  std::mutex making_;
  std::vector<std::thread> members_;
};

}  // namespace torch_mesh
