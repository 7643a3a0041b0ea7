#include "tables/row_cache.h"

#include <algorithm>
#include <cstring>

namespace torch_mesh {
namespace {

int64_t sets_for(int64_t bytes, int64_t rows, int64_t bytes_of_set, int64_t ways) {
  return std::max<int64_t>(0, std::min(bytes / bytes_of_set, (rows + ways - 1) / ways));
}

}  // namespace

RowCache::RowCache(int64_t bytes, int64_t rows, int64_t row_bytes)
    : row_bytes_(row_bytes),
      sets_(sets_for(bytes, rows, kWays * bytes_of_row(row_bytes), kWays)),
      rows_(static_cast<size_t>(capacity()), -1),
      used_(static_cast<size_t>(capacity()), 0),
      hand_(static_cast<size_t>(sets_), 0),
      bytes_(new std::byte[static_cast<size_t>(capacity() * row_bytes)]) {}

int64_t RowCache::first_way(int64_t row) const {
  // Neighbours go to sets that are far apart: ids of common tokens are close to each other.
  const uint64_t mixed = static_cast<uint64_t>(row) * 0x9e3779b97f4a7c15u;
  const auto set = static_cast<int64_t>((static_cast<unsigned __int128>(mixed) * sets_) >> 64);
  return set * kWays;
}

int64_t RowCache::way_of(int64_t row) const {
  if (sets_ == 0) return -1;
  const int64_t first = first_way(row);
  for (int64_t way = first; way < first + kWays; ++way) {
    if (rows_[way] == row) return way;
  }
  return -1;
}

const std::byte* RowCache::find(int64_t row) {
  const int64_t way = way_of(row);
  if (way < 0) return nullptr;
  used_[way] = 1;
  return bytes_.get() + way * row_bytes_;
}

bool RowCache::contains(int64_t row) const { return way_of(row) >= 0; }

void RowCache::insert(int64_t row, const std::byte* bytes) {
  if (sets_ == 0) return;
  const int64_t first = first_way(row);
  uint8_t& hand = hand_[first / kWays];
  // Each used row is spared once, so this ends within two rounds.
  while (rows_[first + hand] >= 0 && used_[first + hand] != 0) {
    used_[first + hand] = 0;
    hand = (hand + 1) % kWays;
  }
  const int64_t way = first + hand;
  hand = (hand + 1) % kWays;
  rows_[way] = row;
  used_[way] = 0;
  std::memcpy(bytes_.get() + way * row_bytes_, bytes, static_cast<size_t>(row_bytes_));
}

}  // namespace torch_mesh
