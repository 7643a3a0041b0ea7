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
#include "residency/pool_impl.h"

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
    : impl_(*pool.impl_) {
  impl_.check_process();
  impl_.check_experts(layer, experts);
  const size_t own = experts.size() - part.deferral.experts.size();
  if (scratch.size() < own) {
    throw_invalid("a claim of ", own, " experts needs as many entries of scratch; got ",
                  scratch.size());
  }
  state_.layer = layer;
  state_.part = part;
  state_.experts = experts;
  state_.entries = scratch.first(own);

  const Pool::Impl::Event event(impl_);
  impl_.check_open();
  if (impl_.memory_only()) {
    for (int32_t expert : experts) {
      const ExpertId id = impl_.core.id_of(layer, expert);
      if (impl_.core.slots().find(id) >= 0) continue;
      throw Error(ErrorKind::kInvalid,
                  concat(describe(impl_.source, id),
                         " was never filled; fill() every expert before a forward"),
                  place_of(impl_.source, id));
    }
  }
  count_outside();
  const Stopwatch decision(impl_.stats_of(layer, part.phase).decision_nanoseconds);
  impl_.core.begin(state_);
  impl_.carry_out();
}

Claim::~Claim() {
  if (impl_.owner.forked()) return;
  const Pool::Impl::Event event(impl_);
  const auto end = std::chrono::steady_clock::now();
  impl_.stats_of(state_.layer, state_.part.phase).expert_nanoseconds += nanoseconds(begin_, end);
  impl_.last_forward = {std::this_thread::get_id(), state_.layer, state_.part.phase, end};
  impl_.core.end(state_);
}

// Counts the time of attention, dense layers and Python: from the end of one layer's experts to the
// beginning of the next one's, and from one decode step to the next. The time between two prompts,
// or before one, is not the model's.
void Claim::count_outside() const {
  const Pool::Impl::LastForward& last = impl_.last_forward;
  const Phase phase = state_.part.phase;
  const bool follows = state_.layer > last.layer || phase == Phase::kDecode;
  if (phase == Phase::kNone || phase != last.phase || !follows ||
      last.thread != std::this_thread::get_id()) {
    return;
  }
  impl_.stats_of(state_.layer, phase).outside_nanoseconds += nanoseconds(last.end, begin_);
}

// Takes the experts that are ready by now. Called with the lock held.
int32_t Claim::take(std::span<ReadyExpert> ready, std::optional<Error>& error) {
  std::array<HandedOut, 64> handed;
  const auto most = std::span(handed).first(std::min(ready.size(), handed.size()));
  const Stopwatch decision(impl_.stats_of(state_.layer, state_.part.phase).decision_nanoseconds);
  impl_.core.advance(state_);
  const int32_t count = impl_.core.claims().hand_out(state_, most, error);
  for (int32_t i = 0; i < count; ++i) {
    const auto [index, slot] = handed[i];
    ready[i] = {index, impl_.memory->piece(slot), impl_.memory->node(slot)};
    impl_.timeline.handed(slot, state_.layer, state_.experts[index], begin_);
  }
  impl_.carry_out();
  return count;
}

int32_t Claim::try_next(std::span<ReadyExpert> ready) {
  impl_.check_process();
  std::optional<Error> error;
  Pool::Impl::Lock lock(impl_.mutex);
  const int32_t count = take(ready, error);
  impl_.flush(lock);
  if (error) throw std::move(*error);
  return count;
}

int32_t Claim::next(std::span<ReadyExpert> ready, int32_t team) {
  impl_.check_process();
  if (ready.empty()) throw_invalid("next() needs room for at least one expert");
  Pool::Impl::Lock lock(impl_.mutex);
  for (;;) {
    std::optional<Error> error;
    const int32_t count = take(ready, error);
    if (count > 0 || error || impl_.queued) impl_.flush(lock);
    if (error) throw std::move(*error);
    if (count > 0) return count;
    if (!lock.owns_lock()) {  // what it has queued may have landed meanwhile
      lock.lock();
      continue;
    }
    if (state_.waiting == 0 && state_.joined == 0) return 0;
    if (state_.joined == 0 && state_.held > 0) {
      throw_invalid("no slot is left for the next expert of layer ", state_.layer,
                    " while this forward holds ", state_.held, "; release() those before next()");
    }
    LayerStats& counts = impl_.stats_of(state_.layer, state_.part.phase);
    const Stopwatch stall(counts.stall_nanoseconds);
    std::optional<Stopwatch> prefetch_stall;
    if (state_.joined > 0 && impl_.core.claims().waits_for_prefetches(state_)) {
      prefetch_stall.emplace(counts.prefetch_stall_nanoseconds);
    }
    if (state_.joined > 0) {
      wait_for_reads(lock, team);
    } else {
      wait_for_slots(lock);
    }
  }
}

void Claim::wait_for_slots(Pool::Impl::Lock& lock) {
  impl_.core.claims().enter_queue(state_);
  const AtEnd leave_queue([this] {  // the next in line must then look again
    impl_.core.claims().leave_queue(state_);
    impl_.carry_out();
  });
  auto patience = impl_.patience();
  for (;;) {
    impl_.core.advance(state_);
    impl_.carry_out();
    if (impl_.queued) {
      impl_.flush(lock);
      lock.lock();
      continue;
    }
    if (state_.joined > 0) return;
    if (!impl_.wait(lock, impl_.freed, patience, &state_)) {
      throw Error(
          ErrorKind::kTimeout,
          concat("no slot became free for layer ", state_.layer, " in ",
                 impl_.options.timeout.count(), " ms: all ", impl_.core.slots().limit(),
                 " are in use by other forwards or by reads that do not end; keep more experts "
                 "resident, or look at the disk"),
          {state_.layer, -1, "", -1});
    }
  }
}

void Claim::wait_for_reads(Pool::Impl::Lock& lock, int32_t team) {
  const auto waits = [&] { return impl_.core.claims().late_slot(state_) >= 0; };
  auto patience = impl_.patience();
  const auto begin = std::chrono::steady_clock::now();
  while (waits()) {
    if (impl_.landed.wait_until(lock, begin + kShortWait) == std::cv_status::timeout) break;
  }
  if (!waits()) return;
  lock.unlock();
  wait_asleep(impl_.runtime, team, [&] {
    lock.lock();
    while (waits() && impl_.wait(lock, impl_.landed, patience)) {
    }
  });
  const int32_t late = impl_.core.claims().late_slot(state_);
  if (late < 0) return;
  const ExpertId id = impl_.core.slots()[late].expert;
  const ErrorPlace place = place_of(impl_.source, id);
  const std::string what = describe(impl_.source, id);
  const std::string timeout = std::to_string(impl_.options.timeout.count());
  throw Error(ErrorKind::kTimeout,
              impl_.options.loan != nullptr
                  ? concat("the owner of the pool at ", impl_.options.loan->path(),
                           " did not lend ", what, " within the time-out of ", timeout,
                           " ms; is it stopped, or its disk not healthy?")
                  : concat("reading ", what, " from ", place.file, " at offset ", place.offset,
                           " takes longer than the time-out of ", timeout,
                           " ms; is the disk healthy and is the file on a local disk?"),
              place);
}

void Claim::release(std::span<const ReadyExpert> done) {
  impl_.check_process();
  std::array<int32_t, 64> indices;
  for (; !done.empty(); done = done.subspan(std::min(done.size(), indices.size()))) {
    const size_t count = std::min(done.size(), indices.size());
    const Pool::Impl::Event event(impl_);
    for (size_t i = 0; i < count; ++i) indices[i] = done[i].index;
    const Stopwatch decision(impl_.stats_of(state_.layer, state_.part.phase).decision_nanoseconds);
    const size_t released = impl_.core.release(state_, std::span(indices).first(count));
    for (size_t i = 0; i < released; ++i) {
      impl_.timeline.released(state_.layer, state_.experts[indices[i]]);
    }
    impl_.carry_out();
    if (released == count) continue;
    throw_invalid("release(", indices[released],
                  "): next() has not handed this one out, or it was released");
  }
}

}  // namespace torch_mesh
