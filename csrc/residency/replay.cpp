#include "residency/replay.h"

#include <algorithm>
#include <array>
#include <chrono>
#include <cmath>
#include <deque>
#include <functional>
#include <limits>
#include <memory>
#include <optional>
#include <random>
#include <utility>

#include "base/error.h"
#include "base/interrupts.h"
#include "residency/core/core.h"
#include "residency/lossy_choices.h"
#include "residency/policies/coldest_by_layer.h"

namespace torch_mesh {
namespace {

void check(const RoutingTrace& trace) {
  if (trace.tokens < 1 || trace.layers < 1 || trace.experts < 1 || trace.top_k < 1) {
    throw_invalid(
        "a trace needs at least one token, layer and expert, and top_k of at least 1; got ",
        trace.tokens, " tokens, ", trace.layers, " layers, ", trace.experts, " experts, top_k ",
        trace.top_k);
  }
  if (int64_t{trace.layers} * trace.experts > INT32_MAX) {
    throw_invalid("the trace has ", trace.layers, " layers of ", trace.experts,
                  " experts; their product must be at most ", INT32_MAX);
  }
  const size_t steps = static_cast<size_t>(trace.tokens) * trace.layers;
  if (trace.ids.size() != steps * trace.top_k) {
    throw_invalid("ids has ", trace.ids.size(), " entries; it must be [tokens, layers, top_k] = [",
                  trace.tokens, ", ", trace.layers, ", ", trace.top_k, "]");
  }
  const auto check_scores = [&](const char* name, std::span<const float> scores) {
    if (scores.empty() || scores.size() == steps * trace.experts) return;
    throw_invalid(name, " has ", scores.size(),
                  " entries; it must be [tokens, layers, experts] = [", trace.tokens, ", ",
                  trace.layers, ", ", trace.experts, "]");
  };
  check_scores("scores", trace.scores);
  check_scores("lookahead", trace.lookahead);
  std::vector<int64_t> seen(trace.experts, -1);
  for (size_t i = 0; i < trace.ids.size(); ++i) {
    const auto step = static_cast<int64_t>(i / trace.top_k);
    const int32_t id = trace.ids[i];
    if (id == RoutingTrace::kOtherRank) continue;
    const auto fail = [&](const auto&... what) {
      throw_invalid("token ", step / trace.layers, ", layer ", step % trace.layers, what...);
    };
    if (i % trace.top_k > 0 && trace.ids[i - 1] == RoutingTrace::kOtherRank) {
      fail(" names expert ", id, " behind one of another rank (-1)");
    }
    const bool known = id >= 0 && id < trace.experts;
    if (!known || seen[id] == step) {
      fail(" uses expert ", id, known ? " twice; of [0, " : ", which is not in [0, ", trace.experts,
           ")");
    }
    seen[id] = step;
  }
  for (size_t forward = 0; forward < trace.forwards.size(); ++forward) {
    const int64_t token = trace.forwards[forward];
    const bool follows = forward == 0 ? token == 0 : token > trace.forwards[forward - 1];
    if (follows && token < trace.tokens) continue;
    throw_invalid("forwards must rise from 0 to below ", trace.tokens, "; forward ", forward,
                  " begins at token ", token);
  }
}

void check_times(std::span<const double> times) {
  for (double seconds : times) {
    if (!(seconds >= 0) || std::isinf(seconds)) {
      throw_invalid("times must be finite and not negative; got ", seconds);
    }
  }
}

void check(const ReplayOptions& options, const RoutingTrace& trace) {
  const int64_t all = int64_t{trace.layers} * trace.experts;
  const int32_t min_slots = std::min(trace.top_k, trace.experts);
  if (options.slots < min_slots || options.slots > all) {
    throw_invalid("slots must be in [", min_slots, ", ", all,
                  "], from what a token may need to all experts; got ", options.slots);
  }
  if (options.prefetch < 0 || options.prefetch > trace.experts) {
    throw_invalid("prefetch must be in [0, ", trace.experts, "]; got ", options.prefetch);
  }
  if (!(options.recall >= 0 && options.recall <= 1)) {
    throw_invalid("recall must be in [0, 1]; got ", options.recall);
  }
  check_times(std::array{options.read_seconds, options.expert_seconds, options.rest_seconds});
  check(options.warm_up, trace.layers, trace.experts);
  check(options.soft_pins);
  constexpr std::array<std::string_view, 3> kPredictors{"off", "lookahead", "simulated"};
  if (std::ranges::find(kPredictors, options.predictor) == kPredictors.end()) {
    throw_invalid("unknown predictor \"", options.predictor,
                  "\"; allowed are off, lookahead, simulated");
  }
  if (options.predictor == "lookahead" && trace.lookahead.empty()) {
    throw_invalid(
        "the trace has no lookahead scores; record it with lookahead=True, or use another "
        "predictor");
  }
  if (options.deferred < 0 || options.deferred > trace.top_k) {
    throw_invalid("deferred must be in [0, top_k=", trace.top_k, "]; got ", options.deferred);
  }
  if (options.deferred > 0 &&
      std::ranges::find(trace.ids, RoutingTrace::kOtherRank) != trace.ids.end()) {
    throw_invalid(
        "ranks do not defer experts: deferred must be 0 for a trace with experts of other ranks");
  }
  if (options.predictor != "off" && options.policy == "belady") {
    throw_invalid("belady is the bound without prefetch; use predictor \"off\"");
  }
}

// Belady's optimum (IBM Systems Journal 1966): evicts the expert whose next use lies furthest
// ahead. It knows the future, so only replays can use it, from the first token on.
class Belady final : public ColdestByLayer<Belady> {
 public:
  explicit Belady(const RoutingTrace& trace)
      : ColdestByLayer({trace.layers, trace.experts}),
        uses_(static_cast<size_t>(trace.layers) * trace.experts, {kNever}) {
    for (int64_t forward = trace.forward_count() - 1; forward >= 0; --forward) {
      for (int32_t layer = 0; layer < trace.layers; ++layer) {
        for (int32_t expert : experts_of(trace, forward, layer)) {
          uses_[layer * experts_ + expert].push_back(forward * trace.layers + layer);
        }
      }
    }
  }

  void tick(int32_t layer, std::span<const int32_t> experts) override {
    for (int32_t expert : experts) uses_[layer * experts_ + expert].pop_back();
    order_changed(layer);
  }

 private:
  friend ColdestByLayer;

  static constexpr int64_t kNever = std::numeric_limits<int64_t>::max();

  bool colder(ExpertId a, ExpertId b) const { return warmth(a, 0) < warmth(b, 0); }
  std::pair<int64_t, ExpertId> warmth(ExpertId id, int32_t /*layer*/) const {
    return {-uses_[id].back(), -id};
  }

  // By expert, the next one last: in steps, one for each layer of each forward.
  std::vector<std::vector<int64_t>> uses_;
};

// The predictions of a replay, for the next layer of a decode step.
class Predictions {
 public:
  Predictions(const RoutingTrace& trace, const ReplayOptions& options)
      : trace_(trace), options_(options), random_(options.seed) {}

  int32_t predict(int64_t step, std::span<int32_t> out) {
    if (options_.predictor != "lookahead") return drawn(step, out);
    // A layer without a prediction has no positive scores.
    return rank(trace_.lookahead.subspan(step * trace_.experts, trace_.experts), order_, out);
  }

 private:
  double draw() { return static_cast<double>(random_() >> 11) * 0x1p-53; }

  int32_t drawn(int64_t step, std::span<int32_t> out) {
    const std::span<const int32_t> truth =
        trace_.chosen(step / trace_.layers, static_cast<int32_t>(step % trace_.layers));
    std::vector<bool> used(trace_.experts, false);
    size_t count = 0, others = trace_.experts - truth.size();
    for (int32_t id : truth) used[id] = true;
    for (int32_t id : truth) {
      if (count < out.size() && draw() < options_.recall) out[count++] = id;
    }
    for (; count < out.size() && others > 0; --others) {
      auto id = static_cast<int32_t>(random_() % trace_.experts);
      while (used[id]) id = (id + 1) % trace_.experts;
      used[id] = true;
      out[count++] = id;
    }
    return static_cast<int32_t>(count);
  }

  const RoutingTrace& trace_;
  const ReplayOptions& options_;
  std::mt19937_64 random_;
  std::vector<int32_t> order_;
};

class Replay {
 public:
  Replay(const RoutingTrace& trace, const ReplayOptions& options, double& disk_free_at)
      : trace_(trace),
        options_(options),
        core_({.layers = trace.layers,
               .experts = trace.experts,
               .slots = options.slots,
               .warm_up = options.warm_up,
               .soft_pins = options.soft_pins,
               .prefill = options.prefill},
              options.policy == "belady"
                  ? std::make_unique<Belady>(trace)
                  : make_policy(options.policy, {trace.layers, trace.experts})),
        disk_free_at_(disk_free_at),
        predictions_(trace, options),
        predicted_(options.prefetch),
        predicted_for_(trace.layers * trace.experts, -1) {
    result_.hits.assign(trace.tokens, 0);
    result_.accesses_of.assign(trace.tokens, 0);
    result_.seconds_of.assign(trace.tokens, 0);
    carry_out();
    while (start_read(0)) land();  // a profile's experts are there when the first token comes
  }

  // Forwards run in order, each with all of its layers.
  void begin_forward(int64_t forward) {
    if (sequence_ == trace_.sequences.size() ||
        trace_.first_token(forward) != trace_.sequences[sequence_]) {
      return;
    }
    // The core itself sees that a prompt begins a sequence.
    for (int32_t layer = 0; trace_.forwards.empty() && layer < trace_.layers; ++layer) {
      core_.begin_sequence(layer);
    }
    ++sequence_;
  }

  void run_layer(int64_t forward, int32_t layer) {
    const auto begin = std::chrono::steady_clock::now();
    const double before = now_;
    run_experts(forward, layer);
    result_.seconds_of[trace_.first_token(forward)] += now_ - before;
    result_.decision_seconds +=
        std::chrono::duration<double>(std::chrono::steady_clock::now() - begin).count();
  }

  double now() const { return now_; }

  // Moves the clock on; only the disk works meanwhile.
  void idle_until(int64_t forward, double time) {
    result_.seconds_of[trace_.first_token(forward)] += time - now_;
    result_.idle_seconds += time - now_;
    now_ = time;
  }

  ReplayResult end() {
    result_.counts = core_.statistics().totals().counts;
    result_.virtual_seconds = now_;
    result_.stalled_seconds = now_ - busy_ - result_.idle_seconds;
    return std::move(result_);
  }

 private:
  void run_experts(int64_t forward, int32_t layer) {
    const int64_t first = trace_.first_token(forward), last = trace_.first_token(forward + 1);
    now_ += options_.rest_seconds;
    busy_ += options_.rest_seconds;
    read_until(now_);
    std::vector<int32_t> experts = experts_of(trace_, forward, layer);
    const Phase phase = phase_of(last - first);
    for (int32_t expert : experts) {
      result_.predicted_right += predicted_for_[core_.id_of(layer, expert)] == forward;
    }
    const size_t distinct = experts.size();
    ForwardPart part{.phase = phase, .rows = last - first, .streams = true};
    if (phase == Phase::kPrefill) {
      prompt_.clear();
      for (int64_t token = first; token < last; ++token) {
        const auto row = trace_.row(token, layer);
        prompt_.insert(prompt_.end(), row.begin(), row.end());
      }
      part.ids = prompt_;
      part.top_k = trace_.top_k;
    }
    const std::vector<int32_t> late = std::exchange(late_, {});
    if (phase == Phase::kDecode && options_.deferred > 0 && layer + 1 < trace_.layers) {
      defer(first, last, layer, experts);
      part.deferral.experts = std::span(experts).last(late_.size());
    }

    const int64_t hits = counts(phase, layer).hits, accesses = counts(phase, layer).accesses;
    // Experts are read from memory once, however many tokens use them.
    const double computing = options_.expert_seconds * static_cast<double>(distinct);
    const double end = now_ + computing;
    busy_ += computing;
    queued_at_ = now_;
    const auto predict = [&] {
      if (phase == Phase::kDecode && options_.predictor != "off") expect(forward, layer + 1);
    };
    claim(layer, experts, part, predict);
    if (!late.empty()) {
      claim(layer - 1, late, {.phase = phase, .last = false, .kind = ClaimKind::kDeferred}, [] {});
    }
    now_ = std::max(now_, end);
    result_.hits[first] += counts(phase, layer).hits - hits;
    result_.accesses_of[first] += counts(phase, layer).accesses - accesses;
  }

  // Runs a claim as an engine does: ready experts are computed, and their slots serve those that
  // wait for one.
  template <typename Queued>
  void claim(int32_t layer, std::span<const int32_t> experts, const ForwardPart& part,
             const Queued& reads_queued) {
    entries_.resize(experts.size() - part.deferral.experts.size());
    ClaimState claim{.layer = layer, .part = part, .experts = experts, .entries = entries_};
    core_.begin(claim);
    carry_out();
    bool told = false;
    const auto tell = [&] {
      if (claim.waiting == 0 && !std::exchange(told, true)) reads_queued();
    };
    tell();
    std::vector<int32_t> held;
    std::array<HandedOut, 64> ready;
    std::optional<Error> error;  // none: this disk does not fail
    for (;;) {
      const int32_t count = core_.claims().hand_out(claim, ready, error);
      for (int32_t i = 0; i < count; ++i) held.push_back(ready[i].index);
      if (count > 0) continue;
      if (claim.joined > 0) {
        wait_for_one_read();
        continue;
      }
      core_.release(claim, held);
      held.clear();
      carry_out();
      tell();
      if (claim.joined + claim.held + claim.waiting == 0) break;
      if (claim.joined == 0) {  // all slots are being read into for others
        wait_for_one_read();
        core_.advance(claim);
        carry_out();
        tell();
      }
      queued_at_ = now_;
    }
    core_.end(claim);
    carry_out();
  }

  // Moves the deferred experts to the end of the list, and copies them to late_.
  void defer(int64_t first, int64_t last, int32_t layer, std::vector<int32_t>& experts) {
    std::vector<int64_t> now, later;
    std::vector<float> weights;
    for (int64_t token = first; token < last; ++token) {
      const std::span<const int32_t> chosen = trace_.chosen(token, layer);
      for (size_t i = 0; i < chosen.size(); ++i) {
        now.push_back(chosen[i]);
        // Routers list their choices by weight.
        weights.push_back(trace_.scores.empty() ? -static_cast<float>(i)
                                                : scores(token, layer)[chosen[i]]);
      }
    }
    later.assign(now.size(), trace_.experts);
    SplitChoices choices{.now = now, .left_out = later};
    std::vector<SlotState> states(static_cast<size_t>(trace_.experts));
    core_.states(layer, states);
    split_cold(states, weights, trace_.top_k, options_.deferred, choices);
    if (choices.experts.empty()) return;
    late_ = choices.experts;
    std::erase_if(experts, [&](int32_t expert) {
      return std::ranges::find(choices.experts, expert) != choices.experts.end();
    });
    experts.insert(experts.end(), choices.experts.begin(), choices.experts.end());
  }

  // Predicts the experts of the layer after this one, of the same forward or the next, if that is a
  // step too.
  void expect(int64_t forward, int32_t layer) {
    if (layer == trace_.layers) {
      layer = 0;
      ++forward;
    }
    if (forward == trace_.forward_count()) return;
    const int64_t token = trace_.first_token(forward);
    if (trace_.first_token(forward + 1) != token + 1) return;
    const int32_t count = predictions_.predict(token * trace_.layers + layer, predicted_);
    const std::span<const int32_t> predicted = std::span<const int32_t>(predicted_).first(count);
    for (int32_t expert : predicted) predicted_for_[core_.id_of(layer, expert)] = forward;
    core_.expect(layer, predicted, Phase::kDecode);
    carry_out();
  }

  std::span<const float> scores(int64_t token, int32_t layer) const {
    return trace_.scores.subspan((token * trace_.layers + layer) * trace_.experts, trace_.experts);
  }
  const LayerStats& counts(Phase phase, int32_t layer) const {
    return core_.statistics().counts().layers[static_cast<size_t>(phase)][layer];
  }

  void carry_out() {
    Effects& effects = core_.end_event();
    queue_.insert(queue_.end(), effects.reads.begin(), effects.reads.end());
    for (int32_t slot : effects.raised) {  // goes behind other demand reads, unless it is under way
      if (std::erase(queue_, slot) > 0) queue_.push_back(slot);
    }
    effects.clear();
  }

  // The disk reads one record at a time, of the most urgent reads the first. Begins a read, unless
  // one is under way. Returns whether one is under way then.
  bool start_read(double seconds) {
    if (reading_ >= 0) return true;
    if (queue_.empty()) return false;
    const auto next = std::ranges::min_element(
        queue_, {}, [this](int32_t slot) { return core_.slots()[slot].urgency; });
    reading_ = *next;
    queue_.erase(next);
    read_end_ = disk_free_at_ = std::max(disk_free_at_, queued_at_) + seconds;
    return true;
  }

  void land() {
    core_.landed(std::exchange(reading_, -1), 0);
    carry_out();
  }

  void wait_for_one_read() {
    check_invariant(start_read(options_.read_seconds), "a replayed read is lost");
    now_ = std::max(now_, read_end_);
    land();
  }

  void read_until(double time) {
    while (start_read(options_.read_seconds) && read_end_ <= time) land();
  }

  const RoutingTrace& trace_;
  const ReplayOptions& options_;
  Core core_;
  std::vector<int32_t> queue_;  // slots whose reads have not begun
  int32_t reading_ = -1;        // the slot of the read under way
  double read_end_ = 0;         // of that read
  double& disk_free_at_;        // the end of the last read by any of the ranks that share the disk
  Predictions predictions_;
  std::vector<int32_t> predicted_;
  std::vector<int64_t> predicted_for_;  // by expert id: the last forward that it was predicted for
  std::vector<ClaimEntry> entries_;
  std::vector<int64_t> prompt_;  // ids of a prompt's tokens
  std::vector<int32_t> late_;    // deferred by the last layer, for this one
  size_t sequence_ = 0;
  double queued_at_ = 0;  // when the last reads were queued
  double now_ = 0;
  double busy_ = 0;
  ReplayResult result_;
};

}  // namespace

std::vector<int32_t> experts_of(const RoutingTrace& trace, int64_t forward, int32_t layer) {
  if (trace.forwards.empty()) {
    const std::span<const int32_t> chosen = trace.chosen(forward, layer);
    return {chosen.begin(), chosen.end()};
  }
  std::vector<int32_t> tokens(static_cast<size_t>(trace.experts));
  for (int64_t token = trace.first_token(forward); token < trace.first_token(forward + 1);
       ++token) {
    for (int32_t expert : trace.chosen(token, layer)) ++tokens[expert];
  }
  std::vector<int32_t> experts;
  for (int32_t expert = 0; expert < trace.experts; ++expert) {
    if (tokens[expert] > 0) experts.push_back(expert);
  }
  std::ranges::stable_sort(experts, std::greater{}, [&](int32_t expert) { return tokens[expert]; });
  return experts;
}

ReplayResult replay(const RoutingTrace& trace, const ReplayOptions& options,
                    const Runtime& runtime) {
  const std::vector<double> nothing(static_cast<size_t>(trace.forward_count()) *
                                    std::max(trace.layers, 0));
  return std::move(replay_ranks(std::span(&trace, 1), options, nothing, runtime).front());
}

std::vector<ReplayResult> replay_ranks(std::span<const RoutingTrace> ranks,
                                       const ReplayOptions& options,
                                       std::span<const double> exchange_seconds,
                                       const Runtime& runtime) {
  if (ranks.empty()) throw_invalid("a replay needs at least one rank");
  const RoutingTrace& first = ranks.front();
  for (const RoutingTrace& trace : ranks) {
    check(trace);
    check(options, trace);
    if (trace.tokens != first.tokens || trace.layers != first.layers ||
        !std::ranges::equal(trace.forwards, first.forwards)) {
      throw_invalid("ranks have the same tokens, layers and forwards; one of them has others");
    }
  }
  const int64_t forwards = first.forward_count();
  if (std::ssize(exchange_seconds) != forwards * first.layers) {
    throw_invalid("exchange_seconds has ", exchange_seconds.size(),
                  " entries; it must be [forwards, layers] = [", forwards, ", ", first.layers, "]");
  }
  check_times(exchange_seconds);
  std::vector<double> free_at(options.one_disk ? 1 : ranks.size());
  std::deque<Replay> replays;  // which do not move
  for (size_t rank = 0; rank < ranks.size(); ++rank) {
    replays.emplace_back(ranks[rank], options, free_at[options.one_disk ? 0 : rank]);
  }
  auto exchange = exchange_seconds.begin();
  auto next_check = std::chrono::steady_clock::now();
  for (int64_t forward = 0; forward < forwards; ++forward) {
    if (const auto now = std::chrono::steady_clock::now(); now >= next_check) {
      check_interrupted(runtime, "a trace is replayed");
      next_check = now + kInterruptSlice;
    }
    for (Replay& replay : replays) replay.begin_forward(forward);
    for (int32_t layer = 0; layer < first.layers; ++layer) {
      double last = 0;
      for (Replay& replay : replays) {
        replay.run_layer(forward, layer);
        last = std::max(last, replay.now());
      }
      last += *exchange++;
      for (Replay& replay : replays) replay.idle_until(forward, last);
    }
  }
  std::vector<ReplayResult> results;
  for (Replay& replay : replays) results.push_back(replay.end());
  return results;
}

}  // namespace torch_mesh
