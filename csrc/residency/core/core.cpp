#include "residency/core/core.h"

#include <algorithm>
#include <ranges>
#include <utility>

namespace torch_mesh {

Core::Core(const CoreOptions& options, std::unique_ptr<Policy> policy)
    : options_(options),
      effects_(options.slots, options.experts, options.slots),
      statistics_(options.layers, options.experts),
      residents_(options.layers, options.experts, options.slots, std::move(policy), statistics_,
                 effects_),
      kept_(options.kept, options.layers, options.experts, residents_.slots()),
      use_(options.kept.profile.tokens.empty() ? ModelUse(options.layers, options.experts)
                                               : options.kept.profile),
      warming_(options.kept.elsewhere.empty()),
      last_phase_(static_cast<size_t>(options.layers), Phase::kNone),
      last_rows_(last_phase_.size(), 0),
      expected_(options.layers, options.experts),
      window_(options.layers, options.experts, residents_),
      claims_(options.experts, residents_, statistics_, effects_),
      sizing_(options.slots_per_segment, residents_, kept_, statistics_, effects_),
      states_(static_cast<size_t>(options.experts)) {
  if (options.reads) read_ahead();
}

Effects& Core::effects() {
  if (residents_.take_emptied()) sizing_.let_go();
  return effects_;
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
  const Deferral& deferral = claim.part.deferral;
  if (claim.part.teaches()) {
    expected_.begin(claim.layer, claim.experts, residents_.slots());
    learn(claim);
  }
  claims_.reserve(claim, window_);
  // They are pinned if they are this claim's, else of a forward broken off.
  if (claim.part.teaches() || (deferral.late && claim.waiting == 0)) {
    residents_.forget_last(claim.layer);
  }
  const auto read_left_out = deferral.stood_in ? read_stood_in : read_deferred;
  read_left_out(claim, claims_.queued(), options_.experts, residents_, statistics_);
  read_next_layer(claim);
}

// A prompt that follows something else begins a sequence; one that follows a prompt may be its next
// chunk, or the next step of many sequences.
void Core::learn(ClaimState& claim) {
  const ForwardPart& part = claim.part;
  claim.step = part.phase == Phase::kPrefill && part.rows > 0 && part.rows <= kMostStepRows &&
               part.rows == last_rows_[claim.layer];
  const Phase last = last_phase_[claim.layer];
  if (part.phase != Phase::kNone) {
    use_.count(claim.layer, claim.experts, part.ids, part.top_k);
    last_phase_[claim.layer] = part.phase;
  }
  if (covers_all()) return;
  Policy& policy = residents_.slots().policy();
  if (part.phase == Phase::kPrefill && last == Phase::kDecode) policy.begin_sequence(claim.layer);
  if (claim.step) {
    policy.tick(claim.layer, claim.experts);
  } else {
    policy.tick_prompt(claim.layer, claim.experts, part.ids, part.top_k);
  }
  kept_.tick(claim.layer, claim.experts, part.ids, part.top_k);
}

void Core::advance(ClaimState& claim) {
  claims_.reserve(claim, window_);
  read_next_layer(claim);
}

size_t Core::release(ClaimState& claim, std::span<const int32_t> indices) {
  const size_t released = claims_.release(claim, indices);
  claims_.reserve(claim, window_);
  // What is released before hand_out() is seen there.
  if (claim.joined + claim.held == 0) read_next_layer(claim);
  return released;
}

void Core::end(ClaimState& claim) {
  claims_.remove(claim);
  if (claim.part.phase == Phase::kNone || !claim.part.last) return;
  last_rows_[claim.layer] = claim.part.rows;
  statistics_.end_forward(claim.layer, claim.part.phase);
  effects_.forward_ended = true;
}

void Core::read_next_layer(const ClaimState& claim) {
  if (closed_ || !options_.reads || claims_.queued()) return;
  window_.read_next_layer(claim);
}

void Core::landed(int32_t slot, int64_t bytes) {
  residents_.landed(slot, bytes);
  read_ahead();
}

void Core::failed(int32_t slot, int64_t bytes, Error error) {
  residents_.failed(slot, bytes, std::move(error));
  read_ahead();
}

void Core::read_ahead() {
  const SlotTable& slots = residents_.slots();
  const int64_t most = std::min(options_.reads_ahead, int64_t{slots.unkept() / 2});
  // Those that queue for slots come first.
  while (!closed_ && options_.reads && residents_.prefetching() < most && !claims_.queued()) {
    const auto reserve = [this](ExpertId id) { return residents_.reserve(id, expected_phase_); };
    int32_t slot = expected_.reserve_next(residents_.slots(), reserve);
    const Phase phase = slot < 0 ? Phase::kNone : expected_phase_;
    // Nothing asks for these: they are read while the disk has nothing else to do.
    const bool idle = slots.loading() == residents_.prefetching();
    if (slot < 0 && warming_ && idle) slot = kept_.reserve_warm();
    if (slot < 0) return;
    residents_.read(slot, Urgency::kPrefetch, phase);
  }
}

void Core::prefetch(int32_t layer, std::span<const int32_t> experts, Phase phase) {
  if (!options_.reads || claims_.queued()) return;
  SlotTable& slots = residents_.slots();
  const auto ids =
      experts | std::views::transform([&](int32_t expert) { return id_of(layer, expert); });
  while_kept(slots, ids, [&] {
    for (ExpertId id : ids) {
      if (residents_.prefetching() >= slots.unkept() / 2) break;
      if (slots.find(id) >= 0) continue;
      const int32_t slot = residents_.reserve(id, phase);
      if (slot < 0) break;
      residents_.read(slot, Urgency::kPrefetch, phase);
    }
  });
}

void Core::expect(int32_t layer, std::span<const int32_t> experts, Phase phase) {
  if (!options_.reads) return;
  expected_.set(layer, experts, residents_.slots());
  expected_phase_ = phase;
  read_ahead();
  expected_.waiting(residents_.slots(), effects_.predicted);
}

void Core::observe(int32_t layer, std::span<const float> scores) {
  if (!covers_all()) residents_.slots().policy().observe(layer, scores);
}

void Core::warm_up() {
  if (!std::exchange(warming_, true)) read_ahead();
}

int32_t Core::evict(int32_t layer, std::span<const int32_t> experts) {
  const SlotTable& slots = residents_.slots();
  int32_t evicted = 0;
  for (int32_t expert : experts) {
    const int32_t slot = slots.find(id_of(layer, expert));
    if (slot < 0 || !slots.reusable(slot)) continue;
    residents_.evict(slot, Phase::kNone);
    ++evicted;
  }
  effects_.freed |= evicted > 0;
  return evicted;
}

int32_t Core::fill(ExpertId id) {
  SlotTable& slots = residents_.slots();
  if (const int32_t present = slots.find(id); present >= 0) {
    if (!slots.reusable(present)) return -1;
    slots.evict(present);
  }
  return slots.reserve(id);
}

void Core::split_cold(int32_t layer, std::span<const float> weights, int32_t top_k, int64_t most,
                      SplitChoices& choices) {
  states(layer, states_);
  torch_mesh::split_cold(states_, weights, top_k, most, choices);
}

void Core::split_by_pool(int32_t layer, std::span<const SlotState> there, SplitChoices& choices) {
  states(layer, states_);
  torch_mesh::split_by_pool(states_, there, choices);
}

void Core::reroute(int32_t layer, std::span<const float> scores, float bias, int64_t kept,
                   std::span<int64_t> chosen, int32_t top_k) {
  states(layer, states_);
  int64_t replaced = 0;
  for (; !chosen.empty(); chosen = chosen.subspan(top_k)) {
    replaced +=
        torch_mesh::reroute(states_, scores.first(states_.size()), bias, kept, chosen.first(top_k));
    scores = scores.subspan(states_.size());
  }
  statistics_.of(layer, Phase::kDecode).rerouted += replaced;
}

SlotState Core::state(ExpertId id) const {
  const int32_t slot = residents_.slots().find(id);
  return slot < 0 ? SlotState::kEmpty : residents_.slots()[slot].state;
}

void Core::states(int32_t layer, std::span<SlotState> states) const {
  for (int32_t expert = 0; expert < options_.experts; ++expert) {
    states[expert] = state(id_of(layer, expert));
  }
}

void Core::reset_statistics() {
  statistics_.reset();
  residents_.forget_unused();
}

void Core::validate() const {
  residents_.validate();
  claims_.validate();
  sizing_.validate(closed_);
}

}  // namespace torch_mesh
