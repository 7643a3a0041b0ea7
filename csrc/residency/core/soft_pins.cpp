#include "residency/core/soft_pins.h"

#include <algorithm>
#include <numeric>

#include "base/error.h"

namespace torch_mesh {
namespace {

// An early layer's hot experts change slowly, so uses are remembered for some hundred tokens.
constexpr float kDecay = .99f;

}  // namespace

void check(const SoftPinOptions& options) {
  if (options.early_layers < 0 || options.early_experts < 0) {
    throw_invalid("early_layers and early_experts must be 0 or more; got ", options.early_layers,
                  " and ", options.early_experts);
  }
}

SoftPins::SoftPins(const SoftPinOptions& options, const WarmUpOptions& warm_up, SlotTable& slots)
    : experts_(slots.experts()),
      early_layers_(options.early_experts > 0 ? std::min(options.early_layers, slots.layers()) : 0),
      max_early_(std::min(options.early_experts, experts_)),
      slots_(slots),
      recent_(static_cast<size_t>(early_layers_) * experts_, 0.f),
      order_(static_cast<size_t>(experts_)) {
  for (size_t id = 0; id < recent_.size() && !warm_up.profile.tokens.empty(); ++id) {
    if (!warm_up.on_gpu.empty() && warm_up.on_gpu[id]) continue;
    recent_[id] = warm_up.profile.rate(static_cast<int64_t>(id)) / (1 - kDecay);
  }
  resize();
}

void SoftPins::tick(int32_t layer, std::span<const int32_t> chosen, std::span<const int64_t> ids,
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
  pin_hottest(layer);
}

void SoftPins::resize() {
  for (int32_t layer = 0; layer < early_layers_; ++layer) pin_hottest(layer);
}

// An expert that was never used is not pinned.
void SoftPins::pin_hottest(int32_t layer) {
  const int32_t early = std::min(max_early_, slots_.limit() / 2 / early_layers_);
  const float* recent = &recent_[static_cast<size_t>(layer) * experts_];
  std::iota(order_.begin(), order_.end(), 0);
  std::nth_element(order_.begin(), order_.begin() + early, order_.end(), [&](int32_t a, int32_t b) {
    return recent[a] != recent[b] ? recent[a] > recent[b] : a < b;
  });
  for (int32_t position = 0; position < experts_; ++position) {
    const int32_t expert = order_[position];
    slots_.soft_pin(layer * experts_ + expert, SoftPin::kEarly,
                    position < early && recent[expert] > 0);
  }
}

}  // namespace torch_mesh
