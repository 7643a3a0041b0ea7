// Prompts. A forward that needs nearly all of its layer streams the layer through a window of slots
// rather than through the whole pool, and while it computes the rest of its experts, the next
// layer's are read into the slots that it is done with.
//
// The slots outside the window hold what the policy thinks hottest: an equal share of the pool for
// each layer that the prompt has come to. So the window narrows from layer to layer, and
// decode starts with experts of all layers rather than with those of the last.
#include <algorithm>
#include <ranges>

#include "residency/pool_impl.h"

namespace torch_mesh {
namespace {

// Enough that some are read while others are computed. What the window of the last layers holds is
// lost to decode, so a small pool's is an eighth.
constexpr int32_t kLeastWindow = 16;

}  // namespace

// How many slots a layer's forward may take from others for reads whose experts it has not computed
// yet. Where other chunks follow they find the whole layer there, if that is at most half of the
// pool.
int32_t Pool::Impl::window_slots(int32_t layer, bool last_chunk) const {
  const int32_t all = slots.limit();
  const auto hot = static_cast<int32_t>(int64_t{all} * (layer + 1) / layers);
  const int32_t least =
      last_chunk ? std::min(std::max(kLeastWindow, all / 16), all / 8) : std::min(experts, all / 2);
  return std::max({1, all - hot, least});
}

// Once all that the claim needs has a slot, and so goes before this on the disk.
void Pool::Impl::read_next_layer(const Claim& claim) {
  const int32_t layer = claim.layer_ + 1;
  if (!claim.part_.window || !claim.part_.last || claim.waiting_ > 0 || layer == layers) return;
  if (closed || memory_only() || first_ticket != nullptr) return;
  int32_t missing = 0, ahead = 0;
  for (int32_t expert = 0; expert < experts; ++expert) {
    const int32_t slot = slots.find(id_of(layer, expert));
    missing += slot < 0;
    ahead += slot >= 0 && loads[slot].unused;
  }
  const int32_t most = window_slots(layer, true);
  const auto has_room = [&] { return slots.has_empty() || claim.reading_ + ahead < most; };
  if (missing == 0 || !has_room()) return;

  const auto ids = std::views::iota(id_of(layer, 0), id_of(layer, 0) + experts);
  while_kept(slots, ids, [&] {
    for (ExpertId id : ids) {
      if (!has_room()) break;
      if (slots.find(id) >= 0) continue;
      const int32_t slot = reserve(id, claim.part_.phase);
      if (slot < 0) break;
      start_load(slot, Urgency::kWindow, claim.part_.phase);
      ++ahead;
    }
  });
}

}  // namespace torch_mesh
