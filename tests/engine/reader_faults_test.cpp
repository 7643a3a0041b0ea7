// Readers: every fault by itself, files that are missing or end early, file systems without direct
// reads.
#include <fcntl.h>
#include <gtest/gtest.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <bit>
#include <cerrno>
#include <chrono>
#include <cstdlib>
#include <cstring>
#include <new>
#include <thread>

#include "allocations.h"
#include "reader_fixture.h"

namespace {

int64_t reported_alignment = 0;  // of direct reads, by every file system; 0: its own

}  // namespace

#ifdef STATX_DIOALIGN
// In place of the C library's.
extern "C" int statx(int folder, const char* path, int flags, unsigned mask,
                     struct statx* status) noexcept {
  const auto result = static_cast<int>(::syscall(SYS_statx, folder, path, flags, mask, status));
  if (result == 0 && reported_alignment > 0) {
    status->stx_mask |= STATX_DIOALIGN;
    status->stx_dio_mem_align = status->stx_dio_offset_align = reported_alignment;
  }
  return result;
}
#endif

namespace torch_mesh {
namespace {

using namespace testing;
using namespace std::chrono_literals;

class ReaderFaultsTest : public ReaderTest {
 protected:
  // Reads four chunks, and returns how many the backend was given for them.
  int64_t chunks_read_with(const ReaderOptions& options) {
    const TempFile file(4 * kChunk, seed_);
    const Memory memory(4 * kChunk);
    const auto reader = open(options, file, memory);
    const int64_t before = chunks_given();
    submit(*reader, request_for(1, 0, 0, 4 * kChunk, memory.at(0)));
    EXPECT_EQ(reports_.wait_for(1)[0].error, 0);
    EXPECT_EQ(std::memcmp(memory.at(0), file.at(0), 4 * kChunk), 0);
    return chunks_given() - before;
  }
};

INSTANTIATE_TEST_SUITE_P(Backends, ReaderFaultsTest, every_backend(), name_of_setup);

TEST_P(ReaderFaultsTest, ShortReadsOnly) {
  EXPECT_GE(chunks_read_with(only({.short_read = 1})), 4 + 4) << "each chunk is continued";
}

TEST_P(ReaderFaultsTest, EintrAndEagainAreRetried) {
  const TempFile file(4 * kChunk, seed_);
  const Memory memory(20 * 4 * kChunk);
  const auto reader = open(only({.eintr = 0.5, .eagain = 0.5}), file, memory);
  const int64_t before = chunks_given();
  for (uint64_t tag = 0; tag < 20; ++tag) {
    submit(*reader, request_for(tag, 0, 0, 4 * kChunk, memory.at(tag * 4 * kChunk)));
  }
  for (const ReadResult& result : reports_.wait_for(20)) {
    EXPECT_EQ(result.error, 0);
    EXPECT_EQ(std::memcmp(memory.at(result.tag * 4 * kChunk), file.at(0), 4 * kChunk), 0);
  }
  EXPECT_GT(chunks_given() - before, 20 * 4);
}

TEST_P(ReaderFaultsTest, EagainForeverEndsInAnError) {
  const TempFile file(kChunk, seed_);
  const Memory memory(kChunk);
  const auto reader = open(only({.eagain = 1}), file, memory);
  submit(*reader, request_for(1, 0, 0, kChunk, memory.at(0)));
  EXPECT_EQ(reports_.wait_for(1)[0].error, EAGAIN);
}

TEST_P(ReaderFaultsTest, DiskErrorOnceIsRetried) {
  ReaderOptions chosen = only({.eio_once = 1});
  chosen.retries = 1;
  EXPECT_EQ(chunks_read_with(chosen), 4 + 4);
}

TEST_P(ReaderFaultsTest, DiskErrorForeverNamesFileAndOffset) {
  const TempFile other(kChunk, seed_), file(4 * kChunk, seed_);
  const Memory memory(4 * kChunk);
  ReaderOptions chosen = only({.eio_always = 1});
  chosen.retries = 2;
  chosen.depth = 1;
  const File files[] = {other.file(), file.file()};
  const MemoryRegion regions[] = {memory.region()};
  const auto reader = open_reader(chosen, files, regions, reports_.done());
  const int64_t before = chunks_given();
  submit(*reader, request_for(1, 1, kChunk, 2 * kChunk, memory.at(0)));
  const ReadResult result = reports_.wait_for(1)[0];
  EXPECT_EQ(result.error, EIO);
  EXPECT_EQ(result.file, 1);
  EXPECT_EQ(result.offset, kChunk);
  EXPECT_EQ(chunks_given() - before, 1 + 2);
}

TEST_P(ReaderFaultsTest, DelayedAndReorderedReadsAllArrive) {
  const TempFile file(16 * kChunk, seed_);
  const Memory memory(160 * kChunk);
  const auto reader = open(only({.delay = 0.5, .reorder = 0.5}), file, memory);
  for (int64_t tag = 0; tag < 160; ++tag) {
    const int64_t place = tag % 16 * kChunk;
    submit(*reader, request_for(tag, 0, place, kChunk, memory.at(tag * kChunk)));
  }
  const auto results = reports_.wait_for(160);
  EXPECT_FALSE(std::is_sorted(results.begin(), results.end(),
                              [](const auto& a, const auto& b) { return a.tag < b.tag; }));
  for (const ReadResult& result : results) {
    EXPECT_EQ(result.error, 0);
    const int64_t place = result.tag % 16 * kChunk;
    EXPECT_EQ(std::memcmp(memory.at(result.tag * kChunk), file.at(place), kChunk), 0);
  }
}

TEST_P(ReaderFaultsTest, FlippedBitIsLeftToTheChecksum) {
  const TempFile file(kChunk, seed_);
  const Memory memory(kChunk);
  const auto reader = open(only({.bit_flip = 1}), file, memory);
  submit(*reader, request_for(1, 0, 0, kChunk, memory.at(0)));
  EXPECT_EQ(reports_.wait_for(1)[0].error, 0);
  int32_t flipped = 0;
  for (int64_t index = 0; index < kChunk; ++index) {
    flipped += std::popcount(std::to_integer<uint8_t>(*memory.at(index) ^ *file.at(index)));
  }
  EXPECT_EQ(flipped, 1);
  EXPECT_NE(record_checksum({}, 0, 0, memory.at(0), kChunk),
            record_checksum({}, 0, 0, file.at(0), kChunk));
}

TEST_P(ReaderFaultsTest, WrongOffsetIsLeftToTheChecksum) {
  const TempFile file(4 * kChunk, seed_);
  const Memory memory(kChunk);
  const auto reader = open(only({.wrong_offset = 1}), file, memory);
  uint64_t tag = 0;
  for (const int64_t offset : {int64_t{0}, kChunk, 3 * kChunk}) {
    submit(*reader, request_for(tag++, 0, offset, kChunk, memory.at(0)));
    EXPECT_EQ(reports_.wait_for(tag).back().error, 0);
    EXPECT_NE(record_checksum({}, 0, 0, memory.at(0), kChunk),
              record_checksum({}, 0, 0, file.at(offset), kChunk));
  }
}

TEST_P(ReaderFaultsTest, FileThatCannotBeOpened) {
  const MemoryRegion none{};
  const int64_t before = open_descriptors();
  const TempFile good(4096, seed_);
  const std::string pipe = ::testing::TempDir() + "/mesh_io_pipe_" + std::to_string(::getpid());
  ASSERT_EQ(::mkfifo(pipe.c_str(), 0600), 0);
  const auto open_second = [&](const File& second) {
    const File files[] = {good.file(), second};
    open_reader(options(), files, {}, reports_.done());
  };
  expect_error(ErrorKind::kRead, "no such", [&] {
    try {
      open_second({::testing::TempDir() + "/no such", 0});
    } catch (const Error& error) {
      EXPECT_EQ(error.os_error(), ENOENT);
      throw;
    }
  });
  expect_error(ErrorKind::kRead, "directory", [&] { open_second({::testing::TempDir(), 0}); });
  expect_error(ErrorKind::kInvalid, "regular file", [&] { open_second({pipe, 0}); });
  expect_error(ErrorKind::kRead, "cut off", [&] { open_second({good.path(), 4097}); });
  expect_error(ErrorKind::kInvalid, "0 or more", [&] { open_second({good.path(), -1}); });
  expect_error(ErrorKind::kInvalid, "empty", [&] {
    const File files[] = {good.file()};
    open_reader(options(), files, {&none, 1}, reports_.done());
  });
  ::unlink(pipe.c_str());
  EXPECT_EQ(open_descriptors(), before);
}

// A failed open() ends the threads that have started and closes the ring.
TEST_P(ReaderFaultsTest, EveryAllocationOfOpeningMayFail) {
  const TempFile file(kChunk, seed_);
  const Memory memory(kChunk);
  const ReaderOptions chosen = options();
  const File files[] = {file.file()};
  const MemoryRegion regions[] = {memory.region()};
  const int64_t before = open_descriptors();
  for (const bool all : {false, true}) {
    const int64_t allocations = with_each_allocation_failing(
        [&] {
          try {
            open_reader(chosen, files, regions, [](const ReadResult&) {});
          } catch (const std::bad_alloc&) {
          } catch (const Error& error) {
            EXPECT_EQ(error.kind(), ErrorKind::kMemory) << error.what();
          }
        },
        all);
    EXPECT_GT(allocations, chosen.threads);
  }
  EXPECT_EQ(open_descriptors(), before);
}

TEST_P(ReaderFaultsTest, FileCutOffUnderTheReader) {
  TempFile file(4 * kChunk, seed_);
  const Memory memory(4 * kChunk);
  const auto reader = open(options(), file, memory);
  for (const int64_t left : {2 * kChunk + 100, 2 * kChunk, int64_t{0}}) {
    file.truncate(left);
    const size_t before = reports_.wait_for(0).size();
    submit(*reader, request_for(before, 0, kChunk, 3 * kChunk, memory.at(0)));
    const ReadResult result = reports_.wait_for(before + 1).back();
    EXPECT_EQ(result.error, ENODATA) << left << " bytes left";
    EXPECT_EQ(result.file, 0);
    EXPECT_GE(result.offset, kChunk);
    EXPECT_LE(result.offset, 4 * kChunk);
  }
}

TEST_P(ReaderFaultsTest, FileSystemThatRefusesDirectReads) {
  // kernfs files have buffered reads only.
  const char* refusing = "/proc/self/status";
  const Memory memory(4096);
  const File files[] = {{refusing, 0}};
  const auto reader = open_reader(options(), files, {}, reports_.done());
  EXPECT_TRUE(any_contains(reader->notes(), "refuses O_DIRECT"));
  EXPECT_EQ(reader->alignment(), 1);
  submit(*reader, request_for(1, 0, 0, 5, memory.at(0)));
  EXPECT_EQ(reports_.wait_for(1)[0].error, 0);
  EXPECT_EQ(std::memcmp(memory.at(0), "Name:", 5), 0);
}

TEST_P(ReaderFaultsTest, FileSystemThatWantsMoreThanRecordsAreAlignedTo) {
#ifndef STATX_DIOALIGN
  GTEST_SKIP() << "these headers do not know what a file system reports";
#endif
  const TempFile file(2 * kChunk, seed_);
  const Memory memory(2 * kChunk);
  size_t asked = 0;
  for (const int64_t alignment : {8192, 16384, 65536, 131072}) {
    SCOPED_TRACE(alignment);
    reported_alignment = alignment;
    const auto reader = open(options(), file, memory);
    const int64_t found = direct_io_alignment(file.path());
    reported_alignment = 0;
    EXPECT_EQ(found, -1);
    EXPECT_TRUE(reader->buffered());
    EXPECT_EQ(reader->alignment(), 1);
    EXPECT_TRUE(any_contains(reader->notes(), "multiples of " + std::to_string(alignment)));
    submit(*reader, request_for(++asked, 0, kRecordAlignment, kChunk, memory.at(0)));
    EXPECT_EQ(reports_.wait_for(asked).back().error, 0);
    EXPECT_EQ(std::memcmp(memory.at(0), file.at(kRecordAlignment), kChunk), 0);
  }
}

TEST_P(ReaderFaultsTest, TmpfsIsReadWithANote) {
  if (::access("/dev/shm", W_OK) != 0) GTEST_SKIP() << "no writable tmpfs at /dev/shm";
  const TempFile file(2 * kChunk + 5, seed_, "/dev/shm");
  const Memory memory(4 * kChunk);
  const auto reader = open(options(), file, memory);
  EXPECT_TRUE(any_contains(reader->notes(), file.path()));
  submit(*reader, request_for(1, 0, 0, 2 * kChunk + 5, memory.at(0)));
  EXPECT_EQ(reports_.wait_for(1)[0].error, 0);
  EXPECT_EQ(std::memcmp(memory.at(0), file.at(0), 2 * kChunk + 5), 0);
}

TEST_P(ReaderFaultsTest, WithoutDirectReadsNothingNeedsAlignment) {
  const TempFile file(2 * kChunk, seed_);
  const Memory memory(2 * kChunk);
  ReaderOptions chosen = options();
  chosen.direct = false;
  const auto reader = open(chosen, file, memory);
  EXPECT_EQ(reader->alignment(), 1);
  ReadRequest request = request_for(1, 0, 13, kChunk + 7, memory.at(3));
  request.piece[0].from.bytes = kChunk + 7;
  submit(*reader, request);
  EXPECT_EQ(reports_.wait_for(1)[0].error, 0);
  EXPECT_EQ(std::memcmp(memory.at(3), file.at(13), kChunk + 7), 0);
}

TEST_P(ReaderFaultsTest, BufferedReadsFindWhatWasReadAhead) {
  const TempFile file(4 * kChunk, seed_);
  const Memory memory(4 * kChunk);
  ReaderOptions chosen = options();
  chosen.direct = false;
  const auto reader = open(chosen, file, memory);
  EXPECT_TRUE(reader->buffered());
  const Extent extent{0, 4096, 2 * kChunk};
  reader->forget(extent);
  if (file.cached(extent.offset, extent.bytes)) {
    GTEST_SKIP() << "this file system keeps what it was told to drop";
  }
  reader->will_need(extent);
  reader->flush();
  const auto end = std::chrono::steady_clock::now() + kPatience;
  while (!file.cached(extent.offset, extent.bytes) && std::chrono::steady_clock::now() < end) {
    std::this_thread::sleep_for(std::chrono::milliseconds(1));
  }
  EXPECT_TRUE(file.cached(extent.offset, extent.bytes));
  submit(*reader, request_for(1, 0, 4096, 2 * kChunk, memory.at(0)));
  EXPECT_EQ(reports_.wait_for(1)[0].error, 0);
  EXPECT_EQ(std::memcmp(memory.at(0), file.at(4096), 2 * kChunk), 0);
}

TEST_P(ReaderFaultsTest, DirectReadsLeaveThePageCacheAlone) {
  const TempFile file(2 * kChunk, seed_);
  const Memory memory(2 * kChunk);
  const auto reader = open(options(), file, memory);
  if (reader->buffered()) GTEST_SKIP() << "this file system has no direct reads";
  const Extent extent{0, 0, 2 * kChunk};
  const bool cached = file.cached(0, 2 * kChunk);
  reader->forget(extent);
  EXPECT_EQ(file.cached(0, 2 * kChunk), cached);
}

// Returns the output of a shell command without its final newline; "" if it failed.
std::string output_of(const std::string& command) {
  FILE* pipe = ::popen((command + " 2>/dev/null").c_str(), "r");
  if (pipe == nullptr) return "";
  std::array<char, 256> line{};
  const bool read = std::fgets(line.data(), line.size(), pipe) != nullptr;
  if (::pclose(pipe) != 0 || !read) return "";
  return std::string(line.data(), std::strcspn(line.data(), "\n"));
}

TEST_P(ReaderFaultsTest, RealDiskErrorFromALoopDevice) {
  TempFile backing(64 * kChunk, seed_);
  const std::string device = output_of("losetup --find --show --direct-io=on " + backing.path());
  if (device.empty()) GTEST_SKIP() << "losetup cannot attach a loop device here (needs root)";
  {
    const Memory memory(4 * kChunk);
    const File files[] = {{device, backing.bytes()}};
    ReaderOptions chosen = options();
    if (!chosen.interpose) chosen.interpose = with_faults({.delay = 1, .max_delay = 0us});
    const auto reader = open_reader(chosen, files, {}, reports_.done());
    submit(*reader, request_for(0, 0, 0, 4 * kChunk, memory.at(0)));
    EXPECT_EQ(reports_.wait_for(1)[0].error, 0);
    backing.truncate(kChunk);
    const int64_t gone = 40 * kChunk, before = chunks_given();
    submit(*reader, request_for(1, 0, gone, 4 * kChunk, memory.at(0)));
    const ReadResult result = reports_.wait_for(2)[1];
    EXPECT_EQ(result.error, EIO);
    EXPECT_EQ(result.file, 0);
    EXPECT_GE(result.offset, gone);
    EXPECT_LT(result.offset, gone + 4 * kChunk);
    EXPECT_GT(chunks_given() - before, 4);
    submit(*reader, request_for(2, 0, 0, kChunk, memory.at(0)));
    EXPECT_EQ(reports_.wait_for(3)[2].error, 0) << "a failed read must leave the reader usable";
  }
  EXPECT_EQ(std::system(("losetup --detach " + device).c_str()), 0);
}

}  // namespace
}  // namespace torch_mesh
