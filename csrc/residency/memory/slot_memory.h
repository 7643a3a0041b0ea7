// The memory of slots: an arena of the pool's own, or a pool that lends them.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>

#include "io/reader.h"
#include "store/source.h"

namespace torch_mesh {

class SlotMemory {
 public:
  virtual ~SlotMemory() = default;

  virtual std::byte* piece(int64_t slot) const = 0;
  // The address that a read of the slot's record writes to.
  virtual std::byte* destination(int64_t slot) const { return piece(slot); }
  // The node of the pool's topology that a record is on; -1: unknown.
  virtual int32_t node(int64_t slot) const = 0;
  // Opens a reader of the records of `source`. `staging`: further memory that it reads into.
  virtual Owned<Reader> open_reader(const ReaderOptions& options, const Source& source,
                                    std::span<const MemoryRegion> staging, Reader::Done done) = 0;

  // The pool's own memory, which is attached and detached in segments of slots; empty: there is
  // none.
  virtual std::span<const MemoryRegion> segments() const { return {}; }
  virtual int64_t first_of(int64_t segment) const { return (void)segment, 0; }
  virtual void fault_in(int64_t segment) const { (void)segment; }
  virtual void drop(int64_t segment) const { (void)segment; }
  // The memfd of all slots; -1: the memory belongs to this process alone.
  virtual int descriptor() const { return -1; }
};

}  // namespace torch_mesh
