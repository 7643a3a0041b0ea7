// The memory of a pool: segments that are advised to huge pages, kept out of forked children, each
// on one NUMA node where there are several, and faulted in before they are registered with a ring.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

#include "io/reader.h"
#include "residency/topology.h"

namespace torch_mesh {

inline constexpr int64_t kSegmentBytes = int64_t{64} << 20;

class Arena {
 public:
  // Room for `count` pieces of `bytes` each (a multiple of 4 KiB). A piece never crosses a segment;
  // segments are 64 MiB or one piece, whichever is larger, or a node's share of it all, if that is
  // smaller. Throws Error(kMemory), saying how much
  // was asked for and what is free.
  Arena(int64_t count, int64_t bytes, const Topology& topology = Topology::of_this_process());
  ~Arena();
  Arena(const Arena&) = delete;
  Arena& operator=(const Arena&) = delete;

  std::byte* piece(int64_t index) const;
  // Where it lies, of the topology's nodes, unless that node was full.
  int32_t node(int64_t index) const {
    return static_cast<int32_t>(index / pieces_per_segment_ % nodes_);
  }
  int64_t bytes() const { return total_; }
  int64_t huge_page_bytes() const;  // how much of it the kernel backs with huge pages now
  std::span<const MemoryRegion> segments() const { return segments_; }

 private:
  std::vector<MemoryRegion> segments_;
  int64_t count_;
  int64_t piece_bytes_;
  int64_t pieces_per_segment_;
  int32_t nodes_;
  int64_t total_ = 0;
};

}  // namespace torch_mesh
