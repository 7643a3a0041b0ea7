#include "residency/replay.h"

#include <algorithm>
#include <chrono>
#include <cmath>
#include <deque>
#include <memory>
#include <random>
#include <utility>

#include "base/error.h"
#include "residency/belady.h"
#include "residency/expected.h"
#include "residency/kept.h"
#include "residency/predictor.h"
#include "residency/slots.h"

namespace torch_mesh {
namespace {

[[noreturn]] void invalid(const std::string& message) { throw Error(ErrorKind::kInvalid, message); }

void check(const RoutingTrace& trace) {
  if (trace.tokens < 1 || trace.layers < 1 || trace.experts < 1 || trace.top_k < 1 ||
      trace.top_k > trace.experts) {
    invalid("a trace needs at least one token, layer and expert, and top_k in [1, experts]; got " +
            std::to_string(trace.tokens) + " tokens, " + std::to_string(trace.layers) +
            " layers, " + std::to_string(trace.experts) + " experts, top_k " +
            std::to_string(trace.top_k));
  }
  if (int64_t{trace.layers} * trace.experts > INT32_MAX) invalid("more than 2^31 experts");
  const size_t steps = static_cast<size_t>(trace.tokens) * trace.layers;
  if (trace.ids.size() != steps * trace.top_k) invalid("ids are not [tokens, layers, top_k]");
  for (const auto& scores : {trace.scores, trace.lookahead}) {
    if (!scores.empty() && scores.size() != steps * trace.experts) {
      invalid("scores are not [tokens, layers, experts]");
    }
  }
  std::vector<int64_t> seen(trace.experts, -1);
  for (size_t i = 0; i < trace.ids.size(); ++i) {
    const auto step = static_cast<int64_t>(i / trace.top_k);
    const int32_t id = trace.ids[i];
    if (id >= 0 && id < trace.experts && seen[id] != step) {
      seen[id] = step;
      continue;
    }
    invalid("token " + std::to_string(step / trace.layers) + ", layer " +
            std::to_string(step % trace.layers) + " uses expert " + std::to_string(id) +
            (id < 0 || id >= trace.experts ? ", which is not in [0, " : " twice; of [0, ") +
            std::to_string(trace.experts) + ")");
  }
}

void check(const ReplayOptions& options, const RoutingTrace& trace) {
  const int64_t all = int64_t{trace.layers} * trace.experts;
  if (options.slots < trace.top_k || options.slots > all) {
    invalid("slots must be in [top_k=" + std::to_string(trace.top_k) + ", " + std::to_string(all) +
            "]; got " + std::to_string(options.slots));
  }
  if (options.prefetch < 0 || options.prefetch > trace.experts) {
    invalid("prefetch must be in [0, " + std::to_string(trace.experts) + "]; got " +
            std::to_string(options.prefetch));
  }
  if (!(options.recall >= 0 && options.recall <= 1)) {
    invalid("recall must be in [0, 1]; got " + std::to_string(options.recall));
  }
  for (double seconds : {options.read_seconds, options.layer_seconds}) {
    if (!(seconds >= 0) || std::isinf(seconds)) {
      invalid("times must be finite and not negative; got " + std::to_string(seconds));
    }
  }
  check(options.kept, trace.layers, trace.experts);
  if (options.predictor == "lookahead" && trace.lookahead.empty()) {
    invalid(
        "the trace has no lookahead scores; record it with lookahead=True, or use another "
        "predictor");
  }
  if (options.quotas && options.policy == "belady") {
    invalid("belady is the bound over all layers; it takes no quotas");
  }
  if (options.predictor != "off" && options.policy == "belady") {
    invalid("belady is the bound without prefetch; use predictor \"off\"");
  }
}

// What the trace itself foretells.
class Foresight {
 public:
  Foresight(const RoutingTrace& trace, const ReplayOptions& options)
      : trace_(trace), options_(options), random_(options.seed) {
    if (options.predictor != "off" && options.predictor != "lookahead" &&
        options.predictor != "standin") {
      learned_ = make_predictor(options.predictor, trace.layers, trace.experts);
    }
    order_.resize(trace.experts);
  }

  void observe(int32_t layer, std::span<const int32_t> experts) {
    if (learned_) learned_->observe(layer, experts);
  }
  void reset() {
    if (learned_) learned_->reset();
  }

  int32_t predict(int64_t step, std::span<int32_t> out) {
    if (learned_) return learned_->predict(static_cast<int32_t>(step % trace_.layers), out);
    if (options_.predictor == "lookahead") return by_scores(step, out);
    return stand_in(step, out);
  }

 private:
  int32_t by_scores(int64_t step, std::span<int32_t> out) {
    const std::span<const float> scores =
        trace_.lookahead.subspan(step * trace_.experts, trace_.experts);
    order_.clear();
    for (int32_t i = 0; i < trace_.experts; ++i) {
      if (scores[i] > 0) order_.push_back(i);  // a layer that nobody foretells has none
    }
    const size_t count = std::min(order_.size(), out.size());
    std::partial_sort(order_.begin(), order_.begin() + static_cast<int64_t>(count), order_.end(),
                      [&](int32_t a, int32_t b) {
                        return scores[a] != scores[b] ? scores[a] > scores[b] : a < b;
                      });
    std::copy_n(order_.begin(), count, out.begin());
    return static_cast<int32_t>(count);
  }

  double draw() { return static_cast<double>(random_() >> 11) * 0x1p-53; }

  int32_t stand_in(int64_t step, std::span<int32_t> out) {
    const std::span<const int32_t> truth = trace_.ids.subspan(step * trace_.top_k, trace_.top_k);
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
  std::unique_ptr<Predictor> learned_;
  std::vector<int32_t> order_;
};

class Replay {
 public:
  Replay(const RoutingTrace& trace, const ReplayOptions& options)
      : trace_(trace),
        options_(options),
        slots_(trace.layers * trace.experts, options.slots,
               options.policy == "belady"
                   ? make_belady(trace)
                   : make_policy(options.policy,
                                 {trace.layers, trace.experts, options.slots, options.quotas})),
        kept_(options.kept, trace.layers, trace.experts, slots_),
        unused_(options.slots, false),
        foresight_(trace, options),
        guess_(options.prefetch),
        guessed_(trace.layers * trace.experts, -1),
        expected_(trace.experts) {
    result_.hits.assign(trace.tokens, 0);
  }

  ReplayResult run() {
    const auto begin = std::chrono::steady_clock::now();
    size_t sequence = 0;
    warm();
    const int64_t steps = int64_t{trace_.tokens} * trace_.layers;
    for (int64_t step = 0; step < steps; ++step) {
      if (sequence < trace_.sequences.size() &&
          step == trace_.sequences[sequence] * trace_.layers) {
        foresight_.reset();
        for (int32_t layer = 0; layer < trace_.layers; ++layer) {
          slots_.policy().begin_sequence(layer);
        }
        ++sequence;
      }
      forward(step, step + 1 < steps);
    }
    result_.virtual_seconds = now_;
    result_.stalled_seconds = now_ - options_.layer_seconds * static_cast<double>(steps);
    result_.decision_seconds =
        std::chrono::duration<double>(std::chrono::steady_clock::now() - begin).count();
    return std::move(result_);
  }

 private:
  // A profile's experts are there when the first token comes.
  void warm() {
    for (int32_t slot; (slot = kept_.reserve_warm()) >= 0;) {
      slots_.land(slot);
      unused_[slot] = true;
      ++result_.prefetched;
    }
  }

  // One forward of a layer by one token, in the order of Claim and Pool::expect().
  void forward(int64_t step, bool has_next) {
    const auto layer = static_cast<int32_t>(step % trace_.layers);
    const std::span<const int32_t> experts = trace_.ids.subspan(step * trace_.top_k, trace_.top_k);
    read_until(now_);
    expected_.begin(layer);
    if (!trace_.scores.empty()) {
      slots_.policy().observe(layer, trace_.scores.subspan(step * trace_.experts, trace_.experts));
    }
    slots_.policy().tick(layer, experts);
    kept_.tick(layer, experts, {}, 0);
    foresight_.observe(layer, experts);

    const double end = now_ + options_.layer_seconds;
    queued_at_ = now_;
    join_present(step, layer, experts);
    for (ExpertId id : missing_) {
      int32_t slot = reserve(id);
      if (slot < 0) {  // a wave: what is here is computed, and its slots serve the rest
        finish();
        queued_at_ = now_;
        slot = reserve(id);
      }
      check_invariant(slot >= 0, "a replayed forward holds no pin and finds no slot");
      slots_.pin(slot);
      joined_.push_back(slot);
      unused_[slot] = false;
      demand_.push_back(slot);
    }
    if (has_next && options_.predictor != "off") expect(step + 1);
    finish();
    now_ = std::max(now_, end);
  }

  void join_present(int64_t step, int32_t layer, std::span<const int32_t> experts) {
    missing_.clear();
    for (int32_t expert : experts) {
      const ExpertId id = layer * trace_.experts + expert;
      ++result_.accesses;
      result_.kept_accesses += slots_.kept(id);
      result_.predicted_right += guessed_[id] == step;
      const int32_t slot = slots_.find(id);
      if (slot < 0) {
        ++result_.cold_misses;
        missing_.push_back(id);
        continue;
      }
      const bool ready = slots_[slot].state == SlotState::kReady;
      result_.kept_hits += ready && slots_.kept(id);
      slots_.pin(slot);
      joined_.push_back(slot);
      result_.prefetch_used += unused_[slot];
      unused_[slot] = false;
      ++(ready ? result_.hits[step / trace_.layers] : result_.inflight_misses);
    }
  }

  int32_t reserve(ExpertId id) {
    if (!slots_.has_empty()) {
      const ExpertId victim = slots_.policy().victim();
      if (victim == kNoExpert) return -1;
      slots_.evict(slots_.find(victim));
    }
    return slots_.reserve(id);
  }

  void expect(int64_t step) {
    const auto layer = static_cast<int32_t>(step % trace_.layers);
    const int32_t count = foresight_.predict(step, guess_);
    const std::span<const int32_t> guess = std::span<const int32_t>(guess_).first(count);
    for (int32_t expert : guess) guessed_[layer * trace_.experts + expert] = step;
    expected_.set(layer, guess);
  }

  // Waits for what this forward has joined, and lets go of it.
  void finish() {
    for (int32_t slot : joined_) {
      while (slots_[slot].state == SlotState::kLoading) wait_for_one_read();
    }
    for (int32_t slot : joined_) slots_.unpin(slot);
    joined_.clear();
  }

  // The disk reads one expert after the other, those that a forward waits for first.
  bool start_read() {
    if (reading_ >= 0) return true;
    if (demand_.empty()) {
      if (slots_.unkept() / 2 < 1) return false;  // half of what is not kept, as in the pool
      reading_ = expected_.reserve_next(slots_, [this](ExpertId id) { return reserve(id); });
      if (reading_ < 0) return false;
      unused_[reading_] = true;
      ++result_.prefetched;
    } else {
      reading_ = demand_.front();
      demand_.pop_front();
    }
    read_end_ = std::max(read_end_, queued_at_) + options_.read_seconds;
    return true;
  }

  void land() {
    slots_.land(reading_);
    reading_ = -1;
  }

  void wait_for_one_read() {
    start_read();
    now_ = std::max(now_, read_end_);
    land();
  }

  void read_until(double time) {
    while (start_read() && read_end_ <= time) land();
  }

  const RoutingTrace& trace_;
  const ReplayOptions& options_;
  SlotTable slots_;
  Kept kept_;
  std::vector<bool> unused_;  // by slot: was prefetched, and no forward has come for it
  Foresight foresight_;
  std::vector<int32_t> guess_;
  std::vector<int64_t> guessed_;  // by expert id: the last step that it was foretold for
  Expected expected_;
  std::vector<int32_t> joined_;  // slots
  std::vector<ExpertId> missing_;
  std::deque<int32_t> demand_;  // queued reads
  int32_t reading_ = -1;
  double read_end_ = 0;   // of the read under way, or of the last one
  double queued_at_ = 0;  // when the last reads were queued
  double now_ = 0;
  ReplayResult result_;
};

}  // namespace

ReplayResult replay(const RoutingTrace& trace, const ReplayOptions& options) {
  check(trace);
  check(options, trace);
  return Replay(trace, options).run();
}

}  // namespace torch_mesh
