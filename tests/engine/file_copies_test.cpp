// Reads of files that have copies on other drives.
#include <gtest/gtest.h>

#include <array>
#include <cstring>
#include <filesystem>
#include <string>
#include <vector>

#include "io/file_table.h"
#include "reader_fixture.h"

namespace torch_mesh {
namespace {

using namespace testing;

constexpr int64_t kBlock = 512;

class FileCopiesTest : public ReaderTest {
 protected:
  void SetUp() override {
    ReaderTest::SetUp();
    if (direct_io_alignment(TempFile(4096, 1).path()) < 0) GTEST_SKIP() << "no direct I/O";
  }
};

// The same content, from the seed.
TEST_P(FileCopiesTest, EveryRecordArrivesWhicheverDriveReadsIt) {
  constexpr int64_t kBytes = 64 * kChunk;
  const TempFile original(kBytes, 7), copy(kBytes, 7), other(kBytes, 8);
  const Memory memory(2 * kBytes);
  std::array<File, 2> files{original.file(), other.file()};
  files[0].copies = {copy.path()};
  const MemoryRegion regions[] = {memory.region()};
  const auto reader = open_reader(options(), files, regions, reports_.done());
  uint64_t tag = 0;
  for (int32_t file = 0; file < 2; ++file) {
    for (int64_t at = 0; at < kBytes; at += 8 * kChunk) {
      submit(*reader, request_for(tag++, file, at, 8 * kChunk, memory.at(file * kBytes + at)));
    }
  }
  for (const ReadResult& result : reports_.wait_for(tag)) EXPECT_EQ(result.error, 0);
  EXPECT_EQ(std::memcmp(memory.at(0), original.at(0), kBytes), 0);
  EXPECT_EQ(std::memcmp(memory.at(kBytes), other.at(0), kBytes), 0);
}

// The two files differ, so that bytes show from which one they were read.
TEST_P(FileCopiesTest, BothDrivesAreRead) {
  constexpr int64_t kBytes = 16 * kChunk;
  const TempFile original(kBytes, 7), copy(kBytes, 8);
  const Memory memory(kBytes);
  std::array<File, 1> files{original.file()};
  files[0].copies = {copy.path()};
  const MemoryRegion regions[] = {memory.region()};
  const auto reader = open_reader(options(), files, regions, reports_.done());
  submit(*reader, request_for(0, 0, 0, kBytes, memory.at(0)));
  EXPECT_EQ(reports_.wait_for(1)[0].error, 0);
  int64_t of_original = 0, of_copy = 0;
  for (int64_t at = 0; at < kBytes; at += kBlock) {
    of_original += std::memcmp(memory.at(at), original.at(at), kBlock) == 0;
    of_copy += std::memcmp(memory.at(at), copy.at(at), kBlock) == 0;
  }
  EXPECT_EQ(of_original + of_copy, kBytes / kBlock);
  EXPECT_GT(of_original, 0);
  EXPECT_GT(of_copy, 0);
}

TEST(FileCopies, ACopyThatWasCutOffIsAnError) {
  const TempFile original(4 * kChunk, 7), copy(kChunk, 7);
  File file = original.file();
  file.copies = {copy.path()};
  expect_error(ErrorKind::kRead, copy.path(),
               [&] { FileTable(std::array{file}, /*direct=*/true); });
}

TEST(FileCopies, AMissingCopyIsAnError) {
  const TempFile original(4 * kChunk, 7);
  File file = original.file();
  file.copies = {original.path() + ".copy"};
  expect_error(ErrorKind::kRead, file.copies[0],
               [&] { FileTable(std::array{file}, /*direct=*/true); });
}

TEST(FileCopies, CopiesAreNotReadThroughThePageCache) {
  const TempFile original(4 * kChunk, 7), copy(4 * kChunk, 7);
  File file = original.file();
  file.copies = {copy.path()};
  expect_error(ErrorKind::kInvalid, "leave the mirror out",
               [&] { FileTable(std::array{file}, /*direct=*/false); });
}

INSTANTIATE_TEST_SUITE_P(Backends, FileCopiesTest, every_backend(), name_of_setup);

}  // namespace
}  // namespace torch_mesh
