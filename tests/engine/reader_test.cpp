// Readers: requests, their order and completion, on every backend, with and without faults.
#include <grp.h>
#include <gtest/gtest.h>
#include <signal.h>
#include <sys/resource.h>
#include <sys/time.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <cerrno>
#include <condition_variable>
#include <cstring>
#include <map>
#include <mutex>
#include <random>
#include <thread>

#include "reader_fixture.h"
#include "testing/forwarding_backend.h"

namespace torch_mesh {
namespace {

using namespace testing;
using namespace std::chrono_literals;

INSTANTIATE_TEST_SUITE_P(Backends, ReaderTest, every_backend(), name_of_setup);

TEST_P(ReaderTest, SizesFromOneByteToSeveralChunks) {
  const TempFile file(4 * kChunk + 777, seed_);
  const Memory memory(8 * kChunk);
  const auto reader = open(options(), file, memory);
  EXPECT_STREQ(reader->backend(), GetParam().backend);
  uint64_t tag = 0;
  for (const int64_t needed :
       {int64_t{1}, int64_t{511}, int64_t{512}, int64_t{513}, int64_t{4095}, int64_t{4097},
        kChunk - 1, kChunk, kChunk + 1, 3 * kChunk + 5, 4 * kChunk + 777}) {
    std::memset(memory.at(0), 0xa5, 8 * kChunk);
    submit(*reader, request_for(tag, 0, 0, needed, memory.at(0)));
    EXPECT_EQ(reports_.wait_for(tag + 1).back().error, 0) << needed << " bytes";
    EXPECT_EQ(std::memcmp(memory.at(0), file.at(0), needed), 0) << needed << " bytes";
    ++tag;
  }
}

TEST_P(ReaderTest, LastBlockOfAFileEndsEarly) {
  const TempFile file(kChunk + 4096 + 777, seed_);
  const Memory memory(2 * kChunk);
  const auto reader = open(options(), file, memory);
  submit(*reader, request_for(1, 0, kChunk, 4096 + 777, memory.at(0)));
  EXPECT_EQ(reports_.wait_for(1)[0].error, 0);
  EXPECT_EQ(std::memcmp(memory.at(0), file.at(kChunk), 4096 + 777), 0);
}

TEST_P(ReaderTest, PiecesFromSeveralFiles) {
  const TempFile first(2 * kChunk, seed_), second(3 * kChunk, seed_ + 1);
  const Memory memory(8 * kChunk);
  const File files[] = {first.file(), second.file()};
  const MemoryRegion regions[] = {memory.region()};
  const auto reader = open_reader(options(), files, regions, reports_.done());
  ReadRequest request = request_for(7, 0, 4096, kChunk, memory.at(0));
  request.pieces = 3;
  request.piece[1] = {{1, 8192, 2 * kChunk}, 2 * kChunk - 13, memory.at(2 * kChunk)};
  request.piece[2] = {{0, 0, 4096}, 1, memory.at(5 * kChunk)};
  submit(*reader, request);
  const ReadResult result = reports_.wait_for(1)[0];
  EXPECT_EQ(result.tag, 7u);
  EXPECT_EQ(result.error, 0);
  EXPECT_EQ(std::memcmp(memory.at(0), first.at(4096), kChunk), 0);
  EXPECT_EQ(std::memcmp(memory.at(2 * kChunk), second.at(8192), 2 * kChunk - 13), 0);
  EXPECT_EQ(*memory.at(5 * kChunk), *first.at(0));
}

TEST_P(ReaderTest, RequestsFromSeveralThreads) {
  constexpr int32_t kThreads = 4, kEach = 60;
  constexpr int64_t kSlot = 2 * kChunk;
  const TempFile file(24 * kChunk, seed_);
  const Memory memory(kThreads * kEach * kSlot);
  const auto reader = open(options(), file, memory);
  std::vector<std::pair<int64_t, int64_t>> ranges(kThreads * kEach);
  std::vector<std::thread> threads;
  for (int32_t thread = 0; thread < kThreads; ++thread) {
    threads.emplace_back([&, thread] {
      std::mt19937_64 random(seed_ + thread);
      for (int32_t each = 0; each < kEach; ++each) {
        const int32_t tag = thread * kEach + each;
        const int64_t needed = 1 + static_cast<int64_t>(random() % kSlot);
        const int64_t offset = static_cast<int64_t>(random() % 300) * 4096;
        ranges[tag] = {offset, needed};
        submit(*reader, request_for(tag, 0, offset, needed, memory.at(tag * kSlot),
                                    random() % 2 ? Urgency::kDemand : Urgency::kPrefetch));
        if (random() % 3 == 0) raise_priority(*reader, tag);
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  std::vector<int32_t> reported(kThreads * kEach);
  for (const ReadResult& result : reports_.wait_for(kThreads * kEach)) {
    EXPECT_EQ(result.error, 0);
    ++reported[result.tag];
    const auto [offset, needed] = ranges[result.tag];
    EXPECT_EQ(std::memcmp(memory.at(result.tag * kSlot), file.at(offset), needed), 0);
  }
  EXPECT_EQ(std::count(reported.begin(), reported.end(), 1), kThreads * kEach);
}

// Blocks the I/O thread in its first report, so that requests queued meanwhile do not race with it.
class Gate {
 public:
  void pass() {
    std::unique_lock lock(mutex_);
    arrived_ = true;
    changed_.notify_all();
    changed_.wait_for(lock, kPatience, [this] { return open_; });
  }
  void wait_for_arrival() {
    std::unique_lock lock(mutex_);
    EXPECT_TRUE(changed_.wait_for(lock, kPatience, [this] { return arrived_; }));
  }
  void open() {
    const std::lock_guard lock(mutex_);
    open_ = true;
    changed_.notify_all();
  }

 private:
  std::mutex mutex_;
  std::condition_variable changed_;
  bool arrived_ = false;
  bool open_ = false;
};

// Returns the tags in order of completion, when `queue` adds requests behind one at depth 1.
template <typename Queue>
std::vector<uint64_t> order_of(ReaderOptions options, const TempFile& file, const Memory& memory,
                               size_t count, const Queue& queue) {
  Gate gate;
  Reports reports;
  options.depth = 1;
  const File files[] = {file.file()};
  const MemoryRegion regions[] = {memory.region()};
  const auto collect = reports.done();
  const auto reader = open_reader(options, files, regions, [&](const ReadResult& result) {
    if (result.tag == 0) gate.pass();
    collect(result);
  });
  submit(*reader, request_for(0, 0, 0, 1, memory.at(0)));
  gate.wait_for_arrival();
  queue(*reader);
  gate.open();
  std::vector<uint64_t> tags;
  for (const ReadResult& result : reports.wait_for(count + 1)) tags.push_back(result.tag);
  return tags;
}

TEST_P(ReaderTest, DemandOvertakesQueuedPrefetch) {
  const TempFile file(4 * kChunk, seed_);
  const Memory memory(4 * kChunk);
  const auto tags = order_of(options(), file, memory, 4, [&](Reader& reader) {
    for (const uint64_t tag : {1, 2, 3}) {
      submit(reader, request_for(tag, 0, 0, 3 * kChunk, memory.at(0), Urgency::kPrefetch));
    }
    submit(reader, request_for(9, 0, 0, 3 * kChunk, memory.at(0)));
  });
  EXPECT_EQ(tags, (std::vector<uint64_t>{0, 9, 1, 2, 3}));
}

TEST_P(ReaderTest, BytesUnderWayAreThoseOfTheOptions) {
  class Counting final : public ForwardingBackend {
   public:
    Counting(std::unique_ptr<Backend> inner, std::atomic<int32_t>& max_chunks)
        : ForwardingBackend(std::move(inner)), max_chunks_(max_chunks) {}
    void submit(const ChunkRead& read) override {
      max_chunks_ = std::max(max_chunks_.load(), ++chunks_);
      inner_->submit(read);
    }
    int32_t wait(std::chrono::microseconds timeout, std::span<ChunkResult> results) override {
      const int32_t count = inner_->wait(timeout, results);
      chunks_ -= count;
      return count;
    }

   private:
    std::atomic<int32_t>& max_chunks_;
    int32_t chunks_ = 0;
  };
  const TempFile file(8 * kChunk, seed_);
  const Memory memory(file.bytes());
  for (const int32_t chunks : {1, 3}) {
    std::atomic<int32_t> max_chunks = 0;
    ReaderOptions limited = options();
    limited.max_bytes_under_way = chunks * kChunk;
    limited.interpose = [&](std::unique_ptr<Backend> inner, std::shared_ptr<const FileTable>) {
      return std::make_unique<Counting>(std::move(inner), max_chunks);
    };
    Reports reports;
    const auto reader =
        open_reader(limited, std::array{file.file()}, std::array{memory.region()}, reports.done());
    submit(*reader, request_for(1, 0, 0, file.bytes(), memory.at(0)));
    reports.wait_for(1);
    EXPECT_EQ(max_chunks, chunks);
  }
}

TEST_P(ReaderTest, RaisedPrefetchOvertakesTheOthers) {
  const TempFile file(4 * kChunk, seed_);
  const Memory memory(4 * kChunk);
  const auto tags = order_of(options(), file, memory, 3, [&](Reader& reader) {
    for (const uint64_t tag : {1, 2, 3}) {
      submit(reader, request_for(tag, 0, 0, 2 * kChunk, memory.at(0), Urgency::kPrefetch));
    }
    raise_priority(reader, 3);
    raise_priority(reader, 12345);
  });
  EXPECT_EQ(tags, (std::vector<uint64_t>{0, 3, 1, 2}));
}

TEST_P(ReaderTest, CallbackMaySubmitAndRaisePriorities) {
  const TempFile file(kChunk, seed_);
  const Memory memory(kChunk);
  const File files[] = {file.file()};
  Owned<Reader> reader;
  const auto collect = reports_.done();
  Gate ready;
  reader = open_reader(options(), files, {}, [&](const ReadResult& result) {
    ready.pass();
    if (result.tag < 20) {
      submit(*reader, request_for(result.tag + 1, 0, 0, 100, memory.at(0), Urgency::kPrefetch));
      raise_priority(*reader, result.tag + 1);
    }
    collect(result);
  });
  ready.open();
  submit(*reader, request_for(0, 0, 0, 100, memory.at(0)));
  EXPECT_EQ(reports_.wait_for(21).back().tag, 20u);
}

TEST_P(ReaderTest, CloseWithRequestsUnderWayReportsEachOnce) {
  const TempFile file(4 * kChunk, seed_);
  const Memory memory(60 * 4 * kChunk);
  ReaderOptions chosen = only({.delay = 1, .max_delay = 20ms});
  const auto reader = open(chosen, file, memory);
  for (uint64_t tag = 0; tag < 60; ++tag) {
    submit(*reader, request_for(tag, 0, 0, 4 * kChunk, memory.at(tag * 4 * kChunk),
                                tag % 2 ? Urgency::kDemand : Urgency::kPrefetch));
  }
  reader->close();
  std::memset(memory.at(0), 0x3c, 60 * 4 * kChunk);
  const auto results = reports_.wait_for(60);
  ASSERT_EQ(results.size(), 60u);
  std::map<uint64_t, int32_t> reported;
  int32_t canceled = 0;
  for (const ReadResult& result : results) {
    ++reported[result.tag];
    canceled += result.error == ECANCELED;
    EXPECT_TRUE(result.error == 0 || result.error == ECANCELED) << result.error;
  }
  EXPECT_EQ(reported.size(), 60u);
  EXPECT_GT(canceled, 30);
  std::this_thread::sleep_for(30ms);
  const std::vector<std::byte> untouched(60 * 4 * kChunk, std::byte{0x3c});
  EXPECT_EQ(std::memcmp(memory.at(0), untouched.data(), untouched.size()), 0)
      << "written to after close()";
  expect_error(ErrorKind::kClosed, "closed",
               [&] { submit(*reader, request_for(1, 0, 0, 1, memory.at(0))); });
  raise_priority(*reader, 1);
  reader->close();
}

TEST_P(ReaderTest, CloseFromTheCallbackIsRefused) {
  const TempFile file(kChunk, seed_);
  const Memory memory(kChunk);
  const File files[] = {file.file()};
  Owned<Reader> reader;
  const auto collect = reports_.done();
  reader = open_reader(options(), files, {}, [&](const ReadResult& result) {
    expect_error(ErrorKind::kInvalid, "callback", [&] { reader->close(); });
    collect(result);
  });
  submit(*reader, request_for(0, 0, 0, 1, memory.at(0)));
  reports_.wait_for(1);
}

TEST_P(ReaderTest, MemoryOutsideAndAcrossTheRegisteredBuffers) {
  const TempFile file(4 * kChunk, seed_);
  const Memory memory(8 * kChunk);
  const File files[] = {file.file()};
  const MemoryRegion regions[] = {{memory.at(2 * kChunk), 2 * kChunk},
                                  {memory.at(0), kChunk + 4096}};
  const auto reader = open_reader(options(), files, regions, reports_.done());
  for (const int64_t place : {int64_t{0}, kChunk, 3 * kChunk, 4 * kChunk}) {
    const size_t before = reports_.wait_for(0).size();
    submit(*reader, request_for(before, 0, 0, 4 * kChunk, memory.at(place)));
    EXPECT_EQ(reports_.wait_for(before + 1).back().error, 0);
    EXPECT_EQ(std::memcmp(memory.at(place), file.at(0), 4 * kChunk), 0);
  }
}

TEST_P(ReaderTest, WrongRequestsAreRefused) {
  const TempFile file(kChunk, seed_);
  const Memory memory(kChunk);
  const auto reader = open(only({.delay = 1, .max_delay = 0us}), file, memory);
  const int64_t before = chunks_given();
  const ReadRequest good = request_for(1, 0, 0, 4096, memory.at(0));
  const auto refused = [&](const std::string& part, const auto& spoil) {
    ReadRequest bad = good;
    spoil(bad);
    expect_error(ErrorKind::kInvalid, part, [&] { submit(*reader, bad); });
  };
  refused("pieces", [](ReadRequest& bad) { bad.pieces = 0; });
  refused("pieces", [](ReadRequest& bad) { bad.pieces = kMaxPieces + 1; });
  refused("file 1", [](ReadRequest& bad) { bad.piece[0].from.file = 1; });
  refused("file -1", [](ReadRequest& bad) { bad.piece[0].from.file = -1; });
  refused("offset", [](ReadRequest& bad) { bad.piece[0].from.offset = -4096; });
  refused("offset", [](ReadRequest& bad) { bad.piece[0].from.offset = INT64_MAX - 4095; });
  refused("length", [](ReadRequest& bad) { bad.piece[0].from.bytes = 0; });
  refused("needs", [](ReadRequest& bad) { bad.piece[0].needed = 4097; });
  refused("needs", [](ReadRequest& bad) { bad.piece[0].needed = 0; });
  refused("memory", [](ReadRequest& bad) { bad.piece[0].to = nullptr; });
  if (reader->alignment() > 1) {
    refused("multiples", [](ReadRequest& bad) { bad.piece[0].to += 1; });
    refused("multiples", [](ReadRequest& bad) { bad.piece[0].from.offset += 1; });
  }
  EXPECT_EQ(chunks_given(), before);
}

TEST_P(ReaderTest, WrongOptionsAreRefused) {
  const TempFile file(kChunk, seed_);
  const Memory memory(kChunk);
  const auto refused = [&](const std::string& part, const auto& spoil) {
    ReaderOptions bad = options();
    spoil(bad);
    expect_error(ErrorKind::kInvalid, part, [&] { open(bad, file, memory); });
  };
  refused("aio", [](ReaderOptions& bad) { bad.backend = "aio"; });
  refused("depth", [](ReaderOptions& bad) { bad.depth = 0; });
  refused("chunk_bytes", [](ReaderOptions& bad) { bad.chunk_bytes = 4096 + 512; });
  refused("chunk_bytes", [](ReaderOptions& bad) { bad.chunk_bytes = int64_t{2} << 30; });
  refused("threads", [](ReaderOptions& bad) { bad.threads = 0; });
  refused("retries", [](ReaderOptions& bad) { bad.retries = -1; });
  refused("max_bytes_under_way", [](ReaderOptions& bad) { bad.max_bytes_under_way = 0; });
  expect_error(ErrorKind::kInvalid, "probability", [] { with_faults({.eio_once = 1.5}); });
  expect_error(ErrorKind::kInvalid, "probability", [] { with_faults({.delay = std::nan("")}); });
}

TEST_P(ReaderTest, ForkedChildIsRefusedAndDoesNotHang) {
  const TempFile file(4 * kChunk, seed_);
  const Memory memory(50 * 4 * kChunk);
  Owned<Reader> reader = open(options(), file, memory);
  for (uint64_t tag = 0; tag < 50; ++tag) {
    submit(*reader, request_for(tag, 0, 0, 4 * kChunk, memory.at(tag * 4 * kChunk)));
  }
  const int status = status_of_child([&] {
    int failures = 1;
    try {
      submit(*reader, request_for(1, 0, 0, 1, memory.at(0)));
    } catch (const Error& error) {
      failures = error.kind() != ErrorKind::kForked;
    }
    raise_priority(*reader, 1);
    reader->close();
    reader.reset();
    return failures;
  });
  EXPECT_TRUE(WIFEXITED(status) && WEXITSTATUS(status) == 0) << status;
  for (const ReadResult& result : reports_.wait_for(50)) EXPECT_EQ(result.error, 0);
}

TEST_P(ReaderTest, ReadsSurviveFrequentSignals) {
  const TempFile file(16 * kChunk, seed_);
  const Memory memory(30 * 16 * kChunk);
  static std::atomic<int32_t> alarms;
  alarms = 0;
  struct sigaction storm {
  }, before{};
  storm.sa_handler = [](int) { alarms.fetch_add(1, std::memory_order_relaxed); };
  ASSERT_EQ(::sigaction(SIGALRM, &storm, &before), 0);
  const itimerval often{{0, 300}, {0, 300}}, never{};
  ASSERT_EQ(::setitimer(ITIMER_REAL, &often, nullptr), 0);
  {
    const auto reader = open(options(), file, memory);
    for (uint64_t tag = 0; tag < 30; ++tag) {
      submit(*reader, request_for(tag, 0, 0, 16 * kChunk, memory.at(tag * 16 * kChunk)));
    }
    for (const ReadResult& result : reports_.wait_for(30)) EXPECT_EQ(result.error, 0);
  }
  ::setitimer(ITIMER_REAL, &never, nullptr);
  ::sigaction(SIGALRM, &before, nullptr);
  EXPECT_GT(alarms.load(), 0);
  for (int64_t tag = 0; tag < 30; ++tag) {
    EXPECT_EQ(std::memcmp(memory.at(tag * 16 * kChunk), file.at(0), 16 * kChunk), 0);
  }
}

TEST_P(ReaderTest, DescriptorsAreClosed) {
  const TempFile file(kChunk, seed_);
  const Memory memory(kChunk);
  const int64_t before = open_descriptors();
  for (uint64_t round = 0; round < 10; ++round) {
    const auto reader = open(options(), file, memory);
    submit(*reader, request_for(round, 0, 0, kChunk, memory.at(0)));
    if (round % 2 == 0) reports_.wait_for(round + 1);
  }
  EXPECT_EQ(open_descriptors(), before);
}

TEST_P(ReaderTest, LockedMemoryLimitOfAnotherUser) {
  if (::geteuid() != 0) GTEST_SKIP() << "needs root to become another user";
  const TempFile file(4 * kChunk, seed_);
  const int status = status_of_child([&] {
    const rlimit low{64 << 10, 64 << 10};
    if (::setrlimit(RLIMIT_MEMLOCK, &low) != 0 || ::setgroups(0, nullptr) != 0 ||
        ::setgid(65534) != 0 || ::setuid(65534) != 0) {
      return 10;
    }
    const Memory memory(8 << 20);
    const auto reader = open(options(), file, memory);
    const bool uring = GetParam().backend == std::string("uring");
    if (uring != any_contains(reader->notes(), "memlock")) return 11;
    submit(*reader, request_for(1, 0, 0, 4 * kChunk, memory.at(0)));
    if (reports_.wait_for(1)[0].error != 0) return 12;
    return std::memcmp(memory.at(0), file.at(0), 4 * kChunk) == 0 ? 0 : 13;
  });
  EXPECT_TRUE(WIFEXITED(status) && WEXITSTATUS(status) == 0)
      << "signal " << WTERMSIG(status) << ", exit status " << WEXITSTATUS(status);
}

TEST(Reader, AutoFindsABackendAndNotesWhyItFellBack) {
  const TempFile file(kChunk, 1);
  const Memory memory(kChunk);
  const File files[] = {file.file()};
  Reports reports;
  const auto reader = open_reader({}, files, {}, reports.done());
  const std::string why_not = uring_unavailable();
  EXPECT_STREQ(reader->backend(), why_not.empty() ? "uring" : "threads");
  EXPECT_TRUE(why_not.empty() || any_contains(reader->notes(), why_not));
  submit(*reader, request_for(1, 0, 0, kChunk, memory.at(0)));
  EXPECT_EQ(reports.wait_for(1)[0].error, 0);
}

}  // namespace
}  // namespace torch_mesh
