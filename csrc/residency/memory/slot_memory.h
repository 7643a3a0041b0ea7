// Where the records of slots lie: in memory of the pool's own, or of a pool that lends it.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>

#include "io/reader.h"
#include "residency/memory/arena.h"
#include "residency/memory/topology.h"
#include "store/source.h"

namespace torch_mesh {

class SlotMemory {
 public:
  virtual ~SlotMemory() = default;

  virtual std::byte* record(int32_t slot) const = 0;
  // Where a read of it goes.
  virtual std::byte* destination(int32_t slot) const { return record(slot); }
  // Of the pool's topology, where a record lies; -1: unknown.
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

}  // namespace torch_mesh
