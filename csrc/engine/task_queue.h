// The work of one batch of experts as one list of tasks, which the threads of one parallel region
// take in order.
//
// A thread takes a run of neighbouring tasks at a time, which read one stretch of memory: where
// reading begins anew a core waits. Runs get shorter towards the next stage that waits for others,
// so that all threads get there together.
//
// There is no barrier: a stage names the stages before it that must have ended, and its tasks wait
// for those alone. The threads are not counted, so one that comes late, or never, because its core
// is busy elsewhere holds nothing up; the others have done its share. Where a task throws its
// thread leaves, and the rest of its run counts as ended, so that no thread waits for it.
//
// Where experts lie on several NUMA nodes the list is cut into lanes: a first one for everyone, one
// for each node, a last one for everyone. A thread takes what its own node's lane has and then what
// the others' have left. A stage needs stages of its own lane and of the first one, or stands in
// the last: so all that a task waits for has been taken by a thread that runs.
#pragma once

#include <array>
#include <atomic>
#include <cstdint>

#include "base/runtime.h"

namespace torch_mesh {

// How many of `threads` are worth waking for so much work. By shapes alone, as everything is.
int32_t team_for(int64_t multiply_adds, int32_t threads);

constexpr int32_t kPrepareRows = 8;  // that one task brings into operand form

constexpr int64_t tasks_for(int64_t items, int64_t per_task) {
  return (items + per_task - 1) / per_task;
}

class TaskQueue {
 public:
  TaskQueue() { begin_lane(); }

  static constexpr int32_t kMaxStages = 56;
  static constexpr int32_t kMaxNodes = 16;

  // Those numbered from `begin` to before `end`.
  struct Stages {
    int32_t begin, end;
  };

  // `needs` must have ended before a task of this stage begins. A thread is given up to `at_once`
  // neighbouring tasks of it together. Returns its number.
  int32_t add(int64_t tasks, Stages needs, int32_t at_once = 1);
  int32_t stages() const { return stages_; }
  int64_t tasks() const { return stages_ == 0 ? 0 : end_[stages_ - 1]; }

  // What is added from here on stands in a lane of its own. Never, or once for each of at most
  // kMaxNodes nodes and once for what comes last.
  void next_lane();

  // body(stage, first task within the stage, count) until every task has ended. Once.
  template <typename Body>
  void run(const Runtime& runtime, int32_t threads, const Body& body) {
    run(
        runtime, threads, [] { return 0; }, body);
  }
  // current_node() says in which node's lane the calling thread begins; asked only if there are
  // any.
  template <typename CurrentNode, typename Body>
  void run(const Runtime& runtime, int32_t threads, const CurrentNode& current_node,
           const Body& body) {
    end_lane();
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
    int64_t next = 0, end = 0;  // of the run of tasks that this thread has taken
    int32_t stage = 0;
    int64_t task = 0;
    int32_t count = 0;    // of tasks from this one on
    int32_t waited = -1;  // the stage whose needs are known to have ended
  };
  struct alignas(64) Lane {     // threads of other nodes write to their own
    std::atomic<int64_t> next;  // in the list of all tasks
    int64_t end;
    int32_t first_stage;
  };
  template <typename Body>
  void take_all(int32_t lane, const Body& body) {
    Cursor at{.stage = lanes_at_[lane].first_stage};
    while (take(lanes_at_[lane], at)) {
      try {
        body(at.stage, at.task, at.count);
      } catch (...) {  // no thread may wait for it, or for the rest of its run, for ever
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
  // Goes to the next tasks of the run; false where it has ended.
  bool next_of_run(Cursor& at) const;
  // Where the tasks end that need nothing from `stage` on.
  int64_t end_of_free(int32_t stage) const;
  // Takes the lane's next run of tasks; false when there is none.
  bool take_run(Lane& lane, Cursor& at) const;
  // The lane's next tasks that no thread has taken, once what they need has ended; false when there
  // are none.
  bool take(Lane& lane, Cursor& at);
  void begin_lane();
  void end_lane() { lanes_at_[lanes_ - 1].end = tasks(); }

  int32_t stages_ = 0;
  int32_t threads_ = 1;
  std::array<int64_t, kMaxStages> end_;  // of a stage's tasks in the list of all
  std::array<Stages, kMaxStages> needs_;
  std::array<int32_t, kMaxStages> at_once_;
  std::array<std::atomic<int32_t>, kMaxStages> left_;  // tasks that have not ended
  int32_t lanes_ = 0;
  std::array<Lane, kMaxNodes + 2> lanes_at_;
};

}  // namespace torch_mesh
