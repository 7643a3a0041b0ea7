// The experts that the next layer is expected to use, from the prediction until the layer begins.
// No threads: the caller holds the pool's lock.
//
// An expert gets a slot only when its read can begin. One that still waits when its layer begins
// has cost no slot, and is dropped if the layer does not use it. The rank of a prediction says how
// likely it is right. The number of reads that have begun before it says how likely it arrives in
// time: a wrong prediction that arrives in time delays no other read. A prediction is not read if
// it is too unlikely for its position among the reads (docs/decisions/0018).
#pragma once

#include <algorithm>
#include <array>
#include <cstdint>
#include <span>
#include <vector>

#include "residency/core/slots.h"

namespace torch_mesh {

class Expected {
 public:
  explicit Expected(SlotTable& slots)
      : slots_(slots), right_(static_cast<size_t>(slots.layers()) * kPositions) {
    ids_.reserve(slots.experts());
    cold_.reserve(slots.experts());
  }

  // Replaces the expected experts by distinct experts of `layer`, the likeliest first. Those
  // without a slot are cold. `phase`: of the forward that predicted.
  void set(int32_t layer, std::span<const int32_t> experts, Phase phase) {
    clear();
    for (int32_t expert : experts) {
      ids_.push_back(slots_.id_of(layer, expert));
      cold_.push_back(slots_.find(ids_.back()) < 0);
    }
    layer_ = layer;
    phase_ = phase;
  }

  // A forward of `layer` begins, and uses `experts`. Learns which predictions were right, including
  // those that were not read, and which reads ended in time.
  void begin(int32_t layer, std::span<const int32_t> experts) {
    if (layer != layer_) return;
    for (size_t position = 0, reads = 0; position < ids_.size(); ++position) {
      if (!cold_[position]) continue;
      if (worth_reading(position, reads)) {
        in_time_after(reads++).learn(slots_.ready(ids_[position]));
      }
      right_at(position).learn(std::ranges::find(experts, ids_[position] % slots_.experts()) !=
                               experts.end());
    }
    clear();
  }

  // Adds those that are worth a read and have had no slot to `ids`, the likeliest first.
  void waiting(std::vector<ExpertId>& ids) {
    for (size_t position = next_, reads = reads_; position < ids_.size(); ++position) {
      if (slots_.find(ids_[position]) >= 0 || !worth_reading(position, reads)) continue;
      ids.push_back(ids_[position]);
      ++reads;
    }
  }

  // Begins to read the likeliest one that has no slot and is worth it. Returns its slot; -1: there
  // is no such expert, or no slot. Evicts none of those expected.
  int32_t read_next() {
    while (next_ < ids_.size() &&
           (slots_.find(ids_[next_]) >= 0 || !worth_reading(next_, reads_))) {
      ++next_;
    }
    if (next_ == ids_.size()) return -1;
    int32_t slot = -1;
    slots_.while_pinned(ids_, [&] { slot = slots_.read(ids_[next_], Urgency::kPrefetch, phase_); });
    // One whose read fails at once is not asked for again. Without a slot for this one there is
    // none for the others.
    next_ = slot < 0 ? ids_.size() : next_ + 1;
    ++reads_;
    return slot;
  }

 private:
  // How often something was true, of the last few hundred times.
  struct Fraction {
    static constexpr int32_t kMemory = 256;
    float value = 1;  // as if it had been true eight times
    int32_t count = 8;

    void learn(bool so) {
      if (count < kMemory) ++count;
      value += (static_cast<float>(so) - value) / static_cast<float>(count);
    }
  };
  static constexpr size_t kPositions = 16;  // parts of a ranking of any length
  static constexpr size_t kReads = 16;      // of one layer; later ones count as the last

  Fraction& right_at(size_t position) {
    return right_[layer_ * kPositions + position * kPositions / ids_.size()];
  }

  // `reads`: the reads of this layer before it.
  Fraction& in_time_after(size_t reads) { return in_time_[std::min(reads, kReads - 1)]; }

  // How often a prediction has to be right to be read. A wrong one costs an eviction if it arrives
  // in time, and delays others if it does not.
  static constexpr float kMinRightInTime = 0.3f, kMinRightLate = 0.7f;

  bool worth_reading(size_t position, size_t reads) {
    const float in_time = in_time_after(reads).value;
    return right_at(position).value >= kMinRightLate + (kMinRightInTime - kMinRightLate) * in_time;
  }

  void clear() {
    ids_.clear();
    cold_.clear();
    layer_ = -1;
    next_ = 0;
    reads_ = 0;
  }

  SlotTable& slots_;
  int32_t layer_ = -1;
  Phase phase_ = Phase::kNone;
  std::vector<Fraction> right_;  // [layer][position]; all are read until it has learned more
  std::array<Fraction, kReads> in_time_;  // by the number of a layer's reads before it
  std::vector<ExpertId> ids_;
  std::vector<char> cold_;  // had no slot when they were predicted
  size_t next_ = 0;         // those before it have or had a slot
  size_t reads_ = 0;        // that have begun
};

}  // namespace torch_mesh
