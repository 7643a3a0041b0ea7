// Where the records of slots lie: in memory of the pool's own, or where files are mapped.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>

#include "io/reader.h"
#include "residency/memory/arena.h"
#include "residency/memory/topology.h"
#include "residency/policies/policy.h"
#include "store/source.h"

namespace torch_mesh {

class SlotMemory {
 public:
  virtual ~SlotMemory() = default;

  virtual std::byte* record(int32_t slot, ExpertId id) const = 0;
  // Where a read of it goes.
  virtual std::byte* destination(int32_t slot, ExpertId id) const { return record(slot, id); }
  // Of the pool's topology, where a record lies; -1: nobody knows.
  virtual int32_t node(int32_t slot) const = 0;
  // What brings records into memory; `staging`: further memory that it reads into.
  virtual std::unique_ptr<Reader> open_reader(const ReaderOptions& options,
                                              std::span<const MemoryRegion> staging,
                                              Reader::Done done) const = 0;

  // Memory of its own, which comes and goes in segments of slots; none: nothing of that is there.
  virtual std::span<const MemoryRegion> segments() const { return {}; }
  virtual int32_t slots_per_segment() const { return 0; }
  virtual void fault_in(int64_t segment) const { static_cast<void>(segment); }
  virtual void drop(int64_t segment) const { static_cast<void>(segment); }

  // The memfd that all of it lies in; -1: it is of this process alone.
  virtual int descriptor() const { return -1; }

  // Records that the kernel may take back, and be asked for again.
  virtual bool may_lose() const { return false; }
  virtual int64_t mapped_bytes() const { return 0; }  // in the page cache, and none of the pool's
  virtual bool holds(ExpertId id) const { return static_cast<void>(id), true; }
  virtual void cool(ExpertId id) const { static_cast<void>(id); }    // it is to go first
  virtual void forget(ExpertId id) const { static_cast<void>(id); }  // it is to be read anew
  // Losses of bytes that somebody used, so far; whether there was none since `before`.
  virtual int64_t losses() const { return 0; }
  virtual bool intact_since(int64_t before) const { return static_cast<void>(before), true; }
  virtual bool mend() { return true; }  // false: the next call tries again
};

struct SlotMemoryOptions {
  int32_t slots;
  int64_t record_bytes;
  const Topology& topology;
  int64_t segment_bytes;
  Sharing sharing;
};

// Throws what Arena throws. `source` outlives the memory.
std::unique_ptr<SlotMemory> make_arena_memory(const SlotMemoryOptions& options,
                                              const Source& source);
// Slots hold no bytes: a resident record is a range of mapped files, which the page cache keeps in
// memory, and an evicted one is what the kernel is advised to take back first. Throws what
// MappedFiles throws.
std::unique_ptr<SlotMemory> make_mapped_memory(const Source& source);

}  // namespace torch_mesh
