// The work of one batch of experts as one list of tasks, which the threads of one parallel region
// take in order.
//
// A thread takes a run of neighbouring tasks at a time. They read one stretch of memory; a core
// waits where a new stretch begins. Runs get shorter towards the next stage that waits for others,
// so that all threads reach it together.
//
// There is no barrier: a stage names the earlier stages that must have ended, and its tasks wait
// for those alone. Threads are not counted: if one comes late or never, because its core is busy,
// the others do its share. A thread whose task throws leaves. The rest of its run counts as ended,
// so that no thread waits for it.
//
// With experts on several NUMA nodes the list is cut into lanes: a first one for all threads, one
// for each node, a last one for all threads. A thread takes the tasks of its own node's lane and
// then those left in the other nodes' lanes. A stage needs only stages of its own lane and of the
// first one, or is in the last lane. So a running thread has taken every task that another one
// waits for.
#pragma once

#include <algorithm>
#include <array>
#include <atomic>
#include <cstdint>

#include "base/runtime.h"

namespace torch_mesh {

// Returns how many of `threads` are worth waking for so much work. Depends on shapes alone.
int32_t team_for(int64_t multiply_adds, int32_t threads);

constexpr int32_t kPrepareRows = 8;  // rows that one task brings into operand form

constexpr int64_t tasks_for(int64_t items, int64_t per_task) {
  return (items + per_task - 1) / per_task;
}

class TaskQueue {
 public:
  TaskQueue() { begin_lane(); }

  static constexpr int32_t kMaxStages = 56;
  static constexpr int32_t kMaxNodes = 16;

  // Stages [begin, end).
  struct Stages {
    int32_t begin, end;
  };

  // Adds a stage and returns its number. Its tasks begin when all of `needs` have ended. A thread
  // gets up to `at_once` neighbouring tasks together.
  int32_t add(int64_t tasks, Stages needs, int32_t at_once = 1);
  int32_t stages() const { return stages_; }
  int64_t tasks() const { return stages_ == 0 ? 0 : end_[stages_ - 1]; }

  // Begins a lane for the stages added from here on. Call it never, or once for each of at most
  // kMaxNodes nodes and once for the last lane.
  void next_lane();

  // Calls body(stage, first task within the stage, count) until every task has ended. Run a queue
  // once.
  template <typename Body>
  void run(const Runtime& runtime, int32_t threads, const Body& body) {
    run(
        runtime, threads, [] { return 0; }, body);
  }
  // current_node() returns the node in whose lane the calling thread begins; called only if there
  // are lanes of nodes.
  template <typename CurrentNode, typename Body>
  void run(const Runtime& runtime, int32_t threads, const CurrentNode& current_node,
           const Body& body) {
    end_lane();
    if (threads == 1 && lanes_ == 1) return run_in_order(body);
    threads_ = threads;
    parallel_for(runtime, threads, threads, [&](int64_t, int64_t) {
      const int32_t nodes = lanes_ - 2;
      take_all(0, body);
      if (nodes > 0) {
        const int32_t own = current_node();
        for (int32_t i = 0; i < nodes; ++i) take_all(1 + (own + i) % nodes, body);
        take_all(lanes_ - 1, body);
      }
    });
  }

 private:
  struct Cursor {
    int64_t next = 0, end = 0;  // the run of tasks that this thread has taken
    int32_t stage = 0;
    int64_t task = 0;
    int32_t count = 0;    // tasks of one call, from `task` on
    int32_t waited = -1;  // the stage whose needs are known to have ended
  };
  struct alignas(64) Lane {     // each node's threads write to a cache line of their own
    std::atomic<int64_t> next;  // in the list of all tasks
    int64_t end;
    int32_t first_stage;
  };
  // A thread that is alone needs no counts: stages need only those before them.
  template <typename Body>
  void run_in_order(const Body& body) const {
    for (int32_t stage = 0; stage < stages_; ++stage) {
      const int64_t tasks = end_[stage] - (stage == 0 ? 0 : end_[stage - 1]);
      for (int64_t task = 0; task < tasks; task += at_once_[stage]) {
        body(stage, task, static_cast<int32_t>(std::min<int64_t>(at_once_[stage], tasks - task)));
      }
    }
  }
  template <typename Body>
  void take_all(int32_t lane, const Body& body) {
    Cursor at{.stage = lanes_at_[lane].first_stage};
    while (take(lanes_at_[lane], at)) {
      try {
        body(at.stage, at.task, at.count);
      } catch (...) {  // else others would wait for it and the rest of its run for ever
        do {
          end(at);
        } while (next_of_run(at));
        throw;
      }
      end(at);
    }
  }
  void end(const Cursor& at) {
    auto& left = left_[at.stage];
    if (left.fetch_sub(at.count, std::memory_order_acq_rel) == at.count) left.notify_all();
  }
  // Moves to the next tasks of the run; false at its end.
  bool next_of_run(Cursor& at) const;
  // The end of the tasks of `stage` and of the following stages that need only stages before
  // `stage`.
  int64_t end_of_free(int32_t stage) const;
  // Takes the lane's next run of tasks; false when there is none.
  bool take_run(Lane& lane, Cursor& at) const;
  // Takes the lane's next tasks and waits until the stages that they need have ended; false when
  // there are no tasks left.
  bool take(Lane& lane, Cursor& at);
  void begin_lane();
  void end_lane() { lanes_at_[lanes_ - 1].end = tasks(); }

  int32_t stages_ = 0;
  int32_t threads_ = 1;
  std::array<int64_t, kMaxStages> end_;  // by stage: the end of its tasks in the list
  std::array<Stages, kMaxStages> needs_;
  std::array<int32_t, kMaxStages> at_once_;
  std::array<std::atomic<int32_t>, kMaxStages> left_;  // tasks that have not ended
  int32_t lanes_ = 0;
  std::array<Lane, kMaxNodes + 2> lanes_at_;
};

}  // namespace torch_mesh
