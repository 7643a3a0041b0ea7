// Forwards: which slots a claim takes, in which order, and what it waits for.
#include <algorithm>
#include <utility>

#include "residency/pool_impl.h"

namespace torch_mesh {
namespace {

enum EntryState : uint8_t {
  kWaiting,  // has no slot yet
  kJoined,   // pins a slot that is READY, LOADING or failed
  kHeld,     // handed out
  kDone,
};

}  // namespace

// A claim that finds others queueing for slots takes nothing yet: pins on what happens to be
// resident could keep a small pool full for ever, forward after forward, while the head of the
// queue waits.
void Pool::Impl::reserve_for(Claim& claim, bool at_head_of_queue) {
  if (claim.waiting_ == 0 || (first_ticket != nullptr && !at_head_of_queue)) return;
  join_present(claim);
  const size_t count = claim.entries_.size();
  for (size_t i = 0; i < count && claim.waiting_ > 0; ++i) {
    // Forwards list the expert of most rows first. What a window reads last is what it leaves.
    if (!reserve_one(claim, claim.part_.window ? count - 1 - i : i)) return;
  }
}

// False when no slot is to be had.
bool Pool::Impl::reserve_one(Claim& claim, size_t index) {
  Claim::Entry& entry = claim.entries_[index];
  if (entry.state != kWaiting) return true;
  const ExpertId id = id_of(claim.layer_, claim.experts_[index]);
  const int32_t present = slots.find(id);  // a duplicate in the list
  if (present < 0 && claim.part_.window && !slots.has_empty() &&
      claim.reading_ >= window_slots(claim.layer_, claim.part_.last)) {
    return false;
  }
  const int32_t slot = present >= 0 ? present : reserve(id, claim.part_.phase);
  if (slot < 0) return false;
  join(claim, slot);
  entry = {slot, kJoined, present < 0};
  --claim.waiting_;
  ++claim.joined_;
  claim.reading_ += entry.read;
  if (present >= 0) {
    count_access(claim, index, &LayerStats::inflight_misses, &ExpertStats::inflight_misses);
  } else {
    count_access(claim, index, &LayerStats::cold_misses, &ExpertStats::cold_misses);
    start_load(slot, Urgency::kDemand, claim.part_.phase);
  }
  return true;
}

// Before any slot is reserved, so that no victim is an expert which this claim needs.
void Pool::Impl::join_present(Claim& claim) {
  for (size_t i = 0; i < claim.entries_.size(); ++i) {
    if (claim.entries_[i].state != kWaiting) continue;
    const int32_t slot = slots.find(id_of(claim.layer_, claim.experts_[i]));
    if (slot < 0) continue;
    const bool ready = slots[slot].state == SlotState::kReady;
    if (ready && !still_there(slot)) continue;
    join(claim, slot);
    if (!ready) hasten(slot);
    // A prefetch is used by a forward.
    const bool ahead =
        claim.part_.kind != ClaimKind::kVisit && std::exchange(loads[slot].unused, false);
    claim.entries_[i] = {slot, kJoined, ahead};
    claim.reading_ += ahead;
    if (ahead) ++stats_of(slot).prefetches_used;
    --claim.waiting_;
    ++claim.joined_;
    if (ready) {
      count_access(claim, i, &LayerStats::hits, &ExpertStats::hits);
    } else {
      count_access(claim, i, &LayerStats::inflight_misses, &ExpertStats::inflight_misses);
    }
  }
}

void Pool::Impl::join(const Claim& claim, int32_t slot) {
  claim.part_.kind == ClaimKind::kVisit ? slots.hold(slot) : slots.pin(slot);
}

void Pool::Impl::count_access(const Claim& claim, size_t entry, int64_t LayerStats::*how,
                              int64_t ExpertStats::*expert_how) {
  if (claim.part_.kind != ClaimKind::kForward) return;
  const ExpertId id = id_of(claim.layer_, claim.experts_[entry]);
  LayerStats& layer = stats_of(claim.layer_, claim.part_.phase);
  ExpertStats& expert = stats.experts[id];
  ++layer.accesses, ++(layer.*how);
  ++expert.accesses, ++(expert.*expert_how);
  if (!slots.kept(id)) return;
  ++layer.kept_accesses;
  layer.kept_hits += how == &LayerStats::hits;
}

// A prompt that follows something else begins a sequence; one that follows a prompt may be its next
// chunk, or the next step of many sequences.
void Pool::Impl::learn(int32_t layer, std::span<const int32_t> indices, const ForwardPart& part) {
  if (part.phase != Phase::kNone) use.count(layer, indices, part.ids, part.top_k);
  const Phase last = last_phase[layer];
  if (part.phase != Phase::kNone) last_phase[layer] = part.phase;
  if (covers_all()) return;
  Policy& policy = slots.policy();
  if (part.phase == Phase::kPrefill && last == Phase::kDecode) policy.begin_sequence(layer);
  policy.tick_prompt(layer, indices, part.ids, part.top_k);
  kept.tick(layer, indices, part.ids, part.top_k);
}

void Pool::Impl::unpin(int32_t slot) {
  slots.unpin(slot);
  if (!slots.reusable(slot)) return;
  wake_slot_waiters();
  vacate(slot);
}

void Pool::Impl::end_read(Claim& claim, Claim::Entry& entry) {
  claim.reading_ -= std::exchange(entry.read, false);
}

int32_t Pool::Impl::hand_out(Claim& claim, std::span<ReadyExpert> ready) {
  int32_t count = 0;
  for (size_t i = 0; i < claim.entries_.size() && claim.joined_ > 0; ++i) {
    Claim::Entry& entry = claim.entries_[i];
    if (entry.state != kJoined || slots[entry.slot].state == SlotState::kLoading) continue;
    if (slots[entry.slot].error) {
      if (count > 0) break;  // what is in `ready` must reach the caller first
      const Error error = *slots[entry.slot].error;
      entry.state = kDone;
      --claim.joined_;
      end_read(claim, entry);
      unpin(entry.slot);
      throw error;
    }
    if (count == static_cast<int32_t>(ready.size())) break;
    entry.state = kHeld;
    --claim.joined_;
    ++claim.held_;
    ready[count++] = {static_cast<int32_t>(i), record_in(entry.slot),
                      mapping ? -1 : arena.node(entry.slot)};
  }
  return count;
}

void Pool::Impl::wait_for_slots(Claim& claim, Lock& lock) {
  // Leaves the queue however the wait ends; the next in line must then look again.
  struct Place {
    Impl& pool;
    Ticket ticket;
    explicit Place(Impl& impl) : pool(impl) {
      ticket.previous = pool.last_ticket;
      (pool.last_ticket ? pool.last_ticket->next : pool.first_ticket) = &ticket;
      pool.last_ticket = &ticket;
    }
    ~Place() {
      (ticket.previous ? ticket.previous->next : pool.first_ticket) = ticket.next;
      (ticket.next ? ticket.next->previous : pool.last_ticket) = ticket.previous;
      pool.wake_slot_waiters();
    }
  } place(*this);

  auto patience = this->patience();
  for (;;) {
    if (first_ticket == &place.ticket) reserve_for(claim, true);
    if (claim.joined_ > 0) return;
    if (!wait(lock, freed, patience)) {
      throw Error(
          ErrorKind::kTimeout,
          "no slot became free for layer " + std::to_string(claim.layer_) + " in " +
              std::to_string(options.timeout.count()) + " ms: all " +
              std::to_string(slots.limit()) +
              " are in use by other forwards or by reads that do not end; keep more experts "
              "resident, or look at the disk",
          {claim.layer_, -1, "", -1});
    }
  }
}

void Pool::Impl::wait_for_reads(const Claim& claim, Lock& lock) {
  const auto loading = [this](const Claim::Entry& entry) {
    return entry.state == kJoined && slots[entry.slot].state == SlotState::kLoading;
  };
  auto patience = this->patience();
  do {
    if (static_cast<int32_t>(std::count_if(claim.entries_.begin(), claim.entries_.end(), loading)) <
        claim.joined_) {
      return;
    }
  } while (wait(lock, landed, patience));
  const auto late = std::find_if(claim.entries_.begin(), claim.entries_.end(), loading);
  if (late == claim.entries_.end()) return;
  const ExpertId id = slots[late->slot].expert;
  const ErrorPlace place = place_of(id);
  throw Error(ErrorKind::kTimeout,
              "reading " + describe(id) + " from " + place.file + " at offset " +
                  std::to_string(place.offset) + " takes longer than the time-out of " +
                  std::to_string(options.timeout.count()) +
                  " ms; is the disk healthy and is the file on a local disk?",
              place);
}

void Pool::Impl::validate_claims() const {
  std::vector<int32_t> pins(static_cast<size_t>(slots.size()), 0);
  for (const Claim* claim = claims; claim != nullptr; claim = claim->next_alive_) {
    int32_t waiting = 0, joined = 0, held = 0, reading = 0;
    for (const Claim::Entry& entry : claim->entries_) {
      waiting += entry.state == kWaiting;
      joined += entry.state == kJoined;
      held += entry.state == kHeld;
      reading += entry.read;
      if (entry.state == kJoined || entry.state == kHeld) ++pins[entry.slot];
      check_invariant(entry.state != kHeld || slots[entry.slot].state == SlotState::kReady,
                      "a claim holds a slot that is not READY");
    }
    check_invariant(waiting == claim->waiting_ && joined == claim->joined_ &&
                        held == claim->held_ && reading == claim->reading_,
                    "a claim's counts are not those of its entries");
  }
  for (int32_t slot = 0; slot < slots.size(); ++slot) {
    check_invariant(pins[slot] == slots[slot].pins, "a slot's pins are not those of the claims");
  }
}

Claim::Claim(Pool& pool, int32_t layer, std::span<const int32_t> experts, std::span<Entry> scratch,
             ForwardPart part)
    : pool_(pool),
      layer_(layer),
      part_(part),
      experts_(experts.first(experts.size() - part.deferred)) {
  Pool::Impl& impl = *pool.impl_;
  impl.check_process();
  impl.check_experts(layer, experts);
  if (scratch.size() < experts_.size()) {
    throw Error(ErrorKind::kInvalid, "a claim of " + std::to_string(experts_.size()) +
                                         " experts needs as many entries of scratch; got " +
                                         std::to_string(scratch.size()));
  }
  entries_ = scratch.first(experts_.size());
  std::fill(entries_.begin(), entries_.end(), Entry{-1, kWaiting, false});
  waiting_ = static_cast<int32_t>(experts_.size());

  const Pool::Impl::Lock lock(impl.mutex);
  impl.check_open();
  if (impl.memory_only()) {
    for (int32_t expert : experts) {
      const ExpertId id = impl.id_of(layer, expert);
      if (impl.slots.find(id) >= 0) continue;
      throw Error(ErrorKind::kInvalid,
                  impl.describe(id) + " was never filled; fill() every expert before a forward",
                  impl.place_of(id));
    }
  }
  next_alive_ = impl.claims;
  if (next_alive_ != nullptr) next_alive_->previous_alive_ = this;
  impl.claims = this;
  const Stopwatch decision(impl.stats_of(layer, part.phase).decision_nanoseconds);
  losses_ = impl.losses_so_far();
  try {
    begin(experts);
  } catch (...) {  // no memory: the destructor will not run
    for (const Entry& entry : entries_) {
      if (entry.state == kJoined) impl.unpin(entry.slot);
    }
    impl.claims = next_alive_;
    if (next_alive_ != nullptr) next_alive_->previous_alive_ = nullptr;
    throw;
  }
}

// With the lock. `experts`: those that are deferred, too.
void Claim::begin(std::span<const int32_t> experts) {
  Pool::Impl& impl = *pool_.impl_;
  const bool forward = part_.kind == ClaimKind::kForward;
  if (forward) {
    impl.expected.begin(layer_);
    impl.learn(layer_, experts, part_);
  }
  impl.reserve_for(*this, false);
  // They are pinned if they are this claim's, else of a forward broken off.
  if (forward || (part_.kind == ClaimKind::kLate && waiting_ == 0)) impl.forget_awaited(layer_);
  const auto left_out = experts.last(part_.deferred);
  part_.stood_in ? impl.stand_in(*this, left_out) : impl.defer(*this, left_out);
  impl.read_next_layer(*this);
}

Claim::~Claim() {
  Pool::Impl& impl = *pool_.impl_;
  if (impl.owner.forked()) return;
  const Pool::Impl::Lock lock(impl.mutex);
  for (const Entry& entry : entries_) {
    if (entry.state == kJoined || entry.state == kHeld) impl.unpin(entry.slot);
  }
  (previous_alive_ ? previous_alive_->next_alive_ : impl.claims) = next_alive_;
  if (next_alive_ != nullptr) next_alive_->previous_alive_ = previous_alive_;
  if (part_.phase == Phase::kNone || !part_.last) return;
  ++impl.stats_of(layer_, part_.phase).forwards;
  ++impl.forwards[layer_];
  if (impl.forward_waiters > 0) impl.forward_ended.notify_all();
}

int32_t Claim::next(std::span<ReadyExpert> ready) {
  Pool::Impl& impl = *pool_.impl_;
  impl.check_process();
  if (ready.empty()) {
    throw Error(ErrorKind::kInvalid, "next() needs room for at least one expert");
  }
  Pool::Impl::Lock lock(impl.mutex);
  for (;;) {
    {
      const Stopwatch decision(impl.stats_of(layer_, part_.phase).decision_nanoseconds);
      impl.reserve_for(*this, false);
      impl.read_next_layer(*this);
      if (const int32_t count = impl.hand_out(*this, ready)) return count;
    }
    if (waiting_ == 0 && joined_ == 0) return 0;
    if (joined_ == 0 && held_ > 0) {
      throw Error(ErrorKind::kInvalid, "no slot is left for the next expert of layer " +
                                           std::to_string(layer_) + " while this forward holds " +
                                           std::to_string(held_) +
                                           "; release() those before next()");
    }
    const Stopwatch stall(impl.stats_of(layer_, part_.phase).stall_nanoseconds);
    if (joined_ > 0) {
      impl.wait_for_reads(*this, lock);
    } else {
      impl.wait_for_slots(*this, lock);
    }
  }
}

void Claim::release(int32_t index) {
  Pool::Impl& impl = *pool_.impl_;
  impl.check_process();
  check_read();
  const Pool::Impl::Lock lock(impl.mutex);
  if (index < 0 || index >= static_cast<int32_t>(entries_.size()) ||
      entries_[index].state != kHeld) {
    throw Error(ErrorKind::kInvalid,
                "release(" + std::to_string(index) +
                    "): next() has not handed this one out, or it was released");
  }
  const Stopwatch decision(impl.stats_of(layer_, part_.phase).decision_nanoseconds);
  entries_[index].state = kDone;
  --held_;
  impl.end_read(*this, entries_[index]);
  impl.unpin(entries_[index].slot);
  impl.reserve_for(*this, false);
  // What is released before next() is seen there.
  if (joined_ + held_ == 0) impl.read_next_layer(*this);
}

}  // namespace torch_mesh
