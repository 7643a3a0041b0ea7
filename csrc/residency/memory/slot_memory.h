// Where the records of slots lie: in an arena of the pool's own, or in a pool that lends them.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>

#include "io/reader.h"
#include "store/source.h"

namespace torch_mesh {

class SlotMemory {
 public:
  virtual ~SlotMemory() = default;

  virtual std::byte* piece(int64_t slot) const = 0;
  // Where a read of it goes.
  virtual std::byte* destination(int64_t slot) const { return piece(slot); }
  // Of the pool's topology, where a record lies; -1: unknown.
  virtual int32_t node(int64_t slot) const = 0;
  // What brings records of `source` into memory; `staging`: further memory that it reads into.
  virtual std::unique_ptr<Reader> open_reader(const ReaderOptions& options, const Source& source,
                                              std::span<const MemoryRegion> staging,
                                              Reader::Done done) = 0;

  // Memory of its own, which comes and goes in segments of slots; none: nothing of that is there.
  virtual std::span<const MemoryRegion> segments() const { return {}; }
  virtual int64_t first_of(int64_t segment) const { return (void)segment, 0; }
  virtual void fault_in(int64_t segment) const { (void)segment; }
  virtual void drop(int64_t segment) const { (void)segment; }
  // The memfd that all of it lies in; -1: it is of this process alone.
  virtual int descriptor() const { return -1; }
};

}  // namespace torch_mesh
