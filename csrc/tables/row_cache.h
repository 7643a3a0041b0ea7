// A set-associative cache of rows of one table, without threads or clocks.
//
// A row can be in any way of one set, so a look-up reads one line of ids and nothing is allocated
// after the start. A new row is evicted before those of its set that were used since: a prompt
// whose rows are not used again leaves the hot ones in place.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <vector>

namespace torch_mesh {

class RowCache {
 public:
  static constexpr int32_t kWays = 8;

  // Takes at most `bytes`, in whole sets, and no more sets than `rows` rows of `row_bytes` fill.
  // Has no room if not even one set fits. Throws std::bad_alloc.
  RowCache(int64_t bytes, int64_t rows, int64_t row_bytes);

  // Returns the bytes of a row and marks it as used; nullptr if it is not there. Valid until
  // insert().
  const std::byte* find(int64_t row);
  bool contains(int64_t row) const;
  // Inserts a row that is not there, in the place of another if its set is full.
  void insert(int64_t row, const std::byte* bytes);

  int64_t capacity() const { return sets_ * kWays; }  // rows
  int64_t bytes() const { return capacity() * bytes_of_row(row_bytes_); }

 private:
  static int64_t bytes_of_row(int64_t row_bytes) { return row_bytes + kBookkeeping; }
  static constexpr int64_t kBookkeeping = sizeof(int64_t) + 1;  // its id, and whether it was used

  int64_t first_way(int64_t row) const;  // of the set of a row
  int64_t way_of(int64_t row) const;     // -1: it is not there

  const int64_t row_bytes_;
  const int64_t sets_;
  std::vector<int64_t> rows_;           // by way; -1: empty
  std::vector<uint8_t> used_;           // by way: since it came, or since it was last spared
  std::vector<uint8_t> hand_;           // by set: the way to be looked at next
  std::unique_ptr<std::byte[]> bytes_;  // faulted in as rows come
};

}  // namespace torch_mesh
