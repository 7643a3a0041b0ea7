#include "residency/core/core.h"

#include <algorithm>
#include <ranges>
#include <utility>

namespace torch_mesh {

Core::Core(const CoreOptions& options, std::unique_ptr<Policy> policy)
    : reads_(options.reads),
      reads_ahead_(options.reads_ahead),
      slots_(options.layers, options.experts, options.slots, std::move(policy)),
      soft_pins_(options.soft_pins, options.warm_up, slots_),
      warm_up_(options.warm_up, slots_),
      use_(options.warm_up.profile.tokens.empty() ? ModelUse(options.layers, options.experts)
                                                  : options.warm_up.profile),
      last_forwards_(static_cast<size_t>(options.layers)),
      expected_(slots_),
      window_(options.prefill, slots_),
      claims_(slots_),
      sizing_(options.slots_per_segment, slots_, soft_pins_) {
  if (!options.warm_up.profile.tokens.empty()) slots_.policy().start_from(use_);
  read_ahead();
}

Effects& Core::end_event() {
  if (slots_.take_emptied()) sizing_.detach_vacant();
  return slots_.effects();
}

void Core::begin(ClaimState& claim) {
  claims_.add(claim);
  try {
    begin_forward(claim);
  } catch (...) {  // a policy may ask for memory
    claims_.remove(claim);
    throw;
  }
}

void Core::begin_forward(ClaimState& claim) {
  const ClaimKind kind = claim.part.kind;
  claim.reads_next_layer = window_.will_read_next_layer(claim);
  if (kind == ClaimKind::kForward) {
    expected_.begin(claim.layer, claim.experts);
    learn(claim);
  }
  claims_.reserve(claim, window_.slots_for(claim));
  // Deferred experts are pinned by now if this claim uses them; otherwise they are left from a
  // forward that was broken off.
  if (kind == ClaimKind::kForward || (kind == ClaimKind::kDeferred && claim.waiting == 0)) {
    slots_.forget_deferred(claim.layer);
  }
  read_left_out(claim);
  read_next_layer(claim);
}

// A prompt that follows something else begins a sequence; one that follows a prompt may be its next
// chunk, or the next step of many sequences.
void Core::learn(const ClaimState& claim) {
  const ForwardPart& part = claim.part;
  LastForward& last = last_forwards_[claim.layer];
  const bool step = part.phase == Phase::kPrefill && part.rows > 0 && part.rows <= kMaxStepRows &&
                    part.rows == last.rows;
  const bool new_sequence = part.phase == Phase::kPrefill && last.phase == Phase::kDecode;
  if (part.phase != Phase::kNone) {
    use_.count(claim.layer, claim.experts, part.ids, part.top_k);
    last.phase = part.phase;
  }
  if (slots_.covers_all()) return;
  Policy& policy = slots_.policy();
  if (new_sequence) policy.begin_sequence(claim.layer);
  if (step) {
    policy.tick(claim.layer, claim.experts);
  } else {
    policy.tick_prompt(claim.layer, claim.experts, part.ids, part.top_k);
  }
  soft_pins_.tick(claim.layer, claim.experts, part.ids, part.top_k);
}

void Core::advance(ClaimState& claim) {
  claims_.reserve(claim, window_.slots_for(claim));
  read_next_layer(claim);
}

size_t Core::release(ClaimState& claim, std::span<const int32_t> indices) {
  const size_t released = claims_.release(claim, indices);
  claims_.reserve(claim, window_.slots_for(claim));
  // While the claim uses or waits for others, advance() reads ahead before the next hand_out().
  if (claim.joined + claim.held == 0) read_next_layer(claim);
  return released;
}

void Core::end(ClaimState& claim) {
  claims_.remove(claim);
  if (claim.part.phase == Phase::kNone || !claim.part.last) return;
  last_forwards_[claim.layer].rows = claim.part.rows;
  statistics().end_forward(claim.layer, claim.part.phase);
  slots_.effects().forward_ended = true;
}

// Claims that queue for slots come before all reads ahead. Predictions have half of the slots at
// most, so that wrong ones cannot hold up the forwards.
bool Core::admits(ReadAhead what) const {
  if (closed_ || !reads_ || claims_.queued()) return false;
  if (what == ReadAhead::kForward) return true;
  const int64_t half = slots_.slots_without_early() / 2;
  const int64_t limit = what == ReadAhead::kHint ? half : std::min(reads_ahead_, half);
  if (slots_.prefetching() >= limit) return false;
  return what != ReadAhead::kWarm ||
         (warm_up_.started() && slots_.loading() == slots_.prefetching());
}

// Reads the experts that a claim leaves out. Those used one layer later are soft-pinned, not
// pinned, since a forward that waits for slots holds no pin. For those that another pool computes,
// the policy has learned of the use and says which to read before the next one.
void Core::read_left_out(const ClaimState& claim) {
  const Deferral& deferral = claim.part.deferral;
  const Phase phase = claim.part.phase;
  for (int32_t index : deferral.experts) {
    const ExpertId id = id_of(claim.layer, index);
    if (deferral.fallback) {
      statistics().of(claim.layer, phase).early_accesses += slots_.early(id);
    } else {
      statistics().count_access(id, phase, &ExpertStats::deferred, slots_.early(id));
      slots_.soft_pin(id, SoftPin::kDeferred, true);
    }
  }
  const bool may_read = claim.waiting == 0 && admits(ReadAhead::kForward);
  for (int32_t index : deferral.experts) {
    const ExpertId id = id_of(claim.layer, index);
    const int32_t present = slots_.find(id);
    if (deferral.fallback) {
      if (present >= 0 || !may_read || !admits(ReadAhead::kHint) || !worth_a_slot(id)) continue;
      slots_.read(id, Urgency::kPrefetch, phase);
    } else if (present >= 0) {
      if (slots_[present].state == SlotState::kLoading) slots_.raise_priority(present);
      slots_.use_prefetched(present);
    } else if (may_read) {
      slots_.read(id, Urgency::kDemand, phase);
    }
  }
}

bool Core::worth_a_slot(ExpertId id) {
  if (slots_.has_empty()) return true;
  const ExpertId victim = slots_.victim();
  return victim != kNoExpert && (slots_.early(id) || slots_.policy().prefers(id, victim));
}

void Core::read_next_layer(const ClaimState& claim) {
  if (admits(ReadAhead::kForward)) window_.read_next_layer(claim);
}

void Core::landed(int32_t slot, int64_t bytes) {
  slots_.landed(slot, bytes);
  read_ahead();
}

void Core::failed(int32_t slot, int64_t bytes, Error error) {
  slots_.failed(slot, bytes, std::move(error));
  read_ahead();
}

void Core::read_ahead() {
  while (admits(ReadAhead::kExpected)) {
    if (expected_.read_next() >= 0) continue;
    if (!admits(ReadAhead::kWarm) || warm_up_.read_next() < 0) return;
  }
}

void Core::prefetch(int32_t layer, std::span<const int32_t> experts, Phase phase) {
  if (!admits(ReadAhead::kHint)) return;
  const auto ids =
      experts | std::views::transform([&](int32_t expert) { return id_of(layer, expert); });
  slots_.read_missing(ids, Urgency::kPrefetch, phase, [this] { return admits(ReadAhead::kHint); });
}

void Core::expect(int32_t layer, std::span<const int32_t> experts, Phase phase) {
  if (!reads_) return;
  expected_.set(layer, experts, phase);
  read_ahead();
  expected_.waiting(slots_.effects().predicted);
}

void Core::warm_up() {
  if (warm_up_.started()) return;
  warm_up_.start();
  read_ahead();
}

// Not at each segment: the reads that a new size begins do not depend on how fast segments come.
void Core::read_ahead_when_sized() {
  if (sizing_.settled()) read_ahead();
}

void Core::resize(int32_t slots) {
  sizing_.resize(slots);
  read_ahead_when_sized();
}

void Core::attached(int64_t segment) {
  sizing_.attached(segment);
  read_ahead_when_sized();
}

void Core::attach_failed(int64_t segment) {
  sizing_.attach_failed(segment);
  read_ahead_when_sized();
}

void Core::detached(int64_t segment) {
  sizing_.detached(segment);
  read_ahead_when_sized();
}

int32_t Core::evict(int32_t layer, std::span<const int32_t> experts) {
  int32_t evicted = 0;
  for (int32_t expert : experts) {
    const int32_t slot = slots_.find(id_of(layer, expert));
    if (slot < 0 || !slots_.reusable(slot)) continue;
    slots_.evict(slot, Phase::kNone);
    ++evicted;
  }
  slots_.effects().freed |= evicted > 0;
  read_ahead();
  return evicted;
}

int32_t Core::fill(ExpertId id) {
  if (const int32_t present = slots_.find(id); present >= 0) {
    if (!slots_.reusable(present)) return -1;
    slots_.evict(present, Phase::kNone);
  }
  return slots_.reserve(id);
}

void Core::states(int32_t layer, std::span<SlotState> states) const {
  for (int32_t expert = 0; expert < slots_.experts(); ++expert) {
    states[expert] = slots_.state(id_of(layer, expert));
  }
}

void Core::validate() const {
  slots_.validate();
  claims_.validate();
  sizing_.validate(closed_);
}

}  // namespace torch_mesh
