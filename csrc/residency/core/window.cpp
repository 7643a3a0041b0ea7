#include "residency/core/window.h"

#include <algorithm>
#include <ranges>

namespace torch_mesh {
namespace {

// Enough that some are read while others are computed. Decode cannot use what the window of the
// last layers holds, so in a small pool the window is an eighth of the slots.
constexpr int32_t kMinWindow = 16;
// At least one token's experts, which are read at once, whatever the pool.
constexpr int32_t kMinNarrow = 8;

}  // namespace

// If a forward leaves many experts of its layer unused, so will the next layer's, and most of what
// would be read ahead for it would be in vain.
bool Window::will_read_next_layer(const ClaimState& claim) const {
  if (!claim.part.streams || claim.part.phase != Phase::kPrefill) return false;
  if (slots_.covers_all()) return false;
  if (prefill_ != PrefillWindow::kAuto) return prefill_ == PrefillWindow::kAlways;
  return std::ssize(claim.entries) * 8 >= int64_t{slots_.experts()} * 7;
}

// If other chunks follow, they find the whole layer there, if that is at most half of the pool.
int32_t Window::slots_for(int32_t layer, bool last_chunk) const {
  const int32_t all = slots_.limit();
  const auto hot = static_cast<int32_t>(int64_t{all} * (layer + 1) / slots_.layers());
  const int32_t min_window = last_chunk ? std::min(std::max(kMinWindow, all / 16), all / 8)
                                        : std::min(slots_.experts(), all / 2);
  return std::max({1, all - hot, min_window});
}

// As few slots as keep the disk busy: the next forward has no use for what they hold.
int32_t Window::narrow() const {
  return std::max(kMinNarrow, std::min(kMinWindow, slots_.limit() / 8));
}

void Window::read_next_layer(const ClaimState& claim) {
  const int32_t layer = claim.layer + 1;
  if (!claim.reads_next_layer || !claim.part.last || claim.waiting > 0 || layer == slots_.layers())
    return;
  const auto ids = std::views::iota(slots_.id_of(layer, 0), slots_.id_of(layer + 1, 0));
  int32_t missing = 0, ahead = 0;
  for (ExpertId id : ids) {
    const int32_t slot = slots_.find(id);
    missing += slot < 0;
    ahead += slot >= 0 && slots_[slot].unused;
  }
  // The disk reads one narrow window before the next layer's attention is over.
  const int32_t limit = is_narrow(claim) ? 2 * narrow() : slots_for(layer, true);
  const int32_t begun_before = slots_.loading();
  const auto has_room = [&] {
    const int32_t begun = slots_.loading() - begun_before;
    return slots_.has_empty() || claim.window_slots + ahead + begun < limit;
  };
  if (missing == 0 || !has_room()) return;
  slots_.read_missing(ids, Urgency::kWindow, claim.part.phase, has_room);
}

}  // namespace torch_mesh
