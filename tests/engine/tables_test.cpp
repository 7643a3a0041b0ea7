// Gathers from tables whose every byte depends on its table and row.
#include "tables/tables.h"

#include <gtest/gtest.h>
#include <sys/stat.h>
#include <unistd.h>

#include <atomic>
#include <cstring>
#include <fstream>
#include <memory>
#include <numeric>
#include <random>
#include <thread>
#include <vector>

#include "holding_backend.h"
#include "reader_fixture.h"

namespace torch_mesh {
namespace {

using namespace std::chrono_literals;
using namespace testing;

std::vector<std::byte> row_of(int32_t table, int64_t row, int64_t bytes) {
  std::vector<std::byte> made(bytes);
  for (int64_t at = 0; at < bytes; ++at) {
    const int64_t word = row * 1'000'003 + table * 10'007 + at;
    made[at] = static_cast<std::byte>(word ^ (word >> 8));
  }
  return made;
}

// Tables in one file, in unaligned stretches, or padded as in a store.
class TableFile {
 public:
  TableFile(std::vector<std::pair<int64_t, int64_t>> rows_and_bytes, bool padded)
      : path_(::testing::TempDir() + "/mesh_tables_XXXXXX") {
    std::vector<std::byte> content(padded ? 4096 : 77);
    for (const auto& [rows, bytes] : rows_and_bytes) {
      const auto number = static_cast<int32_t>(tables_.size());
      Table table;
      table.name = "table" + std::to_string(number);
      table.row_bytes = bytes;
      table.has_checksums = padded;
      table.salt = {static_cast<uint8_t>(number), 2, 3};
      table.stride = padded ? padded_row_bytes(bytes) : bytes;
      const int64_t first_half = padded ? rows : rows / 3;
      for (int64_t row = 0; row < rows; ++row) {
        if (row == 0 || row == first_half) {
          content.resize(content.size() + (padded ? 0 : 13));
          const int64_t in_stretch = row == 0 ? first_half : rows - first_half;
          table.stretches.push_back({0, std::ssize(content), in_stretch});
        }
        std::vector<std::byte> stored = row_of(number, row, bytes);
        if (padded) {
          std::vector<std::byte> with_checksum(table.stride);
          pad_rows(table.salt, row, bytes, stored, with_checksum);
          stored = with_checksum;
        }
        content.insert(content.end(), stored.begin(), stored.end());
      }
      content.resize(padded ? round_up(std::ssize(content), 4096) : std::ssize(content));
      tables_.push_back(table);
    }
    const int descriptor = ::mkstemp(path_.data());
    EXPECT_EQ(::write(descriptor, content.data(), content.size()), std::ssize(content));
    ::fsync(descriptor);
    ::close(descriptor);
    bytes_ = std::ssize(content);
  }
  ~TableFile() { ::unlink(path_.c_str()); }
  TableFile(const TableFile&) = delete;
  TableFile& operator=(const TableFile&) = delete;

  TablesOptions options(int64_t cache_bytes) const {
    TablesOptions options;
    options.files = {{path_, bytes_}};
    options.tables = tables_;
    for (Table& table : options.tables) table.cache_bytes = cache_bytes;
    options.timeout = 60s;
    return options;
  }
  int64_t offset_of(int32_t table, int64_t row) const {
    return tables_[table].stretches[0].offset + row * tables_[table].stride;
  }
  void overwrite(int64_t offset, char value) const {
    std::fstream(path_, std::ios::in | std::ios::out | std::ios::binary).seekp(offset).put(value);
    ::sync();
  }
  void truncate(int64_t bytes) const { ASSERT_EQ(::truncate(path_.c_str(), bytes), 0); }

 private:
  std::string path_;
  int64_t bytes_ = 0;
  std::vector<Table> tables_;
};

void expect_rows(Tables& tables, int32_t table, const std::vector<int64_t>& ids) {
  const int64_t bytes = tables.value_bytes(table);
  std::vector<std::byte> out(ids.size() * bytes, std::byte{0x5a});
  tables.gather(table, ids, out.data());
  for (size_t index = 0; index < ids.size(); ++index) {
    const auto expected = row_of(table, ids[index], bytes);
    ASSERT_EQ(std::memcmp(out.data() + index * bytes, expected.data(), bytes), 0)
        << "row " << ids[index] << " at " << index;
  }
}

std::vector<int64_t> drawn(std::mt19937_64& random, int64_t rows, size_t count) {
  std::vector<int64_t> ids(count);
  for (int64_t& id : ids) id = static_cast<int64_t>(random() % static_cast<uint64_t>(rows));
  return ids;
}

class TablesTest : public ReaderTest {
 protected:
  std::unique_ptr<Tables> open(TablesOptions options, const Runtime& runtime = {}) const {
    const Interpose interpose = options.reader.interpose;
    options.reader = this->options();
    if (interpose) options.reader.interpose = interpose;
    return std::make_unique<Tables>(std::move(options), runtime);
  }
  // Options with slow reads; with this seed the first takes about half of the maximum.
  TablesOptions slow(const TableFile& file) const {
    TablesOptions options = file.options(1 << 20);
    options.reader.interpose = with_faults({.seed = 0, .delay = 1, .max_delay = 1500ms});
    return options;
  }
};

TEST_P(TablesTest, RowsAreThoseOfTheFile) {
  std::mt19937_64 random(seed_);
  for (const bool padded : {false, true}) {
    const TableFile file({{1000, 320}, {50, 6001}, {300, 2}, {3, 504}}, padded);
    for (const int64_t cache_bytes : {0, 5000, 1 << 20}) {
      const auto tables = open(file.options(cache_bytes));
      for (int32_t table = 0; table < tables->tables(); ++table) {
        const int64_t rows = tables->rows(table);
        expect_rows(*tables, table, {});
        expect_rows(*tables, table, {0});
        expect_rows(*tables, table, {rows - 1, 0, rows - 1});
        for (const size_t count : {16, 500}) {
          expect_rows(*tables, table, drawn(random, rows, count));
        }
      }
    }
  }
}

TEST_P(TablesTest, MoreRowsThanBuffers) {
  std::mt19937_64 random(seed_);
  const TableFile file({{4000, 320}}, true);
  const auto tables = open(file.options(0));
  std::vector<int64_t> ids(4000);
  std::iota(ids.begin(), ids.end(), 0);
  std::shuffle(ids.begin(), ids.end(), random);
  expect_rows(*tables, 0, ids);
  EXPECT_EQ(tables->stats(0).reads, 4000);
}

TEST_P(TablesTest, EachRowIsReadOnceAndThenCached) {
  const TableFile file({{1000, 320}}, false);
  const auto tables = open(file.options(1 << 20));
  expect_rows(*tables, 0, {7, 8, 7, 7, 999, 8});
  TableStats stats = tables->stats(0);
  EXPECT_EQ(stats.gathers, 1);
  EXPECT_EQ(stats.lookups, 6);
  EXPECT_EQ(stats.distinct, 3);
  EXPECT_EQ(stats.reads, 3);
  EXPECT_EQ(stats.hits, 0);
  EXPECT_GE(stats.bytes_read, 3 * 320);
  const int64_t bytes = stats.bytes_read;
  expect_rows(*tables, 0, {999, 7, 5});
  stats = tables->stats(0);
  EXPECT_EQ(stats.reads, 4);
  EXPECT_EQ(stats.hits, 2);
  EXPECT_GT(stats.bytes_read, bytes);
  tables->reset_stats();
  EXPECT_EQ(tables->stats(0).lookups, 0);
}

TEST_P(TablesTest, APrefetchedRowIsNotReadAgain) {
  const TableFile file({{1000, 320}}, true);
  const auto tables = open(file.options(1 << 20));
  const std::vector<int64_t> ids{3, 5, 3, 900};
  tables->prefetch(0, ids);
  tables->prefetch(0, ids);
  expect_rows(*tables, 0, ids);
  const TableStats stats = tables->stats(0);
  EXPECT_EQ(stats.prefetches, 3);
  EXPECT_EQ(stats.reads, 0);
  EXPECT_EQ(stats.hits, 3);
}

TEST_P(TablesTest, ThreadsGatherAndPrefetchConcurrently) {
  const TableFile file({{1000, 320}, {100, 1024}}, true);
  const auto tables = open(file.options(40'000));
  std::vector<std::thread> threads;
  for (uint64_t number = 0; number < 4; ++number) {
    threads.emplace_back([&, number] {
      std::mt19937_64 random(seed_ + number);
      for (int32_t round = 0; round < 20; ++round) {
        const auto table = static_cast<int32_t>(random() % 2);
        const std::vector<int64_t> ids = drawn(random, tables->rows(table), 1 + random() % 60);
        if (random() % 2 == 0) tables->prefetch(table, ids);
        expect_rows(*tables, table, ids);
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
}

// The second gather comes while the first has all reads. The rows behind these reads are held back
// until the second has ended, so that it has to get one of the reads that end first.
TEST_P(TablesTest, AGatherOfManyRowsLeavesReadsToOthers) {
  constexpr int64_t kFirstRows = 1024;
  const TableFile file({{4 * kFirstRows, 320}, {100, 320}}, true);
  std::atomic<bool> waits = false, done = false;
  TablesOptions options = file.options(0);
  options.reader.interpose = [&](std::unique_ptr<Backend> inner, std::shared_ptr<const FileTable>) {
    return std::make_unique<HoldingBackend>(std::move(inner), [&](int64_t offset) {
      if (offset >= file.offset_of(0, 4 * kFirstRows)) return false;
      return offset < file.offset_of(0, kFirstRows) ? !waits : !done;
    });
  };
  const auto tables = open(std::move(options));
  std::vector<int64_t> all(4 * kFirstRows);
  std::iota(all.begin(), all.end(), 0);
  std::thread first([&] { expect_rows(*tables, 0, all); });
  while (tables->stats(0).reads < kFirstRows) std::this_thread::sleep_for(1ms);
  std::thread second([&] {
    EXPECT_NO_THROW(expect_rows(*tables, 1, {7}));
    done = true;
  });
  while (tables->stats(1).gathers == 0) std::this_thread::sleep_for(1ms);
  EXPECT_EQ(tables->stats(0).reads, kFirstRows) << "all reads that there are";
  waits = true;
  second.join();
  EXPECT_LT(tables->stats(0).reads, 4 * kFirstRows);
  first.join();
}

TEST_P(TablesTest, ADamagedRowIsNamedAndTheOthersStayUsable) {
  const TableFile file({{1000, 320}}, true);
  file.overwrite(file.offset_of(0, 12) + 100, 'x');
  const auto tables = open(file.options(1 << 20));
  std::vector<std::byte> out(2 * 320);
  const std::vector<int64_t> ids{11, 12};
  tables->prefetch(0, ids);  // the prefetch drops the damaged row
  try {
    tables->gather(0, ids, out.data());
    FAIL() << "no error";
  } catch (const Error& error) {
    EXPECT_EQ(error.kind(), ErrorKind::kChecksum);
    EXPECT_NE(std::string(error.what()).find("row 12 of table0"), std::string::npos);
    EXPECT_EQ(error.place().offset, file.offset_of(0, 12));
  }
  expect_rows(*tables, 0, {10, 11, 13});
  TablesOptions unverified = file.options(0);
  unverified.verify = false;
  open(unverified)->gather(0, ids, out.data());
}

TEST_P(TablesTest, ATruncatedFileIsAnErrorUntilItIsRestored) {
  const TableFile file({{1000, 320}}, false);
  const auto tables = open(file.options(1 << 20));
  const int64_t cut = file.offset_of(0, 20);
  file.truncate(cut);
  std::vector<std::byte> out(320);
  const std::vector<int64_t> ids{500};
  expect_error(ErrorKind::kRead, "row 500 of table0", [&] { tables->gather(0, ids, out.data()); });
  EXPECT_GE(tables->stats(0).failed, 1);
  expect_rows(*tables, 0, {5});
}

TEST_P(TablesTest, OneBadReadIsReadAgain) {
  const TableFile file({{1000, 320}}, true);
  TablesOptions options = file.options(1 << 20);
  options.reader.interpose = with_faults({.seed = seed_, .bit_flip = 0.02});
  const auto tables = open(std::move(options));
  int32_t wrong = 0;
  for (int64_t row = 0; row < 200; ++row) {
    try {
      expect_rows(*tables, 0, {row});
    } catch (const Error& error) {
      EXPECT_EQ(error.kind(), ErrorKind::kChecksum);
      ++wrong;
    }
  }
  EXPECT_LT(wrong, 20);  // fails only if the second read is flipped too
}

TEST_P(TablesTest, AGatherTimesOut) {
  const TableFile file({{1000, 320}}, true);
  TablesOptions options = slow(file);
  options.timeout = 30ms;
  const auto tables = open(std::move(options));
  std::vector<std::byte> out(320);
  const std::vector<int64_t> ids{1};
  expect_error(ErrorKind::kTimeout, "time-out of 30 ms",
               [&] { tables->gather(0, ids, out.data()); });
}

TEST_P(TablesTest, AGatherIsInterrupted) {
  const TableFile file({{1000, 320}}, true);
  Runtime runtime;
  runtime.interrupted = [] { return true; };
  const auto tables = open(slow(file), runtime);
  std::vector<std::byte> out(320);
  const std::vector<int64_t> ids{1};
  expect_error(ErrorKind::kInterrupted, "rows of a table",
               [&] { tables->gather(0, ids, out.data()); });
}

TEST_P(TablesTest, CloseEndsAGatherThatWaits) {
  const TableFile file({{1000, 320}}, true);
  const auto tables = open(slow(file));
  std::vector<std::byte> out(320);
  const std::vector<int64_t> ids{1};
  std::thread closing([&] {
    while (tables->stats(0).reads == 0) std::this_thread::sleep_for(1ms);
    tables->close();
  });
  expect_error(ErrorKind::kClosed, "closed", [&] { tables->gather(0, ids, out.data()); });
  closing.join();
  expect_error(ErrorKind::kClosed, "closed", [&] { tables->gather(0, ids, out.data()); });
  tables->prefetch(0, ids);
}

// Late reads go into the tables' own buffers, never into the output of an abandoned gather.
TEST_P(TablesTest, AnAbandonedGatherGivesItsBuffersBack) {
  const TableFile file({{1000, 320}}, true);
  TablesOptions options = file.options(0);
  options.timeout = 1ms;
  options.reader.interpose = with_faults({.seed = 0, .delay = 1, .max_delay = 100ms});
  const auto tables = open(std::move(options));
  std::vector<int64_t> all(1000);
  std::iota(all.begin(), all.end(), 0);
  int32_t timeouts = 0;
  for (int32_t round = 0; round < 5; ++round) {
    std::vector<std::byte> out(1000 * 320);
    try {
      tables->gather(0, all, out.data());
    } catch (const Error& error) {
      EXPECT_EQ(error.kind(), ErrorKind::kTimeout);
      ++timeouts;
    }
  }
  EXPECT_GT(timeouts, 0);
}

TEST_P(TablesTest, AForkedChildIsRefusedAndEnds) {
  const TableFile file({{1000, 320}}, true);
  const auto tables = open(file.options(1 << 20));
  expect_rows(*tables, 0, {1, 2, 3});
  const int status = status_of_child([&] {
    std::vector<std::byte> out(320);
    const std::vector<int64_t> ids{1};
    const auto is_refused = [](const auto& call) {
      try {
        call();
      } catch (const Error& error) {
        return error.kind() == ErrorKind::kForked;
      }
      return false;
    };
    const bool refused = is_refused([&] { tables->gather(0, ids, out.data()); }) &&
                         is_refused([&] { tables->prefetch(0, ids); }) &&
                         is_refused([&] { tables->close(); });
    return refused ? 7 : 1;
  });
  EXPECT_TRUE(WIFEXITED(status) && WEXITSTATUS(status) == 7) << status;
  expect_rows(*tables, 0, {1, 4});
}

TEST(TablesOptionsTest, TablesOutsideTheirFilesAreRefused) {
  const TableFile file({{100, 320}}, false);
  const auto refused = [&](const char* part, const auto& change) {
    TablesOptions options = file.options(0);
    change(options.tables[0]);
    expect_error(ErrorKind::kInvalid, part, [&] { Tables tables(options, {}); });
  };
  refused("do not lie within", [](Table& table) { table.stretches[1].rows += 1; });
  refused("do not lie within", [](Table& table) { table.stretches[0].offset = -1; });
  refused("do not lie within", [](Table& table) { table.stretches[1].rows = INT64_MAX; });
  refused("do not lie within", [](Table& table) { table.stretches[0].offset = INT64_MAX; });
  refused("names file 3", [](Table& table) { table.stretches[0].file = 3; });
  refused("has no rows", [](Table& table) { table.stretches.clear(); });
  refused("a step at least 320", [](Table& table) { table.stride = 319; });
  refused("a step at least 328", [](Table& table) { table.has_checksums = true; });
}

TEST(PaddedRowsTest, NoRowCrossesASector) {
  for (int64_t bytes = 1; bytes < 2000; ++bytes) {
    const int64_t padded = padded_row_bytes(bytes);
    ASSERT_GE(padded, bytes + 8);
    ASSERT_TRUE(padded % 512 == 0 || 512 % padded == 0) << bytes;
  }
  EXPECT_EQ(padded_row_bytes(320), 512);
  EXPECT_EQ(padded_row_bytes(504), 512);
  EXPECT_EQ(padded_row_bytes(505), 1024);
}

INSTANTIATE_TEST_SUITE_P(Readers, TablesTest, every_backend(), name_of_setup);

}  // namespace
}  // namespace torch_mesh
