// The buffers of one forward. They only ever grow, so after the first forwards of a shape nothing
// is allocated.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <mutex>
#include <vector>

#include "base/aligned_memory.h"
#include "kernels/expert_ffn.h"
#include "residency/pool.h"

namespace torch_mesh {

// Cache-line aligned memory that keeps no contents when it grows.
class Buffer {
 public:
  // Throws Error(kMemory).
  std::byte* reserve(int64_t bytes);
  std::byte* data() { return data_.get(); }
  const std::byte* data() const { return data_.get(); }
  int64_t bytes() const { return bytes_; }

 private:
  AlignedMemory data_;
  int64_t bytes_ = 0;
};

// The (token, choice) pairs of a chunk, grouped by expert; choices of one expert stay in token
// order.
struct Grouping {
  std::vector<int32_t> experts;   // the distinct experts that have rows
  std::vector<int32_t> first;     // [experts.size() + 1] into the arrays of pairs
  std::vector<int32_t> tokens;    // per pair: its row of x
  std::vector<int32_t> out_rows;  // per pair: token * top_k + choice
  std::vector<float> weights;     // per pair
  std::vector<int32_t> cursor;    // [experts of the layer], of the counting sort

  int32_t rows(int32_t index) const { return first[index + 1] - first[index]; }
};

struct Workspace {
  Grouping grouping;
  std::vector<Claim::Entry> entries;
  std::vector<int64_t> scratch_offset;  // per distinct expert
  std::vector<int64_t> adapted_offset;  // likewise, in scratch too
  Buffer prepared;
  Buffer products;
  Buffer scratch;

  int64_t bytes() const { return prepared.bytes() + products.bytes() + scratch.bytes(); }
};

// Each concurrent forward takes one workspace. There are as many as forwards ever ran at the same
// time.
class WorkspacePool {
 public:
  class Lease {
   public:
    explicit Lease(WorkspacePool& pool);
    ~Lease();
    Lease(const Lease&) = delete;
    Lease& operator=(const Lease&) = delete;
    Workspace& operator*() { return *workspace_; }

   private:
    WorkspacePool& pool_;
    std::unique_ptr<Workspace> workspace_;
    int64_t bytes_before_;
  };

  int64_t bytes() const;

 private:
  mutable std::mutex mutex_;
  std::vector<std::unique_ptr<Workspace>> idle_;
  size_t made_ = 0;  // idle or leased
  int64_t bytes_ = 0;
};

}  // namespace torch_mesh
