// Claims of forwards: their waits for slots and reads, and the time-outs of these.
#include <algorithm>
#include <array>
#include <chrono>
#include <condition_variable>
#include <optional>
#include <string>
#include <thread>
#include <utility>

#include "base/at_end.h"
#include "residency/lending/loan.h"
#include "residency/pool.h"

namespace torch_mesh {
namespace {

// Waking a team costs some ten microseconds: shorter waits are not worth its sleep.
constexpr std::chrono::microseconds kShortWait{200};

int64_t nanoseconds(std::chrono::steady_clock::time_point from,
                    std::chrono::steady_clock::time_point to) {
  return std::chrono::nanoseconds(to - from).count();
}

}  // namespace

Claim::Claim(Pool& pool, int32_t layer, std::span<const int32_t> experts, std::span<Entry> scratch,
             const ForwardPart& part)
    : pool_(pool) {
  pool_.check_process();
  pool_.check_experts(layer, experts);
  const size_t own = experts.size() - part.deferral.experts.size();
  if (scratch.size() < own) {
    throw_invalid("a claim of ", own, " experts needs as many entries of scratch; got ",
                  scratch.size());
  }
  state_.layer = layer;
  state_.part = part;
  state_.experts = experts;
  state_.entries = scratch.first(own);

  const Pool::Event event(pool_);
  pool_.check_open();
  if (pool_.memory_only()) {
    for (int32_t expert : experts) {
      const ExpertId id = pool_.core_.id_of(layer, expert);
      if (pool_.core_.slots().find(id) >= 0) continue;
      throw Error(ErrorKind::kInvalid,
                  concat(describe(pool_.source_, id),
                         " was never filled; fill() every expert before a forward"),
                  error_place(pool_.source_, id));
    }
  }
  count_outside();
  const Pool::Stopwatch decision(pool_.stats_of(layer, part.phase).decision_nanoseconds);
  pool_.core_.begin(state_);
  pool_.carry_out();
}

Claim::~Claim() {
  if (pool_.owner_.forked()) return;
  const Pool::Event event(pool_);
  const auto end = std::chrono::steady_clock::now();
  pool_.stats_of(state_.layer, state_.part.phase).expert_nanoseconds += nanoseconds(begin_, end);
  if (state_.part.phase != Phase::kNone) {
    pool_.last_forward_ = {std::this_thread::get_id(), state_.layer, state_.part.phase, end};
  }
  for (const Entry& entry : state_.entries) {
    if (entry.state == Entry::kHandedOut) pool_.timeline_.released(entry.miss);
  }
  pool_.core_.end(state_);
}

// Counts the time of attention, dense layers and Python: from the end of one layer's experts to the
// beginning of the next one's, and from one decode step to the next. The time between two prompts,
// or before one, is not the model's.
void Claim::count_outside() const {
  const Pool::LastForward& last = pool_.last_forward_;
  const Phase phase = state_.part.phase;
  const bool follows = state_.layer > last.layer || phase == Phase::kDecode;
  if (phase == Phase::kNone || phase != last.phase || !follows ||
      last.thread != std::this_thread::get_id()) {
    return;
  }
  pool_.stats_of(state_.layer, phase).outside_nanoseconds += nanoseconds(last.end, begin_);
}

// Takes the experts that are ready by now. Called with the lock held.
int32_t Claim::take(std::span<ReadyExpert> ready, std::optional<Error>& error) {
  std::array<HandedOut, 64> handed;
  const auto room = std::span(handed).first(std::min(ready.size(), handed.size()));
  const Pool::Stopwatch decision(
      pool_.stats_of(state_.layer, state_.part.phase).decision_nanoseconds);
  pool_.core_.advance(state_);
  const int32_t count = pool_.core_.claims().hand_out(state_, room, error);
  for (int32_t i = 0; i < count; ++i) {
    const auto [index, slot] = handed[i];
    ready[i] = {index, pool_.memory_->piece(slot), pool_.memory_->node(slot)};
    state_.entries[index].miss =
        pool_.timeline_.handed(slot, state_.layer, state_.experts[index], begin_);
  }
  pool_.carry_out();
  return count;
}

int32_t Claim::try_next(std::span<ReadyExpert> ready) {
  pool_.check_process();
  std::optional<Error> error;
  Pool::Lock lock(pool_.mutex_);
  const int32_t count = take(ready, error);
  pool_.flush(lock);
  if (error) throw std::move(*error);
  return count;
}

int32_t Claim::next(std::span<ReadyExpert> ready, int32_t team) {
  pool_.check_process();
  if (ready.empty()) throw_invalid("next() needs room for at least one expert");
  Pool::Lock lock(pool_.mutex_);
  for (;;) {
    std::optional<Error> error;
    const int32_t count = take(ready, error);
    if (count > 0 || error) {
      pool_.flush(lock);
      if (error) throw std::move(*error);
      return count;
    }
    if (pool_.flushed(lock)) continue;
    if (state_.waiting == 0 && state_.joined == 0) return 0;
    if (state_.joined == 0 && state_.held > 0) {
      throw_invalid("no slot is left for the next expert of layer ", state_.layer,
                    " while this forward holds ", state_.held, "; release() those before next()");
    }
    LayerStats& counts = pool_.stats_of(state_.layer, state_.part.phase);
    const Pool::Stopwatch stall(counts.stall_nanoseconds);
    std::optional<Pool::Stopwatch> prefetch_stall;
    if (state_.joined > 0 && pool_.core_.claims().waits_for_prefetches(state_)) {
      prefetch_stall.emplace(counts.prefetch_stall_nanoseconds);
    }
    if (state_.joined > 0) {
      wait_for_reads(lock, team);
    } else {
      wait_for_slots(lock);
    }
  }
}

void Claim::wait_for_slots(Pool::Lock& lock) {
  pool_.core_.claims().enter_queue(state_);
  const AtEnd leave_queue([this] {  // the next in line must then look again
    pool_.core_.claims().leave_queue(state_);
    pool_.carry_out();
  });
  auto patience = pool_.patience();
  for (;;) {
    pool_.core_.advance(state_);
    pool_.carry_out();
    if (pool_.flushed(lock)) continue;
    if (state_.joined > 0) return;
    if (!pool_.wait(lock, pool_.freed_, patience, &state_)) {
      throw Error(
          ErrorKind::kTimeout,
          concat("no slot became free for layer ", state_.layer, " in ",
                 pool_.options_.timeout.count(), " ms: all ", pool_.core_.slots().limit(),
                 " are in use by other forwards or by reads that do not end; keep more experts "
                 "resident, or look at the disk"),
          {state_.layer, -1, "", -1});
    }
  }
}

void Claim::wait_for_reads(Pool::Lock& lock, int32_t team) {
  const auto waits = [&] { return pool_.core_.claims().late_slot(state_) >= 0; };
  auto patience = pool_.patience();
  const auto begin = std::chrono::steady_clock::now();
  while (waits()) {
    if (pool_.landed_.wait_until(lock, begin + kShortWait) == std::cv_status::timeout) break;
  }
  if (!waits()) return;
  lock.unlock();
  {
    const AtEnd relock([&lock] { lock.lock(); });
    // Has a lock of its own, since its team wakes up after it has returned.
    wait_asleep(pool_.runtime_, team, [&] {
      Pool::Lock own(pool_.mutex_);
      while (waits() && pool_.wait(own, pool_.landed_, patience)) {
      }
    });
  }
  const int32_t late = pool_.core_.claims().late_slot(state_);
  if (late < 0) return;
  const ExpertId id = pool_.core_.slots()[late].expert;
  const ErrorPlace place = error_place(pool_.source_, id);
  const std::string what = describe(pool_.source_, id);
  const std::string timeout = std::to_string(pool_.options_.timeout.count());
  throw Error(ErrorKind::kTimeout,
              pool_.options_.loan != nullptr
                  ? concat("the owner of the pool at ", pool_.options_.loan->path(),
                           " did not lend ", what, " within the time-out of ", timeout,
                           " ms; is it stopped, or its disk not healthy?")
                  : concat("reading ", what, " from ", place.file, " at offset ", place.offset,
                           " takes longer than the time-out of ", timeout,
                           " ms; is the disk healthy and is the file on a local disk?"),
              place);
}

void Claim::release(std::span<const ReadyExpert> done) {
  pool_.check_process();
  std::array<int32_t, 64> indices;
  for (; !done.empty(); done = done.subspan(std::min(done.size(), indices.size()))) {
    const size_t count = std::min(done.size(), indices.size());
    const Pool::Event event(pool_);
    for (size_t i = 0; i < count; ++i) indices[i] = done[i].index;
    const Pool::Stopwatch decision(
        pool_.stats_of(state_.layer, state_.part.phase).decision_nanoseconds);
    const size_t released = pool_.core_.release(state_, std::span(indices).first(count));
    for (size_t i = 0; i < released; ++i) {
      pool_.timeline_.released(state_.entries[indices[i]].miss);
    }
    pool_.carry_out();
    if (released == count) continue;
    throw_invalid("release(", indices[released],
                  "): next() has not handed this one out, or it was released");
  }
}

}  // namespace torch_mesh
