// What a task may rely on, whoever takes it and whenever: that the stages it needs have ended.
#include "engine/task_queue.h"

#include <gtest/gtest.h>

#include <atomic>
#include <chrono>
#include <stdexcept>
#include <thread>
#include <vector>

namespace torch_mesh {
namespace {

using namespace std::chrono_literals;

// Threads that start late, so that the first ones meet stages which others still work on.
void parallel_for_late_threads(int64_t count, int32_t threads, ParallelBody body, void* context) {
  std::vector<std::thread> team;
  for (int64_t part = 0; part < std::min<int64_t>(threads, count); ++part) {
    team.emplace_back([=] {
      std::this_thread::sleep_for(part * 50us);
      body(context, part, part + 1);
    });
  }
  for (std::thread& thread : team) thread.join();
}

// Throws what the body threw, as the bindings' team does.
void parallel_for_catching(int64_t count, int32_t threads, ParallelBody body, void* context) {
  std::atomic<bool> failed{false};
  struct Guarded {
    ParallelBody body;
    void* context;
    std::atomic<bool>& failed;
  } guarded{body, context, failed};
  parallel_for_late_threads(
      count, threads,
      [](void* context, int64_t begin, int64_t end) {
        auto& guarded = *static_cast<Guarded*>(context);
        try {
          guarded.body(guarded.context, begin, end);
        } catch (const std::runtime_error&) {
          guarded.failed = true;
        }
      },
      &guarded);
  if (failed) throw std::runtime_error("a task failed");
}

Runtime team(decltype(Runtime::parallel_for) parallel_for) {
  Runtime runtime;
  runtime.parallel_for = parallel_for;
  return runtime;
}

TEST(TaskQueue, ATaskFindsEndedWhatItNeeds) {
  for (int32_t threads : {1, 2, 5}) {
    for (int round = 0; round < 30; ++round) {
      constexpr int64_t kTasks[] = {3, 0, 17, 1, 40};
      constexpr int32_t kNeeds[] = {0, 0, 1, 3, 2};
      TaskQueue queue;
      for (int stage = 0; stage < 5; ++stage) {
        ASSERT_EQ(queue.add(kTasks[stage], kNeeds[stage]), stage);
      }
      // Plain memory: ThreadSanitizer would see a task that does not wait.
      std::vector<std::vector<int>> runs;
      for (int64_t tasks : kTasks) runs.emplace_back(tasks, 0);
      queue.run(team(parallel_for_late_threads), threads, [&](int32_t stage, int64_t task) {
        for (int32_t before = 0; before < kNeeds[stage]; ++before) {
          for (int count : runs[before]) ASSERT_EQ(count, 1);
        }
        ++runs[stage][task];
      });
      for (const auto& stage : runs) {
        for (int count : stage) EXPECT_EQ(count, 1);
      }
    }
  }
}

TEST(TaskQueue, ATaskThatThrowsHoldsNobodyUp) {
  for (int32_t threads : {2, 4}) {
    TaskQueue queue;
    queue.add(8, 0);
    queue.add(8, 1);
    std::atomic<int> ended{0};
    EXPECT_THROW(queue.run(team(parallel_for_catching), threads,
                           [&](int32_t stage, int64_t task) {
                             if (stage == 0 && task == 3) throw std::runtime_error("task");
                             ++ended;
                           }),
                 std::runtime_error);
    EXPECT_EQ(ended, 15);
  }
}

TEST(TaskQueue, ATeamOfOneDoesAllOfIt) {
  TaskQueue queue;
  queue.add(2, 0);
  queue.add(3, 1);
  std::vector<int> order;
  // Asked for four threads, the runtime gives one.
  const Runtime alone = team(
      [](int64_t count, int32_t, ParallelBody body, void* context) { body(context, 0, count); });
  queue.run(alone, 4, [&](int32_t stage, int64_t task) { order.push_back(stage * 10 + task); });
  EXPECT_EQ(order, (std::vector<int>{0, 1, 10, 11, 12}));
}

}  // namespace
}  // namespace torch_mesh
