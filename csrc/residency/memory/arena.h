// The memory of a pool: segments that are advised to huge pages, kept out of forked children, each
// on one NUMA node where there are several, and faulted in before they are registered with a ring.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <span>
#include <utility>
#include <vector>

#include "base/descriptor.h"
#include "base/runtime.h"
#include "residency/memory/slot_memory.h"
#include "residency/memory/topology.h"

namespace torch_mesh {

inline constexpr int64_t kSegmentBytes = int64_t{64} << 20;

// The kind of memory: of this process alone, or of a sealed memfd whose segments lie one behind the
// other, which other processes may map for reading.
enum class Sharing : uint8_t { kPrivate, kShared };

class Arena final : public SlotMemory {
 public:
  // Maps room for `count` pieces (none: no memory) of `bytes` each (a multiple of 4 KiB). A piece
  // never crosses a segment. A segment is 64 MiB or one piece, whichever is larger, or a node's
  // part of all pieces, if that is smaller. Throws Error(kMemory), which says how much was asked
  // for and what is free, or Error(kInterrupted).
  Arena(int64_t count, int64_t bytes, const Topology& topology = Topology::of_this_process(),
        int64_t segment_bytes = kSegmentBytes, Sharing sharing = Sharing::kPrivate,
        const Runtime& runtime = {});
  ~Arena() override;
  Arena(const Arena&) = delete;
  Arena& operator=(const Arena&) = delete;

  std::byte* piece(int64_t index) const override;
  // The pieces of a segment are [first_of(segment), first_of(segment + 1)).
  int64_t first_of(int64_t segment) const override {
    return std::min(count_, segment * pieces_per_segment_);
  }
  // The node of the topology that a piece is on, unless that node was full.
  int32_t node(int64_t index) const override {
    return static_cast<int32_t>(index / pieces_per_segment_ % nodes_);
  }
  // For private memory: drop() returns a segment's pages to the system and keeps its addresses.
  // fault_in() fills them with zeros; without enough memory it throws Error(kMemory), after which
  // the caller drops what it got.
  void drop(int64_t segment) const override;
  void fault_in(int64_t segment) const override;
  int64_t bytes() const { return count_ * piece_bytes_; }  // of all segments, dropped or not
  std::span<const MemoryRegion> segments() const override { return segments_; }
  int descriptor() const override { return descriptor_.get(); }
  Owned<Reader> open_reader(const ReaderOptions& options, const Source& source,
                            std::span<const MemoryRegion> staging, Reader::Done done) override {
    // Raw weights are read into staging buffers alone.
    return torch_mesh::open_reader(options, source.files, source.raw ? staging : segments_,
                                   std::move(done));
  }

 private:
  Arena(int64_t count, int64_t bytes, int64_t pieces_per_segment, int32_t nodes);

  void map_shared(int64_t bytes);
  void release();

  std::vector<MemoryRegion> segments_;
  int64_t count_;
  int64_t piece_bytes_;
  int64_t pieces_per_segment_;
  int32_t nodes_;
  Descriptor descriptor_;            // of shared memory
  MemoryRegion shared_{nullptr, 0};  // all segments
};

}  // namespace torch_mesh
