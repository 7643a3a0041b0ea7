// Forwards: what a claim waits for, and how long.
#include <algorithm>
#include <array>
#include <chrono>
#include <condition_variable>
#include <optional>
#include <thread>
#include <utility>

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
    : pool_(pool) {
  Pool::Impl& impl = *pool.impl_;
  impl.check_process();
  impl.check_experts(layer, experts);
  const size_t own = experts.size() - part.deferral.experts.size();
  if (scratch.size() < own) {
    throw_invalid("a claim of ", own, " experts needs as many entries of scratch; got ",
                  scratch.size());
  }
  state_.layer = layer;
  state_.part = part;
  state_.experts = experts;
  state_.entries = scratch.first(own);

  const Pool::Impl::Event event(impl);
  impl.check_open();
  if (impl.memory_only()) {
    for (int32_t expert : experts) {
      const ExpertId id = impl.core.id_of(layer, expert);
      if (impl.core.slots().find(id) >= 0) continue;
      throw Error(ErrorKind::kInvalid,
                  concat(describe(impl.source, id),
                         " was never filled; fill() every expert before a forward"),
                  place_of(impl.source, id));
    }
  }
  count_outside(impl);
  const Stopwatch decision(impl.stats_of(layer, part.phase).decision_nanoseconds);
  impl.core.begin(state_);
  impl.carry_out();
}

Claim::~Claim() {
  Pool::Impl& impl = *pool_.impl_;
  if (impl.owner.forked()) return;
  const Pool::Impl::Event event(impl);
  const auto end = std::chrono::steady_clock::now();
  impl.stats_of(state_.layer, state_.part.phase).expert_nanoseconds += nanoseconds(begin_, end);
  impl.last_forward = {std::this_thread::get_id(), state_.layer, state_.part.phase, end};
  impl.core.end(state_);
}

// Attention, dense layers, Python: from the end of one layer's experts to the beginning of the
// next one's, and from one decode step to the next. What is between two prompts, or before one, is
// not the model's.
void Claim::count_outside(Pool::Impl& impl) const {
  const Pool::Impl::LastForward& last = impl.last_forward;
  const Phase phase = state_.part.phase;
  const bool follows = state_.layer > last.layer || phase == Phase::kDecode;
  if (phase == Phase::kNone || phase != last.phase || !follows ||
      last.thread != std::this_thread::get_id()) {
    return;
  }
  impl.stats_of(state_.layer, phase).outside_nanoseconds += nanoseconds(last.end, begin_);
}

// With the lock: what is ready by now.
int32_t Claim::take(Pool::Impl& impl, std::span<ReadyExpert> ready, std::optional<Error>& error) {
  std::array<HandedOut, 64> handed;
  const auto most = std::span(handed).first(std::min(ready.size(), handed.size()));
  const Stopwatch decision(impl.stats_of(state_.layer, state_.part.phase).decision_nanoseconds);
  impl.core.advance(state_);
  const int32_t count = impl.core.hand_out(state_, most, error);
  for (int32_t i = 0; i < count; ++i) {
    const auto [index, slot] = handed[i];
    ready[i] = {index, impl.memory->piece(slot), impl.memory->node(slot)};
  }
  impl.carry_out();
  return count;
}

int32_t Claim::try_next(std::span<ReadyExpert> ready) {
  Pool::Impl& impl = *pool_.impl_;
  impl.check_process();
  std::optional<Error> error;
  Pool::Impl::Lock lock(impl.mutex);
  const int32_t count = take(impl, ready, error);
  impl.flush(lock);
  if (error) throw std::move(*error);
  return count;
}

int32_t Claim::next(std::span<ReadyExpert> ready, int32_t team) {
  Pool::Impl& impl = *pool_.impl_;
  impl.check_process();
  if (ready.empty()) {
    throw Error(ErrorKind::kInvalid, "next() needs room for at least one expert");
  }
  Pool::Impl::Lock lock(impl.mutex);
  for (;;) {
    std::optional<Error> error;
    const int32_t count = take(impl, ready, error);
    if (count > 0 || error || impl.queued) impl.flush(lock);
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
    LayerStats& counts = impl.stats_of(state_.layer, state_.part.phase);
    const Stopwatch stall(counts.stall_nanoseconds);
    std::optional<Stopwatch> prefetch_stall;
    if (state_.joined > 0 && impl.core.claims().waits_for_prefetches(state_)) {
      prefetch_stall.emplace(counts.prefetch_stall_nanoseconds);
    }
    if (state_.joined > 0) {
      wait_for_reads(impl, lock, team);
    } else {
      wait_for_slots(impl, lock);
    }
  }
}

void Claim::wait_for_slots(Pool::Impl& impl, Pool::Impl::Lock& lock) {
  // Leaves the queue however the wait ends; the next in line must then look again.
  struct Queued {
    Pool::Impl& pool;
    ClaimState& claim;
    Queued(Pool::Impl& impl, ClaimState& state) : pool(impl), claim(state) {
      pool.core.enter_queue(claim);
    }
    ~Queued() {
      pool.core.leave_queue(claim);
      pool.carry_out();
    }
  } const queued(impl, state_);

  auto patience = impl.patience();
  for (;;) {
    impl.core.advance(state_);
    impl.carry_out();
    if (impl.queued) {
      impl.flush(lock);
      lock.lock();
      continue;
    }
    if (state_.joined > 0) return;
    if (!impl.wait(lock, impl.freed, patience, &state_)) {
      throw Error(
          ErrorKind::kTimeout,
          concat("no slot became free for layer ", state_.layer, " in ",
                 impl.options.timeout.count(), " ms: all ", impl.core.slots().limit(),
                 " are in use by other forwards or by reads that do not end; keep more experts "
                 "resident, or look at the disk"),
          {state_.layer, -1, "", -1});
    }
  }
}

void Claim::wait_for_reads(Pool::Impl& impl, Pool::Impl::Lock& lock, int32_t team) {
  const auto waits = [&] { return impl.core.claims().waits_for_reads(state_); };
  auto patience = impl.patience();
  const auto begin = std::chrono::steady_clock::now();
  while (waits()) {
    if (impl.landed.wait_until(lock, begin + kShortWait) == std::cv_status::timeout) break;
  }
  if (!waits()) return;
  lock.unlock();
  wait_asleep(impl.runtime, team, [&] {
    lock.lock();
    while (waits() && impl.wait(lock, impl.landed, patience)) {
    }
  });
  if (!waits()) return;
  const int32_t late = impl.core.claims().late_slot(state_);
  if (late < 0) return;
  const ExpertId id = impl.core.slots()[late].expert;
  const ErrorPlace place = place_of(impl.source, id);
  if (impl.options.loan != nullptr) {
    throw Error(
        ErrorKind::kTimeout,
        concat("the owner of the pool at ", impl.options.loan->path(), " did not lend ",
               describe(impl.source, id), " within the time-out of ", impl.options.timeout.count(),
               " ms; is it stopped, or its disk not healthy?"),
        place);
  }
  throw Error(
      ErrorKind::kTimeout,
      concat("reading ", describe(impl.source, id), " from ", place.file, " at offset ",
             place.offset, " takes longer than the time-out of ", impl.options.timeout.count(),
             " ms; is the disk healthy and is the file on a local disk?"),
      place);
}

void Claim::release(std::span<const ReadyExpert> done) {
  Pool::Impl& impl = *pool_.impl_;
  impl.check_process();
  std::array<int32_t, 64> indices;
  for (; !done.empty(); done = done.subspan(std::min(done.size(), indices.size()))) {
    const size_t count = std::min(done.size(), indices.size());
    const Pool::Impl::Event event(impl);
    for (size_t i = 0; i < count; ++i) indices[i] = done[i].index;
    const Stopwatch decision(impl.stats_of(state_.layer, state_.part.phase).decision_nanoseconds);
    const size_t released = impl.core.release(state_, std::span(indices).first(count));
    impl.carry_out();
    if (released == count) continue;
    throw_invalid("release(", indices[released],
                  "): next() has not handed this one out, or it was released");
  }
}

}  // namespace torch_mesh
