// The size of the pool: which slots may be used, and which segments of the arena have memory.
#include <algorithm>
#include <new>
#include <utility>

#include "residency/pool_impl.h"

namespace torch_mesh {

void Pool::Impl::vacate(int32_t slot) {
  if (!slots.retired(slot)) return;
  if (slots[slot].state == SlotState::kReady) evict(slot, Phase::kNone);
  let_go(arena.segment_of(slot));
}

bool Pool::Impl::vacant(int64_t segment) const {
  for (int64_t slot = arena.first_of(segment); slot < arena.first_of(segment + 1); ++slot) {
    const auto index = static_cast<int32_t>(slot);
    if (!slots.retired(index) || !slots.reusable(index)) return false;
  }
  return true;
}

// Nothing reads into an EMPTY slot, so the I/O thread may take the segment from the ring.
void Pool::Impl::let_go(int64_t segment) {
  if (mapping || segments[segment] != SegmentState::kPresent || !vacant(segment)) return;
  segments[segment] = SegmentState::kLeaving;
  try {
    reader->unregister_buffer(arena.segments()[segment], [this, segment] { on_dropped(segment); });
  } catch (const Error&) {
    segments[segment] = SegmentState::kPresent;  // the reader is closed: all goes with the pool
  } catch (const std::bad_alloc&) {
    segments[segment] = SegmentState::kPresent;  // until the next resize()
  }
}

void Pool::Impl::on_dropped(int64_t segment) {
  arena.drop(segment);
  const Lock lock(mutex);
  segments[segment] = SegmentState::kAbsent;
  resized.notify_all();
}

void Pool::Impl::on_registered(int64_t segment) {
  const Lock lock(mutex);
  segments[segment] = SegmentState::kPresent;
  raise_limit();
  let_go(segment);  // if it is too late
  resized.notify_all();
}

// Up to the target, or to the first segment without memory.
void Pool::Impl::raise_limit() {
  const auto missing = std::find_if(segments.begin(), segments.end(), [](SegmentState state) {
    return state != SegmentState::kPresent;
  });
  const auto backed = static_cast<int32_t>(arena.first_of(missing - segments.begin()));
  const int32_t limit = missing == segments.end() ? target : std::min(target, backed);
  if (limit <= slots.limit()) return;
  stats.grows += !std::exchange(grown, true);
  slots.set_limit(limit);
  slots.policy().resize(limit);
  kept.resize();
  wake_slot_waiters();
}

void Pool::Impl::retarget(int32_t wanted) {
  target = wanted;
  grown = false;
  if (const int32_t before = slots.limit(); wanted < before) {
    ++stats.shrinks;
    slots.set_limit(wanted);
    slots.policy().resize(wanted);
    kept.resize();
    for (int32_t slot = wanted; slot < before; ++slot) {
      if (slots.reusable(slot) && slots[slot].state == SlotState::kReady) evict(slot, Phase::kNone);
    }
  }
  raise_limit();
  const auto count = static_cast<int64_t>(segments.size());
  for (int64_t segment = 0; segment < count; ++segment) let_go(segment);
  resized.notify_all();
}

// But for segments whose slots are still in use: those leave by themselves.
bool Pool::Impl::settled() const {
  return slots.limit() == target && std::none_of(segments.begin(), segments.end(), [](auto state) {
           return state == SegmentState::kLeaving || state == SegmentState::kComing;
         });
}

bool Pool::Impl::grow(Lock& lock) {
  if (growing) return false;
  // From the first one up, as slots can only be used without a gap below them: one that is leaving
  // is waited for.
  const auto missing = std::find_if(segments.begin(), segments.end(), [](SegmentState state) {
    return state == SegmentState::kAbsent || state == SegmentState::kLeaving;
  });
  const auto segment = static_cast<int64_t>(missing - segments.begin());
  if (missing == segments.end() || *missing == SegmentState::kLeaving) return false;
  if (arena.first_of(segment) >= target) return false;
  *missing = SegmentState::kComing;
  growing = true;
  lock.unlock();
  std::optional<Error> error;
  try {
    arena.fault_in(segment);
    reader->register_buffer(arena.segments()[segment], [this, segment] { on_registered(segment); });
  } catch (const Error& thrown) {
    error = thrown;
  } catch (const std::bad_alloc&) {
    error = Error(ErrorKind::kMemory, "no memory to make this pool of experts larger");
  }
  if (error) arena.drop(segment);
  lock.lock();
  growing = false;
  if (error) {
    segments[segment] = SegmentState::kAbsent;
    target = std::min(target, static_cast<int32_t>(arena.first_of(segment)));
    resized.notify_all();
    throw *error;
  }
  return true;
}

int64_t Pool::Impl::present_bytes() const {
  int64_t bytes = 0;
  for (size_t segment = 0; segment < segments.size(); ++segment) {
    if (segments[segment] == SegmentState::kAbsent) continue;
    bytes += static_cast<int64_t>(arena.segments()[segment].bytes);
  }
  return bytes;
}

void Pool::Impl::validate_segments() const {
  check_invariant(slots.limit() <= target, "more slots are in use than were asked for");
  const auto count = static_cast<int64_t>(segments.size());
  for (int64_t segment = 0; segment < count; ++segment) {
    const bool present = segments[segment] == SegmentState::kPresent;
    check_invariant(present || vacant(segment), "a slot is in use without memory");
    check_invariant(!present || closed || !vacant(segment), "a segment that nobody uses stays");
  }
}

int32_t Pool::resize(int32_t slots) {
  Impl& impl = *impl_;
  impl.check_process();
  if (impl.memory_only()) {
    throw Error(ErrorKind::kInvalid,
                "a pool without a source cannot be resized: its records exist nowhere else");
  }
  if (slots < impl.options.least_slots || slots > impl.options.slots) {
    throw Error(ErrorKind::kInvalid, "this pool takes " + std::to_string(impl.options.least_slots) +
                                         " to " + std::to_string(impl.options.slots) +
                                         " slots; got " + std::to_string(slots));
  }
  Impl::Lock lock(impl.mutex);
  impl.check_open();
  impl.retarget(slots);
  auto patience = impl.patience();
  while (!impl.settled()) {
    // Memory that comes takes the time that the kernel takes to clear it.
    if (impl.grow(lock)) patience.deadline = impl.patience().deadline;
    impl.check_open();
    if (impl.settled()) break;
    if (impl.wait(lock, impl.resized, patience)) continue;
    throw Error(ErrorKind::kTimeout,
                "the pool did not come to " + std::to_string(slots) + " slots in " +
                    std::to_string(impl.options.timeout.count()) +
                    " ms: the I/O thread does not come to it; the rest is done when it does");
  }
  const int32_t limit = impl.slots.limit();
  lock.unlock();
  impl.cool_evicted();
  return limit;
}

}  // namespace torch_mesh
