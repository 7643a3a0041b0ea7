// Tasks run only after the stages they need have ended, on any thread and at any time.
#include "engine/task_queue.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <stdexcept>
#include <thread>
#include <vector>

namespace torch_mesh {
namespace {

using namespace std::chrono_literals;

// Starts threads late, so that the first ones reach stages that others still work on.
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

// Rethrows the body's exception, as the bindings' team does.
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

TEST(TaskQueue, ATaskRunsAfterTheStagesItNeeds) {
  for (int32_t threads : {1, 2, 5}) {
    for (int round = 0; round < 30; ++round) {
      constexpr int64_t kTasks[] = {3, 0, 17, 1, 40};
      constexpr TaskQueue::Stages kNeeds[] = {{0, 0}, {0, 0}, {0, 1}, {0, 3}, {1, 3}};
      constexpr int32_t kAtOnce[] = {1, 2, 2, 1, 3};
      TaskQueue queue;
      for (int stage = 0; stage < 5; ++stage) {
        ASSERT_EQ(queue.add(kTasks[stage], kNeeds[stage], kAtOnce[stage]), stage);
      }
      // Not atomic, so that ThreadSanitizer detects a task that does not wait.
      std::vector<std::vector<int>> runs;
      for (int64_t tasks : kTasks) runs.emplace_back(tasks, 0);
      queue.run(team(parallel_for_late_threads), threads,
                [&](int32_t stage, int64_t task, int32_t tasks) {
                  for (int32_t before = kNeeds[stage].begin; before < kNeeds[stage].end; ++before) {
                    for (int count : runs[before]) ASSERT_EQ(count, 1);
                  }
                  ASSERT_GE(tasks, 1);
                  ASSERT_LE(tasks, kAtOnce[stage]);
                  for (int32_t i = 0; i < tasks; ++i) ++runs[stage].at(task + i);
                });
      for (const auto& stage : runs) {
        for (int count : stage) EXPECT_EQ(count, 1);
      }
    }
  }
}

// The rest of its run, which no other thread takes, blocks no stage either.
TEST(TaskQueue, ATaskThatThrowsBlocksNoOtherTask) {
  for (int32_t threads : {2, 4}) {
    for (int64_t bad : {0, 3, 39}) {
      TaskQueue queue;
      queue.add(40, {0, 0});
      queue.add(8, {0, 1});
      std::atomic<int> ended{0};
      EXPECT_THROW(queue.run(team(parallel_for_catching), threads,
                             [&](int32_t stage, int64_t task, int32_t) {
                               if (stage == 0 && task == bad) throw std::runtime_error("task");
                               ++ended;
                             }),
                   std::runtime_error);
      // The first run is half of a thread's share; later runs are shorter.
      const int64_t run = 40 / (2 * threads);
      if (bad == 0) {
        EXPECT_EQ(ended, 48 - run);
      }
      EXPECT_GE(ended, 48 - run);
      EXPECT_LT(ended, 48);
    }
  }
}

TEST(TaskQueue, OneThreadGetsAllTasksInOrder) {
  TaskQueue queue;
  queue.add(100, {0, 0});
  queue.add(50, {0, 1});
  std::vector<std::pair<int32_t, int64_t>> order;
  queue.run(team(parallel_for_late_threads), 1,
            [&](int32_t stage, int64_t task, int32_t) { order.emplace_back(stage, task); });
  ASSERT_EQ(order.size(), 150u);
  EXPECT_TRUE(std::is_sorted(order.begin(), order.end()));
}

// Lanes of nodes between a first stage that all others need and a last one that needs all.
struct NodeLanes {
  explicit NodeLanes(const std::vector<int64_t>& tasks_of_node) {
    queue.add(5, {0, 0});
    for (int64_t tasks : tasks_of_node) {
      queue.next_lane();
      const int32_t up = queue.add(tasks, {0, 1});
      queue.add(2 * tasks, {up, up + 1});
    }
    queue.next_lane();
    queue.add(7, {0, queue.stages()});
  }
  TaskQueue queue;
};

thread_local int32_t node_of_this_thread = 0;
std::atomic<int32_t> next_node{0};

TEST(TaskQueue, LanesRunEveryTaskOnAnyDistributionOfThreads) {
  for (int32_t threads : {1, 2, 3, 7}) {
    for (int round = 0; round < 30; ++round) {
      const std::vector<int64_t> tasks = {4, 0, 11, 3};
      NodeLanes lanes(tasks);
      std::vector<std::vector<int>> runs(2 + 2 * tasks.size());
      runs[0].assign(5, 0), runs.back().assign(7, 0);
      for (size_t node = 0; node < tasks.size(); ++node) {
        runs[1 + 2 * node].assign(tasks[node], 0);
        runs[2 + 2 * node].assign(2 * tasks[node], 0);
      }
      const auto ended = [](const std::vector<int>& stage) {
        return std::all_of(stage.begin(), stage.end(), [](int count) { return count == 1; });
      };
      // Some nodes have several threads, some none.
      const auto node = [&] { return next_node.fetch_add(1) % threads; };
      lanes.queue.run(team(parallel_for_late_threads), threads, node,
                      [&](int32_t stage, int64_t task, int32_t) {
                        const int32_t last = static_cast<int32_t>(runs.size()) - 1;
                        if (stage > 0 && stage < last) {
                          ASSERT_TRUE(ended(runs[stage % 2 == 1 ? 0 : stage - 1]));
                        }
                        for (int32_t s = 0; stage == last && s < last; ++s) {
                          ASSERT_TRUE(ended(runs[s]));
                        }
                        ++runs[stage][task];
                      });
      EXPECT_TRUE(std::all_of(runs.begin(), runs.end(), ended));
    }
  }
}

// Each node's thread waits in its first task for the others, so each must begin in its own lane.
TEST(TaskQueue, AThreadBeginsInTheLaneOfItsNode) {
  constexpr int32_t kNodes = 3;
  NodeLanes lanes({6, 6, 6});
  std::atomic<int32_t> begun{0}, strangers{0};
  next_node = 0;
  const auto node = [] { return node_of_this_thread = next_node.fetch_add(1); };
  lanes.queue.run(team(parallel_for_late_threads), kNodes, node,
                  [&](int32_t stage, int64_t, int32_t) {
                    if (stage == 0 || stage > 2 * kNodes) return;
                    if (begun < kNodes) {
                      if ((stage - 1) / 2 != node_of_this_thread) ++strangers;
                      ++begun;
                      while (begun < kNodes) std::this_thread::yield();
                    }
                  });
  EXPECT_EQ(begun, kNodes);
  EXPECT_EQ(strangers, 0);
}

TEST(TaskQueue, OtherNodesThreadsRunTheTasksOfANodeWithoutThreads) {
  NodeLanes lanes({2, 3});
  std::vector<int32_t> order;
  lanes.queue.run(
      team(nullptr), 1, [] { return 1; },
      [&](int32_t stage, int64_t, int32_t) { order.push_back(stage); });
  EXPECT_TRUE(std::is_sorted(order.begin(), order.begin() + 5));
  EXPECT_EQ(order[5], 3);  // of its own node
  EXPECT_EQ(order[5 + 9], 1);
  EXPECT_EQ(order.back(), 5);
  EXPECT_EQ(order.size(), 5u + 9 + 6 + 7);
}

TEST(TaskQueue, ATeamOfOneRunsAllTasks) {
  TaskQueue queue;
  queue.add(2, {0, 0});
  queue.add(3, {0, 1});
  std::vector<int> order;
  // Asked for four threads, the runtime gives one.
  const Runtime alone = team(
      [](int64_t count, int32_t, ParallelBody body, void* context) { body(context, 0, count); });
  queue.run(alone, 4,
            [&](int32_t stage, int64_t task, int32_t) { order.push_back(stage * 10 + task); });
  EXPECT_EQ(order, (std::vector<int>{0, 1, 10, 11, 12}));
}

TEST(TaskQueue, NeighbouringTasksOfARunAreGivenTogether) {
  const std::vector<int64_t> of_one_run{0, 2, 4, 6, 8, 10, 12, 14, 16, 18};
  const std::vector<int64_t> of_short_runs{0, 2, 5, 7, 9, 12};  // of 5, 4, 3 and 2, then 1 each
  // Asked for two threads, the runtime gives one.
  for (const auto& [threads, pairs] : {std::pair{1, of_one_run}, std::pair{2, of_short_runs}}) {
    TaskQueue queue;
    queue.add(1, {0, 0});
    queue.add(21, {0, 1}, 2);
    std::vector<int64_t> firsts;
    int64_t next = 0;
    queue.run(team(nullptr), threads, [&](int32_t stage, int64_t task, int32_t count) {
      if (stage == 0) return;
      ASSERT_EQ(task, next);
      if (count == 2) firsts.push_back(task);
      next = task + count;
    });
    EXPECT_EQ(next, 21);
    EXPECT_EQ(firsts, pairs);
  }
}

// If tasks given together throw, the rest of their run counts as ended.
TEST(TaskQueue, TasksGivenTogetherThrowTogether) {
  for (int64_t bad : {0, 20, 38}) {
    TaskQueue queue;
    queue.add(40, {0, 0}, 2);
    queue.add(8, {0, 1});
    std::atomic<int> after{0};
    EXPECT_THROW(queue.run(team(parallel_for_catching), 2,
                           [&](int32_t stage, int64_t task, int32_t count) {
                             if (stage == 1) ++after;
                             if (stage == 0 && task <= bad && bad < task + count) {
                               throw std::runtime_error("tasks");
                             }
                           }),
                 std::runtime_error);
    EXPECT_EQ(after, 8);
  }
}

}  // namespace
}  // namespace torch_mesh
