// The chunk scheduler under all orders of events, without threads or a disk.
#include "io/chunk_scheduler.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <optional>
#include <random>
#include <span>
#include <stdexcept>
#include <vector>

#include "reader_fixture.h"

namespace torch_mesh {
namespace {

using testing::fresh_seed;

constexpr int64_t kUnit = 512;
constexpr int64_t kMaxBytes = 6 << 20;

// The time of schedulers, which only tests move.
ChunkScheduler::Time test_time;

ReadRequest plain_request(uint64_t tag, int64_t offset, int64_t bytes, Urgency urgency) {
  static std::byte anywhere;
  ReadRequest request{};
  request.tag = tag;
  request.urgency = urgency;
  request.pieces = 1;
  request.piece[0] = {{0, offset, bytes}, bytes, &anywhere};
  return request;
}

// Asserts are on in the library that the tests link, as in the one that ships.
TEST(ChunkSchedulerDeathTest, AssertsAreCompiledIn) {
  EXPECT_DEATH(ChunkScheduler(0, 4096, kUnit, 0, kMaxBytes), "depth > 0");
}

TEST(ChunkScheduler, DepthIsNeverExceeded) {
  ChunkScheduler scheduler(2, 4096, kUnit, 0, kMaxBytes);
  scheduler.add(plain_request(1, 0, 4 * 4096, Urgency::kDemand));
  const auto first = scheduler.next();
  ASSERT_TRUE(first && scheduler.next());
  EXPECT_FALSE(scheduler.next());
  scheduler.complete(first->chunk, 4096);
  EXPECT_TRUE(scheduler.next());
  EXPECT_FALSE(scheduler.next());
}

TEST(ChunkScheduler, ShortReadResumesOnTheAlignedByteBefore) {
  ChunkScheduler scheduler(1, 4096, kUnit, 0, kMaxBytes);
  scheduler.add(plain_request(1, 8192, 4096, Urgency::kDemand));
  scheduler.complete(scheduler.next()->chunk, 1000);
  const auto rest = scheduler.next();
  EXPECT_EQ(rest->offset, 8192 + 512);
  EXPECT_EQ(rest->bytes, 4096 - 512);
  scheduler.complete(rest->chunk, rest->bytes);
  EXPECT_EQ(scheduler.take_finished()->error, 0);
  EXPECT_TRUE(scheduler.idle());
}

TEST(ChunkScheduler, FileThatEndsWithinABlockIsNotReadForever) {
  ChunkScheduler scheduler(1, 4096, kUnit, 0, kMaxBytes);
  scheduler.add(plain_request(1, 8192, 4096, Urgency::kDemand));
  std::optional<ChunkRead> read;
  int32_t attempts = 0;
  while ((read = scheduler.next())) {
    ASSERT_LT(++attempts, 100);
    scheduler.complete(read->chunk, 8192 + 700 - read->offset);
  }
  const auto result = scheduler.take_finished();
  EXPECT_EQ(result->error, ENODATA);
  EXPECT_EQ(result->offset, 8192 + 700);
}

TEST(ChunkScheduler, FailedRequestIsReportedWhenItsLastChunkIsBack) {
  ChunkScheduler scheduler(2, 4096, kUnit, 0, kMaxBytes);
  scheduler.add(plain_request(1, 0, 8 * 4096, Urgency::kDemand));
  const auto first = scheduler.next(), second = scheduler.next();
  scheduler.complete(second->chunk, -EIO);
  EXPECT_FALSE(scheduler.take_finished()) << "the first chunk may still write";
  EXPECT_FALSE(scheduler.next()) << "the rest of a failed request is not worth reading";
  scheduler.complete(first->chunk, -EAGAIN);
  const auto result = scheduler.take_finished();
  EXPECT_EQ(result->error, EIO);
  EXPECT_EQ(result->offset, 4096);
  EXPECT_FALSE(scheduler.take_finished());
}

// Statistics need the time.
TEST(ChunkScheduler, AFailedRequestSaysWhenItBegan) {
  test_time = ChunkScheduler::Time(std::chrono::seconds(7));
  ChunkScheduler scheduler(1, 4096, kUnit, 0, kMaxBytes, {}, [] { return test_time; });
  scheduler.add(plain_request(1, 0, 4096, Urgency::kDemand));
  const auto read = scheduler.next();
  test_time += std::chrono::seconds(2);
  scheduler.complete(read->chunk, -EIO);
  const auto result = scheduler.take_finished();
  EXPECT_EQ(result->error, EIO);
  EXPECT_EQ(result->begun, test_time - std::chrono::seconds(2));
  EXPECT_EQ(result->ended, test_time);
}

TEST(ChunkScheduler, AnErrorOfTheDiskIsNotTakenForTheEndOfTheFileOrAWrongChecksum) {
  for (const int error : {ENODATA, EBADMSG}) {
    ChunkScheduler scheduler(1, 4096, kUnit, 1, kMaxBytes);
    scheduler.add(plain_request(1, 0, 4096, Urgency::kDemand));
    scheduler.complete(scheduler.next()->chunk, -error);
    scheduler.complete(scheduler.next()->chunk, -error);
    EXPECT_EQ(scheduler.take_finished()->error, EIO);
  }
}

TEST(ChunkScheduler, PermanentErrorIsNotRetried) {
  ChunkScheduler scheduler(1, 4096, kUnit, 5, kMaxBytes);
  scheduler.add(plain_request(1, 0, 4096, Urgency::kDemand));
  scheduler.complete(scheduler.next()->chunk, -EBADF);
  EXPECT_FALSE(scheduler.next());
  EXPECT_EQ(scheduler.take_finished()->error, EBADF);
}

TEST(ChunkScheduler, FinalErrorIsNeitherRepeatedNorRenamed) {
  for (const int error : {ENODATA, EBADMSG, EIO, ENOMEM}) {
    ChunkScheduler scheduler(1, 4096, kUnit, 5, kMaxBytes);
    scheduler.add(plain_request(1, 0, 4096, Urgency::kDemand));
    scheduler.complete(scheduler.next()->chunk, -error, /*final=*/true);
    EXPECT_FALSE(scheduler.next());
    EXPECT_EQ(scheduler.take_finished()->error, error);
  }
}

TEST(ChunkScheduler, WindowReadsRankBetweenDemandAndPrefetchAndUseTheWholeDepth) {
  ChunkScheduler scheduler(8, 4096, kUnit, 1, kMaxBytes);
  scheduler.add(plain_request(1, 0, 8 * 4096, Urgency::kPrefetch));
  scheduler.add(plain_request(2, int64_t{1} << 20, 5 * 4096, Urgency::kWindow));
  scheduler.add(plain_request(3, int64_t{2} << 20, 4096, Urgency::kDemand));
  std::vector<int32_t> started{scheduler.next()->chunk};
  for (int32_t chunk = 0; chunk < 5; ++chunk) {
    const auto read = scheduler.next();
    EXPECT_EQ(read->offset, (int64_t{1} << 20) + chunk * 4096);
    started.push_back(read->chunk);
  }
  // Prefetches begin while chunks of any kind in flight are fewer than a quarter of the depth.
  for (const int32_t chunk : std::span(started).first(4)) {
    EXPECT_FALSE(scheduler.next());
    scheduler.complete(chunk, 4096);
  }
  EXPECT_FALSE(scheduler.next());
  scheduler.complete(started[4], 4096);
  EXPECT_EQ(scheduler.next()->offset, 0);
  EXPECT_FALSE(scheduler.next());
  scheduler.complete(started[5], 4096);
  EXPECT_EQ(scheduler.next()->offset, 4096);
  EXPECT_FALSE(scheduler.next());
}

TEST(ChunkScheduler, PrefetchBeginsOnlyBelowTwoMiBInFlight) {
  constexpr int64_t kMiB = 1 << 20;
  ChunkScheduler scheduler(16, kMiB, kUnit, 1, kMaxBytes);
  scheduler.add(plain_request(1, 0, 8 * kMiB, Urgency::kPrefetch));
  scheduler.add(plain_request(2, 64 * kMiB, 2 * kMiB, Urgency::kDemand));
  const auto first = scheduler.next(), second = scheduler.next();
  EXPECT_EQ(second->offset, 65 * kMiB);
  EXPECT_FALSE(scheduler.next()) << "a quarter of the depth is not under way, but two MiB are";
  scheduler.complete(first->chunk, kMiB);
  EXPECT_EQ(scheduler.next()->offset, 0);
  EXPECT_FALSE(scheduler.next());
  scheduler.complete(second->chunk, kMiB);
  EXPECT_EQ(scheduler.next()->offset, kMiB);
  EXPECT_FALSE(scheduler.next());
}

TEST(ChunkScheduler, BytesUnderWayAreLimited) {
  ChunkScheduler scheduler(8, 4096, kUnit, 1, /*max_bytes_under_way=*/3 * 4096);
  scheduler.add(plain_request(1, 0, 5 * 4096, Urgency::kDemand));
  const auto first = scheduler.next();
  EXPECT_TRUE(scheduler.next() && scheduler.next());
  EXPECT_FALSE(scheduler.next());
  scheduler.complete(first->chunk, 4096);
  EXPECT_EQ(scheduler.next()->offset, 3 * 4096);
  EXPECT_FALSE(scheduler.next());
}

// Two drives, both with file 0 and only the first with file 1. Descriptor 2 is file 0's copy.
FileCopies two_drives() { return {2, {0, 2, 1, -1}}; }

// A clock that stands still: no speeds are known, and the drive with the fewest bytes under way is
// read.
ChunkScheduler::Time frozen() { return {}; }

ChunkRead start(ChunkScheduler& scheduler) {
  const std::optional<ChunkRead> read = scheduler.next();
  if (!read) throw std::logic_error("no chunk may start");
  return *read;
}

ReadRequest request_of_file(int32_t file, int64_t bytes) {
  ReadRequest request = plain_request(static_cast<uint64_t>(file), 0, bytes, Urgency::kDemand);
  request.piece[0].from.file = file;
  return request;
}

TEST(ChunkScheduler, ARequestIsDividedAmongTheDrivesWithItsFile) {
  ChunkScheduler scheduler(8, 4096, kUnit, 1, kMaxBytes, two_drives(), frozen);
  scheduler.add(request_of_file(0, 4 * 4096));
  scheduler.add(request_of_file(1, 2 * 4096));
  for (const int32_t descriptor : {0, 2, 0, 2, 1, 1}) {
    EXPECT_EQ(start(scheduler).descriptor, descriptor);
  }
  EXPECT_FALSE(scheduler.next());
}

TEST(ChunkScheduler, TheDriveThatIsFreeFirstReadsTheNextChunk) {
  constexpr int64_t kMiB = 1 << 20;
  ChunkScheduler scheduler(16, kMiB, kUnit, 1, kMaxBytes, two_drives(), frozen);
  scheduler.add(request_of_file(0, 10 * kMiB));
  std::vector<ChunkRead> started;
  while (const auto read = scheduler.next()) started.push_back(*read);
  EXPECT_EQ(started.size(), 6u) << "each drive has three MiB under way";
  for (const size_t index : {1, 3, 5}) {  // of the second drive
    EXPECT_EQ(started[index].descriptor, 2);
    scheduler.complete(started[index].chunk, kMiB);
    EXPECT_EQ(start(scheduler).descriptor, 2);
    EXPECT_FALSE(scheduler.next());
  }
}

TEST(ChunkScheduler, ADriveReadsByItsSpeed) {
  constexpr int64_t kMiB = 1 << 20;
  ChunkScheduler scheduler(16, kMiB, kUnit, 1, kMaxBytes, two_drives(), [] { return test_time; });
  // Reads one request of three chunks to its end, the first drive in 1 ms a chunk and the second in
  // `slow` ms; returns how many chunks the second one read.
  const auto chunks_of_second = [&](int64_t slow) {
    scheduler.add(request_of_file(0, 3 * kMiB));
    std::vector<std::pair<int64_t, ChunkRead>> under_way;  // by the time of its end
    std::array<int64_t, 2> free{};
    int32_t of_second = 0;
    while (const auto read = scheduler.next()) {
      const bool second = read->descriptor == 2;
      of_second += second;
      under_way.emplace_back(free[second] += second ? slow : 1, *read);
    }
    std::ranges::sort(under_way, {}, [](const auto& each) { return each.first; });
    const auto begin = test_time;
    for (const auto& [end, read] : under_way) {
      test_time = begin + std::chrono::milliseconds(end);
      scheduler.complete(read.chunk, read.bytes);
    }
    EXPECT_EQ(scheduler.take_finished()->error, 0);
    return of_second;
  };
  EXPECT_EQ(chunks_of_second(8), 1) << "no speed is known";
  for (int32_t request = 0; request < 8; ++request) EXPECT_EQ(chunks_of_second(8), 0);
  int32_t tries = 0;
  for (int32_t request = 0; request < 2 * 256 / 3; ++request) tries += chunks_of_second(1) > 0;
  EXPECT_GE(tries, 1) << "the second drive is not tried again, though it is as fast now";
  EXPECT_EQ(chunks_of_second(1), 1);
}

TEST(ChunkScheduler, ADriveThatNoLongerAnswersIsNotWaitedFor) {
  constexpr int64_t kMiB = 1 << 20;
  ChunkScheduler scheduler(16, kMiB, kUnit, 1, kMaxBytes, two_drives(), [] { return test_time; });
  const auto read_for = [&](const ChunkRead& read, int64_t milliseconds) {
    test_time += std::chrono::milliseconds(milliseconds);
    scheduler.complete(read.chunk, read.bytes);
  };
  scheduler.add(request_of_file(0, 2 * kMiB));
  const ChunkRead fast = start(scheduler), slow = start(scheduler);
  EXPECT_EQ(slow.descriptor, 2);
  read_for(fast, 1);
  read_for(slow, 20);
  ASSERT_EQ(scheduler.take_finished()->error, 0);
  scheduler.add(request_of_file(0, 8 * kMiB));
  for (int32_t chunk = 0; chunk < 3; ++chunk) EXPECT_EQ(start(scheduler).descriptor, 0);
  EXPECT_FALSE(scheduler.next()) << "the fast drive will be free long before the other has read";
  test_time += std::chrono::milliseconds(500);
  for (int32_t chunk = 3; chunk < 8; ++chunk) {
    const ChunkRead read = start(scheduler);
    EXPECT_EQ(read.descriptor, 2) << chunk;
    read_for(read, 20);
  }
}

TEST(ChunkScheduler, PrefetchBeginsOnAnIdleDriveBesideDemandOnAnother) {
  constexpr int64_t kMiB = 1 << 20;
  ChunkScheduler scheduler(16, kMiB, kUnit, 1, kMaxBytes, two_drives(), frozen);
  scheduler.add(request_of_file(1, 2 * kMiB));
  ReadRequest prefetch = request_of_file(0, 4 * kMiB);
  prefetch.urgency = Urgency::kPrefetch;
  scheduler.add(prefetch);
  for (const int32_t descriptor : {1, 1, 2, 2}) {
    EXPECT_EQ(start(scheduler).descriptor, descriptor);
  }
  EXPECT_FALSE(scheduler.next());
}

TEST(ChunkScheduler, AReadForABusyDriveDoesNotHoldBackAnother) {
  constexpr int64_t kMiB = 1 << 20;
  ChunkScheduler scheduler(16, kMiB, kUnit, 1, kMaxBytes, two_drives(), frozen);
  scheduler.add(request_of_file(1, 4 * kMiB));  // on the first drive alone
  scheduler.add(request_of_file(0, 3 * kMiB));
  for (const int32_t descriptor : {1, 1, 1, 2, 2, 2}) {
    EXPECT_EQ(start(scheduler).descriptor, descriptor);
  }
  EXPECT_FALSE(scheduler.next());
}

TEST(ChunkScheduler, AnErrorThatWouldRepeatIsTriedOnAnotherDrive) {
  for (const int64_t result : {int64_t{-ENODEV}, int64_t{0}}) {  // 0: the file has ended
    ChunkScheduler scheduler(4, 4096, kUnit, 0, kMaxBytes, two_drives(), frozen);
    scheduler.add(request_of_file(0, 4096));
    scheduler.complete(start(scheduler).chunk, result);
    const ChunkRead again = start(scheduler);
    EXPECT_EQ(again.descriptor, 2);
    scheduler.complete(again.chunk, 4096);
    EXPECT_EQ(scheduler.take_finished()->error, 0);
  }
}

TEST(ChunkScheduler, AnErrorOfEveryDriveIsReported) {
  ChunkScheduler scheduler(4, 4096, kUnit, 3, kMaxBytes, two_drives(), frozen);
  scheduler.add(request_of_file(0, 4096));
  for (const int32_t descriptor : {0, 2}) {
    const ChunkRead read = start(scheduler);
    EXPECT_EQ(read.descriptor, descriptor);
    scheduler.complete(read.chunk, -ENODEV);
  }
  EXPECT_FALSE(scheduler.next());
  const auto result = scheduler.take_finished();
  EXPECT_EQ(result->error, ENODEV);
  EXPECT_EQ(result->drive, 1);
}

TEST(ChunkScheduler, AfterAnErrorAnotherDriveIsRead) {
  ChunkScheduler scheduler(4, 4096, kUnit, /*retries=*/1, kMaxBytes, two_drives(), frozen);
  scheduler.add(request_of_file(0, 4096));
  for (const int32_t descriptor : {0, 2, 0}) {
    const ChunkRead read = start(scheduler);
    EXPECT_EQ(read.descriptor, descriptor);
    scheduler.complete(read.chunk, -EIO);
  }
  EXPECT_FALSE(scheduler.next());
  const auto result = scheduler.take_finished();
  EXPECT_EQ(result->error, EIO);
  EXPECT_EQ(result->drive, 0);
}

TEST(ChunkScheduler, AReadOfTheOriginalStaysOnItsDrive) {
  ChunkScheduler scheduler(8, 4096, kUnit, /*retries=*/1, kMaxBytes, two_drives(), frozen);
  ReadRequest request = request_of_file(0, 4 * 4096);
  request.original = true;
  scheduler.add(request);
  std::vector<ChunkRead> started;
  while (const auto read = scheduler.next()) started.push_back(*read);
  ASSERT_EQ(started.size(), 4u);
  for (const ChunkRead& read : started) EXPECT_EQ(read.descriptor, 0);
  scheduler.complete(started[0].chunk, -EIO);
  const ChunkRead again = start(scheduler);
  EXPECT_EQ(again.descriptor, 0) << "though the other drive has not failed";
  started[0] = again;
  for (const ChunkRead& read : started) scheduler.complete(read.chunk, 4096);
  const auto result = scheduler.take_finished();
  EXPECT_EQ(result->error, 0);
  EXPECT_EQ(result->drives, 1u);
}

TEST(ChunkScheduler, ARequestSaysWhichDrivesItWasReadFrom) {
  ChunkScheduler scheduler(8, 4096, kUnit, 0, kMaxBytes, two_drives(), frozen);
  for (const int32_t file : {0, 1}) {
    scheduler.add(request_of_file(file, 2 * 4096));
    while (const auto read = scheduler.next()) scheduler.complete(read->chunk, 4096);
    const auto result = scheduler.take_finished();
    EXPECT_EQ(result->error, 0);
    EXPECT_EQ(result->drives, 1u);
  }
  scheduler.add(request_of_file(0, 2 * 4096));
  const ChunkRead first = start(scheduler), second = start(scheduler);
  scheduler.complete(first.chunk, -ENODEV);
  scheduler.complete(second.chunk, 4096);
  scheduler.complete(start(scheduler).chunk, 4096);
  EXPECT_EQ(scheduler.take_finished()->drives, 2u) << "the first drive gave no bytes";
}

TEST(ChunkScheduler, ADriveIsReadAgainAfterAnotherWasLost) {
  ChunkScheduler scheduler(4, 4096, kUnit, /*retries=*/1, kMaxBytes, two_drives(), frozen);
  scheduler.add(request_of_file(0, 2 * 4096));
  const ChunkRead first = start(scheduler), second = start(scheduler);
  EXPECT_EQ(second.descriptor, 2);
  scheduler.complete(second.chunk, -ENODEV);
  const ChunkRead moved = start(scheduler);
  EXPECT_EQ(moved.descriptor, 0);
  scheduler.complete(first.chunk, -EIO);
  const ChunkRead other = start(scheduler);
  EXPECT_EQ(other.descriptor, 2);
  scheduler.complete(other.chunk, -ENODEV);
  const ChunkRead again = start(scheduler);
  EXPECT_EQ(again.descriptor, 0) << "the other drive, though idle, would fail again";
  scheduler.complete(again.chunk, 4096);
  scheduler.complete(moved.chunk, 4096);
  EXPECT_EQ(scheduler.take_finished()->error, 0);
}

TEST(ChunkScheduler, ADriveThatOnlyFailsIsSeldomTried) {
  ChunkScheduler scheduler(4, 4096, kUnit, 1, kMaxBytes, two_drives(), [] { return test_time; });
  int32_t tries = 0;
  for (int32_t request = 0; request < 1000; ++request) {
    scheduler.add(request_of_file(0, 4096));
    while (const auto read = scheduler.next()) {
      const bool fails = read->descriptor == 2;
      tries += fails;
      test_time += std::chrono::milliseconds(fails ? 1000 : 1);
      scheduler.complete(read->chunk, fails ? -EIO : 4096);
    }
    EXPECT_EQ(scheduler.take_finished()->error, 0);
  }
  EXPECT_GE(tries, 1);
  EXPECT_LE(tries, 1000 / 256 + 1);
}

TEST(ChunkScheduler, ManyChunksOfOneDriveLeaveSomeToAnother) {
  ChunkScheduler scheduler(8, 4096, kUnit, 1, kMaxBytes, two_drives(), frozen);
  scheduler.add(request_of_file(1, 8 * 4096));  // on the first drive alone
  scheduler.add(request_of_file(0, 2 * 4096));
  for (const int32_t descriptor : {1, 1, 1, 1, 2, 2}) {
    EXPECT_EQ(start(scheduler).descriptor, descriptor);
  }
  EXPECT_FALSE(scheduler.next());
}

TEST(ChunkScheduler, AChunkThatWaitsToBeRepeatedEndsWithItsRequest) {
  ChunkScheduler scheduler(2, 4096, kUnit, 1, kMaxBytes);
  scheduler.add(plain_request(1, 0, 8192, Urgency::kDemand));
  const auto first = scheduler.next(), second = scheduler.next();
  scheduler.complete(first->chunk, -EIO);  // to be repeated
  scheduler.complete(second->chunk, -EINVAL);
  EXPECT_EQ(scheduler.take_finished()->error, EINVAL);
  EXPECT_FALSE(scheduler.next());
  EXPECT_TRUE(scheduler.idle());
}

TEST(ChunkScheduler, RaisedWindowReadGoesBehindQueuedDemand) {
  ChunkScheduler scheduler(8, 4096, kUnit, 1, kMaxBytes);
  for (const uint64_t tag : {1, 2}) {
    scheduler.add(plain_request(tag, static_cast<int64_t>(tag) * 4096, 4096, Urgency::kWindow));
  }
  scheduler.add(plain_request(3, 3 * 4096, 4096, Urgency::kDemand));
  scheduler.raise_priority(2);
  for (const int64_t block : {3, 2, 1}) EXPECT_EQ(scheduler.next()->offset, block * 4096);
}

TEST(ChunkScheduler, DemandGoesBeforeARetriedPrefetch) {
  ChunkScheduler scheduler(2, 4096, kUnit, 1, kMaxBytes);
  scheduler.add(plain_request(1, 0, 4096, Urgency::kPrefetch));
  scheduler.complete(scheduler.next()->chunk, -EIO);
  scheduler.add(plain_request(2, 8192, 4096, Urgency::kDemand));
  const auto demand = scheduler.next();
  EXPECT_EQ(demand->offset, 8192);
  scheduler.complete(demand->chunk, 4096);
  EXPECT_EQ(scheduler.next()->offset, 0);
}

TEST(ChunkScheduler, RaisedPriorityAppliesToChunksInFlight) {
  ChunkScheduler scheduler(2, 4096, kUnit, 1, kMaxBytes);
  scheduler.add(plain_request(1, 0, 4096, Urgency::kPrefetch));
  const auto first = scheduler.next();
  scheduler.raise_priority(1);
  scheduler.add(plain_request(2, 8192, 8192, Urgency::kDemand));
  scheduler.complete(first->chunk, -EIO);
  EXPECT_EQ(scheduler.next()->offset, 0);
}

TEST(ChunkScheduler, CancelReportsRequestsThatNeverStarted) {
  ChunkScheduler scheduler(1, 4096, kUnit, 3, kMaxBytes);
  scheduler.add(plain_request(1, 0, 8192, Urgency::kDemand));
  scheduler.add(plain_request(2, 0, 8192, Urgency::kPrefetch));
  const auto first = scheduler.next();
  scheduler.cancel();
  EXPECT_EQ(scheduler.take_finished()->tag, 2u);
  EXPECT_FALSE(scheduler.take_finished());
  scheduler.complete(first->chunk, 4096);
  EXPECT_EQ(scheduler.take_finished()->error, ECANCELED);
  EXPECT_TRUE(scheduler.idle());
}

// Random results, priorities and order, on a simulated file.
void random_events_report_each_request_once(const FileCopies& copies) {
  const uint64_t seed = fresh_seed();
  const ::testing::ScopedTrace trace(__FILE__, __LINE__,
                                     "TORCH_MESH_TEST_SEED=" + std::to_string(seed));
  std::mt19937_64 random(seed);
  const auto up_to = [&](int64_t max) { return static_cast<int64_t>(random() % (max + 1)); };
  constexpr int32_t kDepth = 5;
  ChunkScheduler scheduler(kDepth, 4096, kUnit, 100, kMaxBytes, copies);
  std::vector<int32_t> reported(2000);
  std::vector<ChunkRead> under_way;
  size_t added = 0;
  const auto take_reports = [&] {
    while (const auto result = scheduler.take_finished()) {
      ++reported[result->tag];
      EXPECT_EQ(result->error, 0);
    }
  };
  while (added < reported.size() || !scheduler.idle()) {
    if (added < reported.size() && up_to(2) == 0) {
      scheduler.add(plain_request(added++, up_to(100) * kUnit, (1 + up_to(40)) * kUnit,
                                  up_to(1) ? Urgency::kDemand : Urgency::kPrefetch));
    }
    if (up_to(5) == 0) scheduler.raise_priority(up_to(added));
    if (const auto read = scheduler.next()) under_way.push_back(*read);
    ASSERT_LE(under_way.size(), size_t{kDepth});
    if (!under_way.empty() && up_to(1) == 0) {
      std::swap(under_way[up_to(std::ssize(under_way) - 1)], under_way.back());
      const ChunkRead read = under_way.back();
      under_way.pop_back();
      const std::array<int64_t, 6> results{
          -EINTR, -EAGAIN, -EIO, read.bytes, read.bytes, read.bytes - up_to(read.bytes - kUnit)};
      scheduler.complete(read.chunk, results[up_to(5)]);
    }
    take_reports();
  }
  EXPECT_EQ(std::count(reported.begin(), reported.end(), 1), std::ssize(reported));
}

TEST(ChunkScheduler, RandomEventsReportEachRequestOnce) {
  random_events_report_each_request_once(FileCopies());
  random_events_report_each_request_once(two_drives());
}

}  // namespace
}  // namespace torch_mesh
