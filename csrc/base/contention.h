// Detects that other processes compete for the processors of a team of spinning threads.
//
// Such a team is fastest while each of its threads has a processor. If one has none, every region
// waits for it while the others spin. The kernel counts how long each thread was runnable without a
// processor. If that is a good part of the time, there is contention, and regions run without the
// team for a pause. After it the team is tried again, and the pause grows while contention lasts.
#pragma once

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstdint>
#include <optional>

namespace torch_mesh {

class Contention {
 public:
  using Clock = std::chrono::steady_clock;

  static constexpr std::chrono::milliseconds kFirstPause{250}, kLongestPause{2000};
  // The part of the time that a thread may be without a processor: our own threads that start reads
  // take it for moments.
  static constexpr int kTolerated = 3;  // one part in so many

  // The time, up to some milliseconds late, for a quarter of the cost of Clock::now().
  static Clock::time_point recently();

  // Whether a region that begins now should do without spinning threads.
  bool contended(Clock::time_point now) const { return since_epoch(now) < until_; }

  // Reports that a spinning thread had no processor for `waited` of the last `passed`.
  void note(Clock::time_point now, Clock::duration passed, Clock::duration waited) {
    if (kTolerated * waited < passed || contended(now)) return;
    // A trial soon after the last pause has failed.
    const bool again = since_epoch(now) < until_ + pause_;
    pause_ = again ? std::min<int64_t>(2 * pause_, ns(kLongestPause)) : ns(kFirstPause);
    until_ = since_epoch(now) + pause_;
  }

 private:
  static int64_t ns(std::chrono::nanoseconds duration) { return duration.count(); }
  static int64_t since_epoch(Clock::time_point at) { return ns(at.time_since_epoch()); }

  // Several threads may call note() at a time; which of them is last does not matter.
  std::atomic<int64_t> until_{INT64_MIN / 2};
  std::atomic<int64_t> pause_{ns(kFirstPause)};
};

// Reads how long the calling thread was runnable without a processor. Each thread has its own. No
// file stays open: a process may have more threads than it may have descriptors.
class TimeWithoutProcessor {
 public:
  // The total so far; nullopt where the kernel does not count it, or without a free descriptor.
  static std::optional<std::chrono::nanoseconds> read();
  // Reports to `contention` what happened since the last report, at most once in 20 ms.
  void note(Contention& contention);

 private:
  Contention::Clock::time_point last_;
  std::chrono::nanoseconds before_{0};
  bool settled_ = false;  // has run for a while
};

}  // namespace torch_mesh
