// Doubly linked lists over dense indices: membership, order and removal in constant time, and no
// allocation but for more indices. Several lists may share one set of links as long as an index is
// in one of them at most.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

namespace torch_mesh {

class IndexLinks {
 public:
  explicit IndexLinks(int64_t count) { resize(count); }
  void resize(int64_t count) {
    next_.resize(static_cast<size_t>(count), -1);
    previous_.resize(static_cast<size_t>(count), -1);
  }

 private:
  friend class IndexList;
  std::vector<int32_t> next_;
  std::vector<int32_t> previous_;
};

class IndexList {
 public:
  explicit IndexList(IndexLinks& links) : links_(links) {}

  bool empty() const { return front_ < 0; }
  int32_t size() const { return size_; }
  int32_t front() const { return front_; }  // -1 when empty
  int32_t next(int32_t index) const { return links_.next_[index]; }
  void push_back(int32_t index) {
    links_.next_[index] = -1;
    links_.previous_[index] = back_;
    (back_ < 0 ? front_ : links_.next_[back_]) = index;
    back_ = index;
    ++size_;
  }

  void erase(int32_t index) {
    const int32_t next = links_.next_[index], previous = links_.previous_[index];
    (previous < 0 ? front_ : links_.next_[previous]) = next;
    (next < 0 ? back_ : links_.previous_[next]) = previous;
    --size_;
  }

  int32_t pop_front() {
    const int32_t index = front_;
    erase(index);
    return index;
  }

 private:
  IndexLinks& links_;
  int32_t front_ = -1;
  int32_t back_ = -1;
  int32_t size_ = 0;
};

}  // namespace torch_mesh
