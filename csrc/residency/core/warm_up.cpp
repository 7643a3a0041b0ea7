#include "residency/core/warm_up.h"

#include <algorithm>

#include "base/error.h"

namespace torch_mesh {

void check(const WarmUpOptions& options, int32_t layers, int32_t experts) {
  check(options.profile, layers, experts);
  if (const size_t all = static_cast<size_t>(layers) * experts;
      !options.on_gpu.empty() && options.on_gpu.size() != all) {
    throw_invalid("on_gpu has ", options.on_gpu.size(), " entries for ", all, " experts");
  }
}

WarmUp::WarmUp(const WarmUpOptions& options, SlotTable& slots)
    : slots_(slots),
      started_(options.on_gpu.empty()),
      experts_(hottest(options.profile, options.on_gpu)) {
  std::ranges::stable_partition(experts_, [&](ExpertId id) { return slots.early(id); });
  if (options.fill) append_others(options.on_gpu);
}

void WarmUp::append_others(const std::vector<bool>& on_gpu) {
  std::vector<bool> named = on_gpu;
  named.resize(static_cast<size_t>(slots_.layers()) * slots_.experts());
  for (const ExpertId id : experts_) named[id] = true;
  for (int32_t expert = 0; expert < slots_.experts(); ++expert) {
    for (int32_t layer = 0; layer < slots_.layers(); ++layer) {
      const ExpertId id = slots_.id_of(layer, expert);
      if (!named[id]) experts_.push_back(id);
    }
  }
}

int32_t WarmUp::read_next() {
  while (next_ < experts_.size() && slots_.has_empty()) {
    const ExpertId id = experts_[next_++];
    if (slots_.find(id) < 0) return slots_.read(id, Urgency::kPrefetch, Phase::kNone);
  }
  return -1;
}

}  // namespace torch_mesh
