// Reads that the thread which waits for them carries out, with and without faults.
#include "io/foreground_reads.h"

#include <gtest/gtest.h>

#include <cstring>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "io/file_table.h"
#include "reader_fixture.h"

namespace torch_mesh {
namespace {

using namespace std::chrono_literals;
using namespace testing;
using Clock = std::chrono::steady_clock;

constexpr int64_t kBlock = 4096;
constexpr int64_t kBlocks = 64;

class ForegroundReadsTest : public ReaderTest {
 protected:
  std::unique_ptr<ForegroundReads> open(ReaderOptions options) {
    const File files[] = {file_.file()};
    return std::make_unique<ForegroundReads>(
        options, std::make_shared<const FileTable>(files, options.direct),
        [this](const ReadResult& result) { reported_.push_back(result); });
  }
  ReadRequest block(int64_t at) const {
    return request_for(static_cast<uint64_t>(at), 0, at * kBlock, kBlock, memory_.at(at * kBlock));
  }
  void submit(ForegroundReads& reads, int64_t at) const {
    const ReadRequest request = block(at);
    reads.submit({&request, 1});
  }
  void wait_for(ForegroundReads& reads, size_t count) {
    const auto end = Clock::now() + kPatience;
    while (reported_.size() < count && Clock::now() < end) reads.wait(end);
    EXPECT_EQ(reported_.size(), count);
  }

  const TempFile file_{kBlocks * kBlock, seed_};
  const Memory memory_{kBlocks * kBlock};
  std::vector<ReadResult> reported_;
};

TEST_P(ForegroundReadsTest, AnyThreadMayBeTheNext) {
  const auto reads = open(options());
  for (int64_t at = 0; at < kBlocks; at += 16) {
    std::thread([&] {
      std::vector<ReadRequest> requests;
      for (int64_t next = at; next < at + 16; ++next) requests.push_back(block(next));
      reads->submit(requests);
      EXPECT_FALSE(reads->idle());
      wait_for(*reads, static_cast<size_t>(at + 16));
    }).join();
    EXPECT_TRUE(reads->idle());
  }
  for (const ReadResult& result : reported_) EXPECT_EQ(result.error, 0);
  EXPECT_EQ(std::memcmp(memory_.at(0), file_.at(0), kBlocks * kBlock), 0);
}

TEST_P(ForegroundReadsTest, ReadsThatAThreadHasLeftAreReportedToTheNext) {
  const auto reads = open(only({.delay = 1, .max_delay = 50ms}));
  std::thread([&] {
    submit(*reads, 3);
    reads->wait(Clock::now());
  }).join();
  wait_for(*reads, 1);
  EXPECT_EQ(reported_[0].tag, 3U);
  EXPECT_EQ(std::memcmp(memory_.at(3 * kBlock), file_.at(3 * kBlock), kBlock), 0);
}

TEST_P(ForegroundReadsTest, TheEndWaitsForWhatIsUnderWayAndDropsTheRest) {
  auto reads = open(only({.delay = 1, .max_delay = 50ms}));
  submit(*reads, 1);
  reads->wait(Clock::now());  // begins it
  submit(*reads, 2);
  reads.reset();
  ASSERT_EQ(reported_.size(), 2U);
  for (const ReadResult& result : reported_) {
    EXPECT_EQ(result.error, result.tag == 1 ? 0 : ECANCELED);
  }
}

TEST_P(ForegroundReadsTest, AForkedChildLeavesThemToItsParent) {
  auto reads = open(only({.delay = 1, .max_delay = 50ms}));
  submit(*reads, 5);
  reads->wait(Clock::now());
  const int status = status_of_child([&] {
    reads.reset();
    return 7;
  });
  EXPECT_TRUE(WIFEXITED(status) && WEXITSTATUS(status) == 7) << status;
  wait_for(*reads, 1);
  EXPECT_EQ(reported_[0].error, 0);
}

INSTANTIATE_TEST_SUITE_P(Rings, ForegroundReadsTest,
                         ::testing::Values(Setup{"uring", "uring", false},
                                           Setup{"faulty_uring", "uring", true}),
                         name_of_setup);

}  // namespace
}  // namespace torch_mesh
