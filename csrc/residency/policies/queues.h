// The queues of a policy, each in order of entry. An expert is in one of them or in none.
#pragma once

#include <cstddef>
#include <vector>

#include "residency/policies/policy.h"

namespace torch_mesh {

// `Name` is an enum whose values are kNone = 0, the queues, and kCount.
template <typename Name>
class Queues {
 public:
  explicit Queues(int64_t experts)
      : of_(static_cast<size_t>(experts), Name::kNone),
        links_(experts),
        lists_(static_cast<size_t>(Name::kCount), IndexList(links_)) {}
  Queues(const Queues&) = delete;
  Queues& operator=(const Queues&) = delete;

  Name of(ExpertId id) const { return of_[id]; }
  const IndexList& operator[](Name queue) const { return lists_[static_cast<size_t>(queue)]; }
  // Moves an expert to the back of `to`, from wherever it is.
  void move(ExpertId id, Name to) {
    if (of_[id] != Name::kNone) list(of_[id]).erase(id);
    if (to != Name::kNone) list(to).push_back(id);
    of_[id] = to;
  }
  // Moves the oldest experts of `queue` to `to` until it has at most `most`.
  void shorten(Name queue, int32_t most, Name to) {
    while (list(queue).size() > most) move(list(queue).front(), to);
  }

 private:
  IndexList& list(Name queue) { return lists_[static_cast<size_t>(queue)]; }

  std::vector<Name> of_;  // by expert
  IndexLinks links_;
  std::vector<IndexList> lists_;  // by name
};

}  // namespace torch_mesh
