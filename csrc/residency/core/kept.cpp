#include "residency/core/kept.h"

#include <algorithm>
#include <numeric>
#include <string>

#include "base/error.h"

namespace torch_mesh {
namespace {

// An early layer's experts change slowly: their uses are remembered for some hundred tokens.
constexpr float kDecay = .99f;

}  // namespace

void check(const KeptOptions& options, int32_t layers, int32_t experts) {
  check(options.profile, layers, experts);
  if (!(options.pins >= 0 && options.pins <= .5)) {
    throw Error(ErrorKind::kInvalid,
                "pins is a share of the slots in [0, 0.5]; got " + std::to_string(options.pins));
  }
  if (options.pins > 0 && options.profile.tokens.empty()) {
    throw Error(ErrorKind::kInvalid, "pins need a profile that says which experts are hottest");
  }
  if (const size_t all = static_cast<size_t>(layers) * experts;
      !options.elsewhere.empty() && options.elsewhere.size() != all) {
    throw Error(ErrorKind::kInvalid, "elsewhere has " + std::to_string(options.elsewhere.size()) +
                                         " entries for " + std::to_string(all) + " experts");
  }
  if (options.early_layers < 0 || options.early_experts < 0) {
    throw Error(ErrorKind::kInvalid, "early_layers and early_experts must be 0 or more; got " +
                                         std::to_string(options.early_layers) + " and " +
                                         std::to_string(options.early_experts));
  }
}

Kept::Kept(const KeptOptions& options, int32_t layers, int32_t experts, SlotTable& slots)
    : experts_(experts),
      early_layers_(options.early_experts > 0 ? std::min(options.early_layers, layers) : 0),
      most_early_(std::min(options.early_experts, experts)),
      slots_(slots),
      pins_(hottest(options.profile, static_cast<int32_t>(options.pins * slots.limit()),
                    options.elsewhere)),
      recent_(static_cast<size_t>(early_layers_) * experts, 0.f),
      order_(static_cast<size_t>(experts)) {
  if (!options.profile.tokens.empty()) {
    for (size_t id = 0; id < recent_.size(); ++id) {
      if (!options.elsewhere.empty() && options.elsewhere[id]) continue;
      recent_[id] = options.profile.rate(static_cast<int64_t>(id)) / (1 - kDecay);
    }
    slots.policy().start_from(options.profile);
  }
  resize();
  warm_ = hottest(options.profile, layers * experts, options.elsewhere);
  std::stable_partition(warm_.begin(), warm_.end(), [&](ExpertId id) { return slots.kept(id); });
  if (options.fill) append_others(layers, options.elsewhere);
}

void Kept::append_others(int32_t layers, const std::vector<bool>& elsewhere) {
  std::vector<bool> named = elsewhere;
  named.resize(static_cast<size_t>(layers) * experts_);
  for (const ExpertId id : warm_) named[id] = true;
  for (int32_t expert = 0; expert < experts_; ++expert) {
    for (int32_t layer = 0; layer < layers; ++layer) {
      const ExpertId id = layer * experts_ + expert;
      if (!named[id]) warm_.push_back(id);
    }
  }
}

void Kept::tick(int32_t layer, std::span<const int32_t> chosen, std::span<const int64_t> ids,
                int32_t top_k) {
  if (layer >= early_layers_) return;
  float* recent = &recent_[static_cast<size_t>(layer) * experts_];
  for (int32_t expert = 0; expert < experts_; ++expert) recent[expert] *= kDecay;
  if (ids.empty()) {
    for (int32_t expert : chosen) recent[expert] += 1;
  } else {
    const float one = static_cast<float>(top_k) / static_cast<float>(ids.size());
    for (int64_t id : ids) {
      if (id >= 0 && id < experts_) recent[id] += one;
    }
  }
  keep_early(layer);
}

void Kept::resize() {
  const int32_t most = slots_.limit() / 2;
  early_ = early_layers_ > 0 ? std::min(most_early_, most / early_layers_) : 0;
  for (int32_t layer = 0; layer < early_layers_; ++layer) keep_early(layer);
  const auto pins = static_cast<int32_t>(pins_.size());
  const int32_t wanted = std::min(pins, most - early_ * early_layers_);
  for (; pinned_ > wanted; --pinned_) slots_.soft_pin(pins_[pinned_ - 1], SoftPin::kProfile, false);
  for (; pinned_ < wanted; ++pinned_) slots_.soft_pin(pins_[pinned_], SoftPin::kProfile, true);
}

int32_t Kept::read_warm() {
  while (next_warm_ < warm_.size() && slots_.has_empty()) {
    const ExpertId id = warm_[next_warm_++];
    if (slots_.find(id) < 0) return slots_.read(id, Urgency::kPrefetch, Phase::kNone);
  }
  return -1;
}

// An expert that was never used is not kept.
void Kept::keep_early(int32_t layer) {
  const float* recent = &recent_[static_cast<size_t>(layer) * experts_];
  std::iota(order_.begin(), order_.end(), 0);
  std::nth_element(
      order_.begin(), order_.begin() + early_, order_.end(),
      [&](int32_t a, int32_t b) { return recent[a] != recent[b] ? recent[a] > recent[b] : a < b; });
  for (int32_t place = 0; place < experts_; ++place) {
    const int32_t expert = order_[place];
    slots_.soft_pin(layer * experts_ + expert, SoftPin::kEarlyLayer,
                    place < early_ && recent[expert] > 0);
  }
}

}  // namespace torch_mesh
