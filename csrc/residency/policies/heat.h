// Evicts the expert whose next use is expected last (docs/decisions/0013-heat.md).
//
// An expert that its layer will use with probability p per forward is expected back after
//     distance + (1/p - 1) * layers
// layer steps, where `distance` is how far its layer is ahead in the cycle. p is linear in
// - how often the expert was used, seen through seven windows and over its whole life. Some windows
//   have negative weights, so that the sum can be steeper or flatter than any one decay;
// - what the layer used a moment ago, by a table of which expert follows which one. The table is
//   learned while it is used, by the error of the last prediction (least mean squares; Widrow and
//   Hoff, 1960).
// The weights of the windows are a least-squares fit of the next uses on prompts 0-34 of the
// DeepSeek-V2-Lite trace; the decision has the figures.
#pragma once

#include <algorithm>
#include <array>
#include <cmath>
#include <cstdlib>
#include <memory>
#include <new>
#include <numeric>

#include "residency/policies/coldest_by_layer.h"

namespace torch_mesh {

class Heat final : public ColdestByLayer<Heat> {
 public:
  explicit Heat(const PolicyOptions& options)
      : ColdestByLayer(options),
        ticks_(static_cast<size_t>(layers_), 0),
        fraction_(ticks_.size(), 0.f),
        last_(ticks_.size()),
        means_(ticks_.size() * kMeans * experts_, 0.f),
        predicted_(static_cast<size_t>(options.all()), 0.f),
        probability_(predicted_.size(), 0.f),
        follows_(make_table(options), std::free),
        use_(static_cast<size_t>(experts_), 0.f) {
    token_.reserve(static_cast<size_t>(experts_));
    for (std::vector<int32_t>& last : last_) last.reserve(kMaxLearned);
  }

  bool prefers(ExpertId id, ExpertId victim) const override {
    return kPreferenceMargin * expected_wait(id, id / experts_) <
           expected_wait(victim, victim / experts_);
  }

  void tick(int32_t layer, std::span<const int32_t> experts) override {
    now_ = layer;
    std::fill(use_.begin(), use_.end(), 0.f);
    for (int32_t expert : experts) use_[expert] = 1.f;
    learn(layer);
    remember(layer, experts);
    predict(layer);
    order_changed(layer);
  }

  // Learns as if the prompt had been decoded. Nearly all experts are used by some token, which says
  // nothing. How often and how lately each was used predicts the next token.
  void tick_prompt(int32_t layer, std::span<const int32_t> experts, std::span<const int64_t> ids,
                   int32_t top_k) override {
    const size_t tokens = top_k > 0 ? ids.size() / static_cast<size_t>(top_k) : 0;
    if (tokens == 0) return tick(layer, experts);
    ids = ids.last(std::min(tokens, kMaxPromptTokens) * top_k);
    const auto ticked = ids.last(std::min(ids.size(), kMaxPromptTicks * top_k));
    fold(layer, ids.first(ids.size() - ticked.size()), top_k);
    for (size_t at = 0; at < ticked.size(); at += top_k) {
      token_.clear();
      for (const int64_t id : ticked.subspan(at, static_cast<size_t>(top_k))) {
        if (is_expert(id)) token_.push_back(static_cast<int32_t>(id));
      }
      tick(layer, token_);
    }
  }

  void start_from(const ModelUse& use) override {
    for (int32_t layer = 0; layer < layers_; ++layer) {
      if (use.tokens[layer] == 0) continue;
      ticks_[layer] = std::min(use.tokens[layer], kMaxPriorTicks);
      float* life = mean_of(layer, kLife);
      for (int32_t expert = 0; expert < experts_; ++expert) {
        life[expert] = use.rate(layer * experts_ + expert);
      }
      fraction_[layer] = std::accumulate(life, life + experts_, 0.f) / static_cast<float>(experts_);
      begin_sequence(layer);
    }
  }

  // Keeps the uses over the whole life, which are the model's. Sets the windows to these and
  // forgets the last uses, since both are the text's.
  void begin_sequence(int32_t layer) override {
    if (ticks_[layer] == 0) return;
    const float* life = mean_of(layer, kLife);
    for (size_t window = kLife + 1; window < kMeans; ++window) {
      std::copy(life, life + experts_, mean_of(layer, window));
    }
    last_[layer].clear();
    predict(layer);
    order_changed(layer);
  }

 private:
  friend ColdestByLayer;

  // The means of a layer's uses: kLife is that over its whole life, the others are windows.
  static constexpr size_t kMeans = 8, kLife = 0;
  static constexpr std::array<float, kMeans> kDecays{1, .5f, .8f, .9f, .95f, .98f, .99f, .995f};
  static constexpr std::array<float, kMeans> kWeights{.100f, .240f, -.317f, .414f,
                                                      .096f, .305f, -.072f, .118f};
  // The weight of the fraction of its layer's experts that a forward uses.
  static constexpr float kPriorWeight = .117f;
  static constexpr float kMinProbability = 1e-4f;
  static constexpr float kNegligible = 1e-9f;  // of a mean
  static constexpr float kLearningRate = .001f;
  // The part of the table's prediction that counts in the choice of a victim. The table predicts
  // the next forward alone, while a resident expert stays for longer: the whole prediction gains
  // with a tenth of the experts resident and loses with half.
  static constexpr float kFollowTrust = .5f;
  // The most experts of a forward that teaches the table: one of many tokens uses a large part of
  // its layer and says little of which expert follows which.
  static constexpr size_t kMaxLearned = 32;
  // The most entries of the table of which expert follows which: 256 MB. Models have a few million;
  // one with very many experts in a layer has no table.
  static constexpr size_t kMaxTable = size_t{1} << 26;
  // The number of a prompt's last tokens that count: the longest window has all but forgotten those
  // before.
  static constexpr size_t kMaxPromptTokens = 512;
  // The number of the last of those that teach the table. A tick costs microseconds, and the pool's
  // lock is held for all of them: half a millisecond per layer.
  static constexpr size_t kMaxPromptTicks = 256;
  // The ticks that a profile counts for at most, so that its weight fades within some thousand
  // tokens.
  static constexpr int64_t kMaxPriorTicks = 1000;

  // An expert gets another's slot if its use is expected so many times sooner. With 1, two similar
  // experts evict each other in turn: twice the reads, and fewer hits (docs/decisions/0028).
  static constexpr float kPreferenceMargin = 2.f;

  bool colder(ExpertId a, ExpertId b) const { return probability_[a] < probability_[b]; }
  float warmth(ExpertId id, int32_t layer) const { return -expected_wait(id, layer); }

  float expected_wait(ExpertId id, int32_t layer) const {
    const int32_t ahead = layer - now_;
    const auto distance = static_cast<float>(ahead > 0 ? ahead : ahead + layers_);
    const float p = std::max(probability_[id], kMinProbability);
    return distance + (1.f / p - 1.f) * static_cast<float>(layers_);
  }

  bool is_expert(int64_t id) const { return id >= 0 && id < experts_; }

  // Updates the means as tick() with each of these tokens would, in one pass. It neither learns
  // nor predicts.
  void fold(int32_t layer, std::span<const int64_t> ids, int32_t top_k) {
    if (ids.empty()) return;
    const auto tokens = static_cast<float>(ids.size() / top_k);
    const auto used = static_cast<float>(
        std::count_if(ids.begin(), ids.end(), [this](int64_t id) { return is_expert(id); }));
    for (size_t window = kLife + 1; window < kMeans; ++window) {
      const float decay = kDecays[window], left = std::pow(decay, tokens);
      float* mean = mean_of(layer, window);
      for (int32_t expert = 0; expert < experts_; ++expert) {
        mean[expert] *= left;
      }
      float weight = 1.f - decay;
      for (size_t at = ids.size(); at > 0 && weight > kNegligible; weight *= decay) {
        for (int32_t choice = 0; choice < top_k; ++choice) {
          if (is_expert(ids[--at])) mean[ids[at]] += weight;
        }
      }
    }
    ticks_[layer] += static_cast<int64_t>(tokens);
    const float step = 1.f / static_cast<float>(ticks_[layer]);
    fraction_[layer] += step * (used / static_cast<float>(experts_) - tokens * fraction_[layer]);
    float* life = mean_of(layer, kLife);
    for (int32_t expert = 0; expert < experts_; ++expert) {
      life[expert] -= step * tokens * life[expert];
    }
    for (const int64_t id : ids) {
      if (is_expert(id)) life[id] += step;
    }
    last_[layer].clear();  // later tokens do not follow those before the prompt
  }

  // Zeros, whose pages take no memory before they are written. Null: too many.
  static float* make_table(const PolicyOptions& options) {
    const auto experts = static_cast<size_t>(options.experts);
    const size_t entries = options.layers * experts * experts;
    if (entries > kMaxTable) return nullptr;
    auto* table = static_cast<float*>(std::calloc(entries, sizeof(float)));
    if (table == nullptr) throw std::bad_alloc();
    return table;
  }

  float* row(int32_t layer, int32_t expert) {
    return &follows_[(static_cast<size_t>(layer) * experts_ + expert) * experts_];
  }

  void learn(int32_t layer) {
    const float* predicted = &predicted_[static_cast<size_t>(layer) * experts_];
    for (int32_t last : last_[layer]) {
      float* follows = row(layer, last);
      for (int32_t expert = 0; expert < experts_; ++expert) {
        follows[expert] += kLearningRate * (use_[expert] - predicted[expert]);
      }
    }
  }

  void remember(int32_t layer, std::span<const int32_t> experts) {
    ++ticks_[layer];
    const float fraction = static_cast<float>(experts.size()) / static_cast<float>(experts_);
    fraction_[layer] += (fraction - fraction_[layer]) / static_cast<float>(ticks_[layer]);
    for (size_t each = 0; each < kMeans; ++each) {
      float* mean = mean_of(layer, each);
      const float fresh =
          each == kLife ? 1.f / static_cast<float>(ticks_[layer]) : 1.f - kDecays[each];
      for (int32_t expert = 0; expert < experts_; ++expert) {
        mean[expert] += fresh * (use_[expert] - mean[expert]);
      }
    }
    if (follows_ == nullptr || experts.size() > kMaxLearned) experts = {};
    last_[layer].assign(experts.begin(), experts.end());
  }

  void predict(int32_t layer) {
    const size_t first = static_cast<size_t>(layer) * experts_;
    float* predicted = &predicted_[first];
    std::fill(predicted, predicted + experts_, kPriorWeight * fraction_[layer]);
    for (size_t each = 0; each < kMeans; ++each) {
      const float* mean = mean_of(layer, each);
      for (int32_t expert = 0; expert < experts_; ++expert) {
        predicted[expert] += kWeights[each] * mean[expert];
      }
    }
    float* probability = &probability_[first];
    std::copy(predicted, predicted + experts_, probability);
    for (int32_t last : last_[layer]) {
      const float* follows = row(layer, last);
      for (int32_t expert = 0; expert < experts_; ++expert) {
        predicted[expert] += follows[expert];
        probability[expert] += kFollowTrust * follows[expert];
      }
    }
  }

  float* mean_of(int32_t layer, size_t which) {
    return &means_[(static_cast<size_t>(layer) * kMeans + which) * experts_];
  }

  int32_t now_ = 0;  // the layer that runs
  // By layer.
  std::vector<int64_t> ticks_;
  std::vector<float> fraction_;  // of the layer's experts that a forward uses, on average
  std::vector<std::vector<int32_t>> last_;  // what the last forward used, if it teaches the table
  std::vector<float> means_;                // [layers][kMeans][experts]
  // By expert id.
  std::vector<float> predicted_;    // of the next forward: what the table is learned from
  std::vector<float> probability_;  // what victims are chosen by
  std::unique_ptr<float[], decltype(&std::free)> follows_;  // [layers][experts][experts]
  std::vector<float> use_;                                  // [experts], of the forward that begins
  std::vector<int32_t> token_;                              // what one token of a prompt chose
};

}  // namespace torch_mesh
