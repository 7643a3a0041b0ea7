// Pools whose slots hold no bytes: a resident record is a range of mapped files, which the page
// cache keeps in memory. The kernel may take back what a slot says is there, and be asked for it
// again.
#include <cerrno>

#include "residency/pool_impl.h"

namespace torch_mesh {

std::byte* Pool::Impl::record_in(int32_t slot) const {
  return mapping ? mapping->at(extent_of(slots[slot].expert)) : arena.piece(slot);
}

// With the lock, of a READY slot. Without it the expert counts as given up: what reads it in is
// then the reader, ahead of those who compute and with all of a record in one go.
bool Pool::Impl::still_there(int32_t slot) {
  if (!mapping || !slots.reusable(slot) || mapping->in_memory(extent_of(slots[slot].expert))) {
    return true;
  }
  evict(slot, loads[slot].phase);
  return false;
}

// Advice to the kernel takes as long as it has pages to look at, so it is given without the lock,
// to what is not resident again by then.
void Pool::Impl::cool_evicted() {
  for (;;) {
    Extent extent;
    {
      const Lock lock(mutex);
      if (to_cool.empty()) return;
      const ExpertId id = to_cool.back();
      to_cool.pop_back();
      if (slots.find(id) >= 0) continue;
      extent = extent_of(id);
    }
    mapping->cool(extent);
  }
}

// With the lock. After a loss nobody knows which of the resident records have pages left: those
// that nobody uses are read anew, which finds out.
int64_t Pool::Impl::losses_so_far() {
  if (!mapping) return 0;
  const int64_t losses = mapping->losses();
  if (losses == losses_seen) return losses;
  if (mapping->mend()) losses_seen = losses;  // else the next claim tries again
  for (int32_t slot = 0; slot < slots.size(); ++slot) {
    if (slots.reusable(slot) && slots[slot].state == SlotState::kReady) evict(slot, Phase::kNone);
  }
  wake_slot_waiters();
  return losses;
}

void Claim::check_read() const {
  const Pool::Impl& impl = *pool_.impl_;
  if (!impl.mapping || impl.mapping->intact_since(losses_)) return;
  const ErrorPlace place = impl.place_of(impl.id_of(layer_, experts_.empty() ? 0 : experts_[0]));
  throw Error(ErrorKind::kRead,
              "pages of a mapped store were gone while a forward of layer " +
                  std::to_string(layer_) + " used them (such as " + place.file +
                  "): the file was cut off or replaced, or the disk failed; io=\"auto\" keeps what "
                  "it has read in memory of its own",
              {layer_, -1, place.file, -1}, EIO);
}

}  // namespace torch_mesh
