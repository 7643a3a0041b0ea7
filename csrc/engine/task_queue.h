// The work of one batch of experts as one list of tasks, which the threads of one parallel region
// take in order.
//
// There is no barrier: a stage names how many of the stages before it must have ended, and its
// tasks wait for those alone. Nobody counts the threads, so one that comes late, or never, because
// its core is busy elsewhere holds nothing up; the others have done its share.
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
  static constexpr int32_t kMostStages = 40;

  // `needs` of the first stages must have ended before a task of this one begins. Returns its
  // number.
  int32_t add(int64_t tasks, int32_t needs);
  int32_t stages() const { return stages_; }
  int64_t tasks() const { return stages_ == 0 ? 0 : end_[stages_ - 1]; }

  // body(stage, task within the stage) for every task; returns when all have ended. Once.
  template <typename Body>
  void run(const Runtime& runtime, int32_t threads, const Body& body) {
    parallel_for(runtime, threads, threads, [&](int64_t, int64_t) {
      Cursor at;
      while (take(at)) {
        const Ending ending{left_[at.stage]};
        body(at.stage, at.task);
      }
    });
  }

 private:
  struct Cursor {
    int32_t stage = 0;
    int64_t task = 0;
    int32_t ended = 0;  // so many first stages are known to have
  };
  // A task that throws ends too: nobody may wait for it for ever.
  struct Ending {
    std::atomic<int64_t>& left;
    ~Ending() { left.fetch_sub(1, std::memory_order_release); }
  };

  // The next task that nobody has taken, once what it needs has ended; false when there is none.
  bool take(Cursor& at);

  int32_t stages_ = 0;
  std::array<int64_t, kMostStages> end_;  // of a stage's tasks in the list of all
  std::array<int32_t, kMostStages> needs_;
  std::array<std::atomic<int64_t>, kMostStages> left_;  // tasks that have not ended
  std::atomic<int64_t> next_{0};
};

}  // namespace torch_mesh
