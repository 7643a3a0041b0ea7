#include "tables/row_cache.h"

#include <gtest/gtest.h>

#include <cstring>
#include <random>
#include <vector>

#include "reader_fixture.h"

namespace torch_mesh {
namespace {

std::vector<std::byte> row_of(int64_t row, uint64_t version = 0) {
  std::vector<std::byte> bytes(24);
  const int64_t words[] = {row, static_cast<int64_t>(version), ~row};
  std::memcpy(bytes.data(), words, bytes.size());
  return bytes;
}

bool has(RowCache& cache, int64_t row) {
  const std::byte* bytes = cache.find(row);
  return bytes != nullptr && std::memcmp(bytes, row_of(row).data(), 24) == 0;
}

TEST(RowCacheTest, StaysWithinTheRequestedBytes) {
  for (const int64_t bytes : {0, 1, 263, 264, 1000, 100'000}) {
    const RowCache cache(bytes, 1'000'000, 24);
    EXPECT_LE(cache.bytes(), bytes);
    EXPECT_EQ(cache.capacity() > 0, bytes >= 264) << bytes;  // a set of eight rows of 24 + 9 bytes
  }
  EXPECT_EQ(RowCache(1 << 20, 10, 24).capacity(), 16);  // nor larger than the table, in whole sets
}

TEST(RowCacheTest, WithoutRoomItHoldsNothing) {
  RowCache cache(0, 100, 24);
  cache.insert(3, row_of(3).data());
  EXPECT_EQ(cache.find(3), nullptr);
  EXPECT_FALSE(cache.contains(3));
}

TEST(RowCacheTest, FindsTheRowsThatWereInserted) {
  const uint64_t seed = testing::fresh_seed();
  const ::testing::ScopedTrace trace(__FILE__, __LINE__,
                                     "TORCH_MESH_TEST_SEED=" + std::to_string(seed));
  std::mt19937_64 random(seed);
  RowCache cache(20'000, 10'000, 24);
  int64_t found = 0;
  for (int32_t step = 0; step < 20'000; ++step) {
    const auto row = static_cast<int64_t>(random() % 1000);
    if (cache.contains(row)) {
      ASSERT_TRUE(has(cache, row));
      ++found;
    } else {
      cache.insert(row, row_of(row).data());
      ASSERT_TRUE(has(cache, row));
    }
  }
  EXPECT_GT(found, 0);
}

TEST(RowCacheTest, RowsThatAreUsedAgainStayThroughAScan) {
  RowCache cache(8 * 33 * 64, 1'000'000, 24);
  std::vector<int64_t> hot;
  for (int64_t row = 0; row < 64; ++row) {
    cache.insert(row, row_of(row).data());
  }
  for (int64_t row = 1000; row < 20'000; ++row) {
    cache.insert(row, row_of(row).data());
    for (int64_t used = 0; used < 64; ++used) cache.find(used);
  }
  int64_t kept = 0;
  for (int64_t row = 0; row < 64; ++row) kept += cache.contains(row);
  EXPECT_GE(kept, 60);  // a set of eight may have had more of them
}

}  // namespace
}  // namespace torch_mesh
