// Records when the misses of forwards were claimed, read, handed out and computed. Off by default.
#pragma once

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <vector>

#include "io/reader.h"

namespace torch_mesh {

struct Miss {
  using Time = std::chrono::steady_clock::time_point;

  int32_t layer = 0;
  int32_t expert = 0;
  Time claimed = {};   // by a forward
  Time begun = {};     // its first chunk went to the disk, maybe ahead of the claim; 0: unknown
  Time landed = {};    // its last chunk was read
  Time handed = {};    // to the forward: packed and checked, with the other ready ones computed
  Time released = {};  // computed, or its claim ended; 0: not yet
};

inline constexpr int32_t kMaxMisses = 1 << 20;  // the most of one timeline

// Used with the pool's lock held.
class Timeline {
 public:
  // Drops the recorded misses, and records the next `misses`; 0: none.
  void start(int32_t misses, int32_t slots) {
    limit_ = static_cast<size_t>(misses);
    misses_.clear();
    misses_.reserve(limit_);
    reads_.assign(misses > 0 ? static_cast<size_t>(slots) : 0, {});
  }
  void landed(int32_t slot, const ReadResult& read) {
    if (reads_.empty()) return;
    reads_[slot] = {.begun = read.begun, .landed = read.ended};
  }
  // Returns the number of the miss, or -1 where none is recorded. An expert in `slot` whose read
  // ended before the claim was a hit.
  int32_t handed(int32_t slot, int32_t layer, int32_t expert, Miss::Time claimed) {
    if (reads_.empty() || misses_.size() == limit_) return -1;
    Miss miss = reads_[slot];
    if (miss.landed <= claimed) return -1;
    miss.layer = layer;
    miss.expert = expert;
    miss.claimed = claimed;
    miss.handed = Miss::Time::clock::now();
    misses_.push_back(miss);
    return static_cast<int32_t>(misses_.size()) - 1;
  }
  void released(int32_t miss) {
    if (miss >= 0 && miss < std::ssize(misses_)) misses_[miss].released = Miss::Time::clock::now();
  }
  const std::vector<Miss>& misses() const { return misses_; }

 private:
  size_t limit_ = 0;
  std::vector<Miss> misses_;
  std::vector<Miss> reads_;  // by slot: the last read into it; empty: off
};

}  // namespace torch_mesh
