// The base of policies that keep experts in queues.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "io/index_list.h"
#include "residency/policies/policy.h"

namespace torch_mesh {

class QueuePolicy : public Policy {
 protected:
  // Each policy numbers its queues, from 1 on. An expert is in one of them or in none (0).
  using Queue = uint8_t;

  // `queues`: one more than their number.
  QueuePolicy(const PolicyOptions& options, size_t queues)
      : Policy(options.all()),
        of_(static_cast<size_t>(options.all()), 0),
        links_(options.all()),
        queues_(queues, IndexList(links_)) {}
  QueuePolicy(const QueuePolicy&) = delete;
  QueuePolicy& operator=(const QueuePolicy&) = delete;

  Queue queue_of(ExpertId id) const { return of_[id]; }
  int32_t size(Queue queue) const { return queues_[queue].size(); }
  ExpertId oldest(Queue queue) const { return queues_[queue].front(); }
  ExpertId next(ExpertId id) const { return queues_[of_[id]].next(id); }
  // The oldest evictable expert of a queue of residents; kNoExpert when all are pinned.
  ExpertId oldest_evictable(Queue queue) const {
    ExpertId id = oldest(queue);
    while (id >= 0 && !evictable(id)) id = next(id);
    return id;
  }
  // Moves an expert to the back of `to`, from wherever it is.
  void move(ExpertId id, Queue to) {
    if (of_[id] != 0) queues_[of_[id]].erase(id);
    if (to != 0) queues_[to].push_back(id);
    of_[id] = to;
  }
  // Moves the oldest experts of `queue` to `to` until it has at most `limit`.
  void shorten(Queue queue, int32_t limit, Queue to) {
    while (size(queue) > limit) move(oldest(queue), to);
  }

 private:
  void removed(ExpertId id) override { move(id, 0); }

  std::vector<Queue> of_;  // by expert
  IndexLinks links_;
  std::vector<IndexList> queues_;
};

}  // namespace torch_mesh
