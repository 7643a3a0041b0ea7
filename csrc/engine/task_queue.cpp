#include "engine/task_queue.h"

#include <algorithm>
#include <stdexcept>
#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace torch_mesh {
namespace {

// Some seventy microseconds on Intel, whose pause takes 140 cycles, and less elsewhere: longer than
// most tasks, since the task that is waited for already runs. Then this thread sleeps: the task's
// thread may need its core.
constexpr int32_t kSpins = 1024;

// The most tasks that a thread takes at once: it may lose its core while it has them.
constexpr int64_t kMaxRun = 16;

// Multiply-adds that are worth a thread. Waking one takes some microseconds; this is the work of
// five (int4) to 30 (bf16).
constexpr int64_t kThreadWork = int64_t{1} << 17;

void wait_for_zero(const std::atomic<int32_t>& left) {
  int32_t seen = left.load(std::memory_order_acquire);
  for (int32_t spins = 0; seen != 0; seen = left.load(std::memory_order_acquire)) {
    if (++spins > kSpins) left.wait(seen, std::memory_order_acquire);
#if defined(__x86_64__)
    _mm_pause();
#endif
  }
}

}  // namespace

int32_t team_for(int64_t multiply_adds, int32_t threads) {
  return static_cast<int32_t>(std::clamp<int64_t>(multiply_adds / kThreadWork, 1, threads));
}

void TaskQueue::begin_lane() {
  if (lanes_ == std::ssize(lanes_at_)) throw std::length_error("a task queue has too many lanes");
  Lane& lane = lanes_at_[lanes_++];
  lane.next.store(tasks(), std::memory_order_relaxed);
  lane.first_stage = stages_;
}

void TaskQueue::next_lane() {
  end_lane();
  begin_lane();
}

int32_t TaskQueue::add(int64_t tasks, Stages needs, int32_t at_once) {
  if (stages_ == kMaxStages) throw std::length_error("a task queue has too many stages");
  const int64_t before = this->tasks();
  end_[stages_] = before + tasks;
  needs_[stages_] = needs;
  at_once_[stages_] = at_once;
  left_[stages_].store(static_cast<int32_t>(tasks), std::memory_order_relaxed);
  return stages_++;
}

int64_t TaskQueue::end_of_free(int32_t stage) const {
  int32_t last = stage;
  while (last + 1 < stages_ && needs_[last + 1].end <= stage) ++last;
  return end_[last];
}

bool TaskQueue::take_run(Lane& lane, Cursor& at) const {
  at.next = lane.next.load(std::memory_order_relaxed);
  do {
    if (at.next >= lane.end) return false;
    while (at.next >= end_[at.stage]) ++at.stage;
    const int64_t left = std::min(lane.end, end_of_free(at.stage)) - at.next;
    at.end = at.next + std::clamp<int64_t>(left / (2 * threads_), 1, kMaxRun);
  } while (!lane.next.compare_exchange_weak(at.next, at.end, std::memory_order_relaxed));
  return true;
}

bool TaskQueue::next_of_run(Cursor& at) const {
  if (at.next == at.end) return false;
  while (at.next >= end_[at.stage]) ++at.stage;
  at.task = at.next - (at.stage == 0 ? 0 : end_[at.stage - 1]);
  const int64_t left = std::min(at.end, end_[at.stage]) - at.next;
  at.count = static_cast<int32_t>(std::min<int64_t>(left, at_once_[at.stage]));
  at.next += at.count;
  return true;
}

bool TaskQueue::take(Lane& lane, Cursor& at) {
  if (at.next == at.end && !take_run(lane, at)) return false;
  next_of_run(at);
  if (at.waited == at.stage) return true;
  const auto [begin, end] = needs_[at.stage];
  for (int32_t stage = begin; stage < end; ++stage) wait_for_zero(left_[stage]);
  at.waited = at.stage;
  return true;
}

}  // namespace torch_mesh
