// A team's guarantees: every range runs once, the call waits only for ranges that have begun, and
// exceptions reach the caller.
#include "base/team.h"

#include <gtest/gtest.h>

#include <atomic>
#include <chrono>
#include <cstdint>
#include <latch>
#include <mutex>
#include <numeric>
#include <set>
#include <stdexcept>
#include <thread>
#include <vector>

namespace torch_mesh {
namespace {

using namespace std::chrono_literals;

// No thread counts as late: all take part, however busy the machine is.
constexpr std::chrono::nanoseconds kNever = 1h;

template <typename Body>
void run(Team& team, int64_t count, int32_t threads, const Body& body) {
  team.parallel_for(
      count, threads,
      [](void* context, int64_t begin, int64_t end) {
        (*static_cast<const Body*>(context))(begin, end);
      },
      const_cast<void*>(static_cast<const void*>(&body)));
}

// A thread that is about to sleep must see that the team ends: the destructor waits for it.
TEST(Team, EndsWhileItsThreadsFallAsleep) {
  for (int32_t round = 0; round < 500; ++round) {
    Team team(kNever);
    run(team, 3, 3, [](int64_t, int64_t) {});
    std::this_thread::sleep_for(std::chrono::microseconds(300 + round % 25 * 20));  // it spins 500
  }
}

TEST(Team, CoversEveryIndexOnce) {
  Team team(kNever);
  for (const int64_t count : {0, 1, 2, 7, 64, 1000}) {
    for (const int32_t threads : {1, 2, 3, 9}) {
      // Not atomic: ThreadSanitizer detects overlapping ranges and a call that does not wait.
      std::vector<int> visits(count);
      run(team, count, threads, [&](int64_t begin, int64_t end) {
        for (int64_t i = begin; i < end; ++i) ++visits[i];
      });
      EXPECT_EQ(visits, std::vector<int>(count, 1));
    }
  }
  EXPECT_EQ(team.threads(), 8);  // created once and reused
}

TEST(Team, RunsRangesInParallel) {
  Team team(kNever);
  std::latch all(3);  // each range waits until three threads have one
  std::atomic<int> ranges{0};
  run(team, 3, 3, [&](int64_t, int64_t) {
    all.arrive_and_wait();
    ++ranges;
  });
  EXPECT_EQ(ranges, 3);
}

// Threads that are busy elsewhere do not delay the call.
TEST(Team, DoesNotWaitForThreadsThatHaveNotBegun) {
  Team team(kNever);
  std::latch started(3), release(1);
  std::thread other([&] {
    run(team, 3, 3, [&](int64_t, int64_t) {
      started.count_down();
      release.wait();
    });
  });
  started.wait();  // both of the team's threads and their caller have started
  const std::thread::id caller = std::this_thread::get_id();
  int64_t done = 0;
  for (int round = 0; round < 3; ++round) {
    run(team, 100, 3, [&](int64_t begin, int64_t end) {
      EXPECT_EQ(std::this_thread::get_id(), caller);
      done += end - begin;
    });
  }
  EXPECT_EQ(done, 300);
  release.count_down();
  other.join();
}

// The call waits for a thread that has begun a range, even if it sleeps.
TEST(Team, WaitsForARangeThatHasBegun) {
  Team team(kNever);
  for (int round = 0; round < 20; ++round) {
    std::latch both(2);
    const std::thread::id caller = std::this_thread::get_id();
    bool finished = false;  // not atomic, as above
    run(team, 2, 2, [&](int64_t, int64_t) {
      both.arrive_and_wait();
      if (std::this_thread::get_id() == caller) return;
      std::this_thread::sleep_for(1ms);
      finished = true;
    });
    EXPECT_TRUE(finished);
  }
}

TEST(Team, ServesManyConcurrentCallers) {
  Team team(kNever);
  std::vector<std::thread> callers;
  for (int caller = 0; caller < 20; ++caller) {  // more callers than the team has regions
    callers.emplace_back([&] {
      for (int round = 0; round < 50; ++round) {
        std::vector<int> visits(40);
        run(team, 40, 3, [&](int64_t begin, int64_t end) {
          for (int64_t i = begin; i < end; ++i) ++visits[i];
        });
        EXPECT_EQ(std::accumulate(visits.begin(), visits.end(), 0), 40);
      }
    });
  }
  for (std::thread& caller : callers) caller.join();
}

TEST(Team, RethrowsTheBodysExceptionAndStaysUsable) {
  Team team(kNever);
  for (int round = 0; round < 20; ++round) {
    EXPECT_THROW(run(team, 50, 3,
                     [](int64_t begin, int64_t) {
                       if (begin >= 10) throw std::runtime_error("a range failed");
                     }),
                 std::runtime_error);
    std::atomic<int64_t> done{0};
    run(team, 50, 3, [&](int64_t begin, int64_t end) { done += end - begin; });
    EXPECT_EQ(done, 50);
  }
}

TEST(Team, NestedCallsRunOnTheCallingThread) {
  Team team(kNever);
  std::atomic<int64_t> inner{0};
  run(team, 8, 3, [&](int64_t begin, int64_t end) {
    const std::thread::id outer = std::this_thread::get_id();
    for (int64_t i = begin; i < end; ++i) {
      run(team, 5, 3, [&](int64_t first, int64_t last) {
        EXPECT_EQ(std::this_thread::get_id(), outer);
        inner += last - first;
      });
    }
  });
  EXPECT_EQ(inner, 40);
}

TEST(Team, WakesThreadsThatHaveGoneToSleep) {
  Team team(kNever);
  for (int round = 0; round < 5; ++round) {
    std::this_thread::sleep_for(2ms);  // longer than they spin
    std::latch both(2);
    run(team, 2, 2, [&](int64_t, int64_t) { both.arrive_and_wait(); });
  }
}

TEST(Team, UsesFewerThreadsWhereOneIsLate) {
  Team team(0ns);
  const std::thread::id caller = std::this_thread::get_id();
  // Repeats where threads were late for another reason, or waited little relative to the region.
  for (int attempt = 0; attempt < 1000; ++attempt) {
    std::atomic<int32_t> arrived{0};
    run(team, 3, 3, [&](int64_t, int64_t) {
      const auto begun = std::chrono::steady_clock::now();
      ++arrived;
      while (arrived < 3 && std::chrono::steady_clock::now() - begun < 20ms) {
        std::this_thread::yield();
      }
      if (std::this_thread::get_id() != caller) std::this_thread::sleep_for(2ms);
    });
    std::mutex mutex;
    std::set<std::thread::id> threads;
    run(team, 3, 3, [&](int64_t, int64_t) {
      std::this_thread::sleep_for(1ms);
      const std::lock_guard lock(mutex);
      threads.insert(std::this_thread::get_id());
    });
    if (threads.size() < 3) return;
  }
  FAIL() << "three threads took part each time";
}

TEST(ThreadLimit, FallsWhereOneIsLateAndRisesAgain) {
  ThreadLimit limit(200us);
  ThreadLimit::Time now{1s};
  EXPECT_GE(limit.at(now), 64);
  limit.note(4, now, now + 1ms, now + 1ms + 199us);  // in time
  limit.note(4, now, now + 10ms, now + 12ms);        // little relative to the region
  EXPECT_GE(limit.at(now + 12ms), 64);
  limit.note(4, now, now + 1ms, now + 2ms);
  EXPECT_EQ(limit.at(now + 2ms), 3);
  EXPECT_EQ(limit.at(now + 101ms), 3);
  EXPECT_EQ(limit.at(now + 102ms), 4);
  EXPECT_EQ(limit.at(now + 201ms), 4);
  EXPECT_EQ(limit.at(now + 202ms), 5);
  limit.note(2, now + 202ms, now + 203ms, now + 204ms);
  EXPECT_EQ(limit.at(now + 204ms), 1);
}

}  // namespace
}  // namespace torch_mesh
