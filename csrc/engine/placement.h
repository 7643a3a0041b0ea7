// The order of a batch's experts in the list of tasks, and the threads that are offered them first.
#pragma once

#include <algorithm>
#include <array>
#include <cstdint>
#include <span>

#include "engine/task_queue.h"
#include "residency/memory/topology.h"
#include "residency/pool.h"

namespace torch_mesh {

// The most experts in one batch; after each the engine asks the claim for more. Enough for a decode
// step of any model in one batch, few enough that a prefill releases slots while it computes.
constexpr int32_t kReadyBatch = 16;

static_assert(3 * kReadyBatch + 2 <= TaskQueue::kMaxStages);

// The experts of a batch in an order that keeps those of a NUMA node together.
class Placement {
 public:
  Placement(const Topology& topology, std::span<const ReadyExpert> ready)
      : topology_(topology), nodes_(std::min(topology.nodes(), TaskQueue::kMaxNodes)) {
    for (int32_t node = 0; node < nodes_; ++node) {
      for (size_t i = 0; i < ready.size(); ++i) {
        const int32_t own = ready[i].node < 0 ? static_cast<int32_t>(i) : ready[i].node;
        if (nodes_ > 1 && own % nodes_ != node) continue;
        order_[count_++] = static_cast<int32_t>(i);
      }
      end_[node] = count_;
    }
  }

  int32_t operator[](int32_t place) const { return order_[place]; }

  // Calls add_lane(first place, end) for the experts of each node, in a lane of its own if there
  // are several nodes.
  template <typename AddLane>
  void add_lanes(TaskQueue& queue, const AddLane& add_lane) const {
    for (int32_t node = 0; node < nodes_; ++node) {
      if (nodes_ > 1) queue.next_lane();
      add_lane(node == 0 ? 0 : end_[node - 1], end_[node]);
    }
    if (nodes_ > 1) queue.next_lane();
  }

  int32_t current_node() const { return topology_.current_node() % nodes_; }

 private:
  const Topology& topology_;
  int32_t nodes_;
  int32_t count_ = 0;
  std::array<int32_t, kReadyBatch> order_;
  std::array<int32_t, TaskQueue::kMaxNodes> end_;
};

}  // namespace torch_mesh
