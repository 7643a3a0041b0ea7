// Pools over mapped stores, whose records are the kernel's pages.
#include <fcntl.h>
#include <gtest/gtest.h>
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <cstring>
#include <random>
#include <string>
#include <vector>

#include "claim_fixture.h"
#include "error_of.h"
#include "pool_fixture.h"

namespace torch_mesh {
namespace {

using namespace testing;

PoolOptions mapped_options(int32_t slots) {
  PoolOptions options = options_of(slots);
  options.reader.backend = "mmap";
  return options;
}

TEST(MappedPool, ForwardsFindTheirRecordsWhateverIsEvicted) {
  const auto seed = std::random_device{}();
  SCOPED_TRACE("seed " + std::to_string(seed));
  std::mt19937 draw(seed);
  const TestStore store(3, 8);
  Pool pool(mapped_options(9), {}, store.source(), nullptr);
  EXPECT_EQ(pool.memory_bytes(), 0);
  EXPECT_EQ(pool.mapped_bytes(), 24 * kRecord);
  for (int32_t step = 0; step < 300; ++step) {
    const auto layer = static_cast<int32_t>(draw() % 3);
    std::vector<int32_t> experts = all_of(8);
    std::shuffle(experts.begin(), experts.end(), draw);
    experts.resize(1 + draw() % 8);
    if (draw() % 8 == 0) pool.resize(1 + static_cast<int32_t>(draw() % 9));
    if (draw() % 4 == 0) pool.prefetch((layer + 1) % 3, experts);
    if (draw() % 4 == 0) pool.evict(layer, experts);
    forward(pool, layer, experts, 1 + draw() % 4, [&] { pool.validate(); });
  }
  pool.drain();
  expect_at_rest(pool);
  EXPECT_GT(total(pool).evicted, 0);
}

TEST(MappedPool, SizeIsAdviceAndTakesNoMemory) {
  const TestStore store(2, 8);
  Pool pool(mapped_options(16), {}, store.source(), nullptr);
  for (int32_t layer = 0; layer < 2; ++layer) forward(pool, layer, all_of(8));
  EXPECT_EQ(pool.slot_bytes(), 16 * kRecord);
  EXPECT_EQ(pool.resize(5), 5);
  EXPECT_EQ(pool.slot_bytes(), 5 * kRecord);
  EXPECT_EQ(total(pool).evicted, 11);
  EXPECT_EQ(pool.resize(16), 16);
  for (int32_t layer = 0; layer < 2; ++layer) forward(pool, layer, all_of(8));
  expect_at_rest(pool);
}

TEST(MappedPool, FileCutOffWhileItsBytesAreInUse) {
  const TestStore store(1, 4);
  Pool pool(mapped_options(4), {}, store.source(), nullptr);
  forward(pool, 0, all_of(4));
  const std::vector<int32_t> experts = all_of(4);
  {
    std::vector<Claim::Entry> entries(4);
    std::array<ReadyExpert, 4> ready;
    Claim claim(pool, 0, experts, entries);
    ASSERT_EQ(claim.next(ready), 4);
    store.truncate(kRecord);
    EXPECT_TRUE(is_record(ready[0].record, 0, ready[0].index));
    claim.check_read();
    EXPECT_EQ(ready[3].record[0], std::byte{0});  // and the process goes on
    const Error error = error_of([&] { claim.release({&ready[0], 1}); });
    EXPECT_EQ(error.kind(), ErrorKind::kRead);
    EXPECT_EQ(error.place().file, store.path());
  }
  pool.validate();
  // From now on at the promotion, before anybody touches it.
  const Error error = error_of([&] { forward(pool, 0, {{3}}); });
  EXPECT_EQ(error.kind(), ErrorKind::kRead);
  EXPECT_EQ(error.os_error(), ENODATA);
  EXPECT_EQ(error.place().expert, 3);
  forward(pool, 0, {{0}});
  for (int32_t expert = 1; expert < 4; ++expert)
    store.write(expert * kRecord, record_of(0, expert));
  forward(pool, 0, all_of(4));
  expect_at_rest(pool);
}

TEST(MappedPool, WhatTheKernelTookBackIsReadAgain) {
  const TestStore store(1, 4);
  Pool pool(mapped_options(4), {}, store.source(), nullptr);
  forward(pool, 0, all_of(4));
  // Cut off and written again, the last record's pages are mapped no more, and so can be dropped.
  store.truncate(3 * kRecord);
  store.truncate(4 * kRecord);
  store.write(3 * kRecord, record_of(0, 3));
  const int descriptor = ::open(store.path().c_str(), O_RDONLY);
  ASSERT_GE(descriptor, 0);
  posix_fadvise(descriptor, 0, 0, POSIX_FADV_DONTNEED);
  ::close(descriptor);
  forward(pool, 0, all_of(4));
  if (total(pool).hits == 4) GTEST_SKIP() << "this file system keeps what it was told to drop";
  EXPECT_EQ(total(pool).cold_misses, 5);
  EXPECT_EQ(total(pool).hits, 3);
  expect_at_rest(pool);
}

TEST(MappedPool, WrongBytesAreFound) {
  const TestStore store(1, 2);
  store.write(kRecord, record_of(0, 0));
  Pool pool(mapped_options(2), {}, store.source(), nullptr);
  forward(pool, 0, {{0}});
  EXPECT_EQ(error_of([&] { forward(pool, 0, {{1}}); }).kind(), ErrorKind::kChecksum);
  store.write(kRecord, record_of(0, 1));
  forward(pool, 0, all_of(2));
  expect_at_rest(pool);
}

TEST(MappedPool, RefusesWhatItCannotDo) {
  const TestStore store(1, 2);
  PoolOptions options = mapped_options(2);
  options.reader.interpose = with_faults({.bit_flip = .1});
  const Error faulty = error_of([&] { Pool pool(options, {}, store.source(), nullptr); });
  EXPECT_EQ(faulty.kind(), ErrorKind::kInvalid);
  Source raw = store.source();
  raw.raw = true;
  raw.checksums.clear();
  const auto pack = [](int32_t, std::span<const std::byte* const>, std::byte*) {};
  const Error error = error_of([&] { Pool pool(mapped_options(2), {}, raw, pack); });
  EXPECT_EQ(error.kind(), ErrorKind::kInvalid);
  EXPECT_NE(std::string(error.what()).find("convert"), std::string::npos);
}

// Of a file that is none of ours: what is not ours to mend ends the process as ever.
TEST(MappedPoolDeathTest, OtherSignalsGoWhereTheyWent) {
  const TestStore store(1, 2);
  const Pool pool(mapped_options(2), {}, store.source(), nullptr);
  const TestStore other(1, 2);
  const int descriptor = ::open(other.path().c_str(), O_RDONLY);
  ASSERT_GE(descriptor, 0);
  void* mapped = mmap(nullptr, kRecord, PROT_READ, MAP_SHARED, descriptor, 0);
  ::close(descriptor);
  ASSERT_NE(mapped, MAP_FAILED);
  other.truncate(0);
  EXPECT_DEATH(std::printf("%d", static_cast<const volatile char*>(mapped)[0]), "");
  munmap(mapped, kRecord);
}

}  // namespace
}  // namespace torch_mesh
