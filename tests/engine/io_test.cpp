// One suite over every backend, with and without faults, and the scheduler behind them all.
#include <fcntl.h>
#include <grp.h>
#include <gtest/gtest.h>
#include <signal.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <sys/time.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <bit>
#include <cerrno>
#include <cmath>
#include <condition_variable>
#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <map>
#include <mutex>
#include <optional>
#include <random>
#include <thread>

#include "base/error.h"
#include "io/chunk_scheduler.h"
#include "io/reader.h"
#include "store/record.h"
#include "testing/faults.h"

namespace torch_mesh {
namespace {

using namespace std::chrono_literals;

constexpr int64_t kChunk = 64 << 10;
constexpr auto kPatience = 60s;

uint64_t fresh_seed() {
  const char* given = std::getenv("TORCH_MESH_TEST_SEED");
  return given != nullptr ? std::strtoull(given, nullptr, 10) : std::random_device{}();
}

class TempFile {
 public:
  TempFile(int64_t bytes, uint64_t seed, const std::string& folder = ::testing::TempDir())
      : path_(folder + "/mesh_io_XXXXXX"), content_(bytes) {
    std::mt19937_64 random(seed);
    for (std::byte& value : content_) value = static_cast<std::byte>(random());
    const int descriptor = ::mkstemp(path_.data());
    EXPECT_GE(descriptor, 0) << path_;
    EXPECT_EQ(::write(descriptor, content_.data(), content_.size()), bytes);
    ::fchmod(descriptor, 0644);
    ::fsync(descriptor);
    ::close(descriptor);
  }
  ~TempFile() { ::unlink(path_.c_str()); }
  TempFile(const TempFile&) = delete;
  TempFile& operator=(const TempFile&) = delete;

  File file() const { return {path_, static_cast<int64_t>(content_.size())}; }
  const std::string& path() const { return path_; }
  const std::byte* at(int64_t offset) const { return content_.data() + offset; }
  int64_t bytes() const { return static_cast<int64_t>(content_.size()); }
  void truncate(int64_t bytes) { ASSERT_EQ(::truncate(path_.c_str(), bytes), 0); }

 private:
  std::string path_;
  std::vector<std::byte> content_;
};

class Memory {
 public:
  explicit Memory(int64_t bytes)
      : bytes_(round_up(bytes, 4096)),
        data_(static_cast<std::byte*>(std::aligned_alloc(4096, bytes_))) {
    std::memset(data_, 0xa5, bytes_);
  }
  ~Memory() { std::free(data_); }
  Memory(const Memory&) = delete;
  Memory& operator=(const Memory&) = delete;

  std::byte* at(int64_t offset) const { return data_ + offset; }
  MemoryRegion region() const { return {data_, static_cast<size_t>(bytes_)}; }

 private:
  int64_t bytes_;
  std::byte* data_;
};

// Collects reports; every wait has an end.
class Reports {
 public:
  Reader::Done done() {
    return [this](const ReadResult& result) {
      const std::lock_guard lock(mutex_);
      results_.push_back(result);
      changed_.notify_all();
    };
  }
  std::vector<ReadResult> wait_for(size_t count) {
    std::unique_lock lock(mutex_);
    EXPECT_TRUE(changed_.wait_for(lock, kPatience, [&] { return results_.size() >= count; }))
        << results_.size() << " of " << count << " requests were reported";
    return results_;
  }

 private:
  std::mutex mutex_;
  std::condition_variable changed_;
  std::vector<ReadResult> results_;
};

// The aligned superset of [offset, offset + needed).
ReadRequest request_for(uint64_t tag, int32_t file, int64_t offset, int64_t needed, std::byte* to,
                        Urgency urgency = Urgency::kDemand) {
  ReadRequest request{};
  request.tag = tag;
  request.urgency = urgency;
  request.pieces = 1;
  request.piece[0] = {{file, offset, round_up(needed, 4096)}, needed, to};
  return request;
}

void submit(Reader& reader, const ReadRequest& request) {
  reader.submit({&request, 1});
  reader.flush();
}

void hasten(Reader& reader, uint64_t tag) {
  reader.hasten(tag);
  reader.flush();
}

int64_t open_descriptors() {
  return std::distance(std::filesystem::directory_iterator("/proc/self/fd"),
                       std::filesystem::directory_iterator());
}

bool any_contains(const std::vector<std::string>& notes, const std::string& part) {
  return std::any_of(notes.begin(), notes.end(),
                     [&](const std::string& note) { return note.find(part) != std::string::npos; });
}

// Runs body in a child of its own and returns how that ended; a child that hangs is killed by its
// alarm.
template <typename Body>
int status_of_child(const Body& body) {
  const pid_t child = ::fork();
  if (child == 0) {
    ::alarm(30);
    ::_exit(body());
  }
  int status = -1;
  while (::waitpid(child, &status, 0) < 0 && errno == EINTR) {
  }
  return status;
}

template <typename Call>
void expect_error(ErrorKind kind, const std::string& part, const Call& call) {
  try {
    call();
    ADD_FAILURE() << "no error; expected one with \"" << part << "\"";
  } catch (const Error& error) {
    EXPECT_EQ(error.kind(), kind) << error.what();
    EXPECT_NE(std::string(error.what()).find(part), std::string::npos) << error.what();
  }
}

struct Setup {
  const char* name;
  const char* backend;
  bool faulty;  // with every fault that a reader must hide
};

class ReaderTest : public ::testing::TestWithParam<Setup> {
 protected:
  void SetUp() override {
    if (GetParam().backend == std::string("uring") && !uring_unavailable().empty()) {
      GTEST_SKIP() << uring_unavailable();
    }
  }

  ReaderOptions options() const {
    ReaderOptions options;
    options.backend = GetParam().backend;
    options.chunk_bytes = kChunk;
    options.threads = 4;
    if (GetParam().faulty) {
      options.interpose = with_faults({.seed = seed_,
                                       .short_read = 0.3,
                                       .eintr = 0.2,
                                       .eagain = 0.2,
                                       .eio_once = 0.2,
                                       .delay = 0.2,
                                       .reorder = 0.3,
                                       .max_delay = 500us});
    }
    return options;
  }
  // With one fault and no other.
  ReaderOptions only(Faults faults) const {
    ReaderOptions chosen = options();
    faults.seed = seed_;
    chosen.interpose = with_faults(faults);
    return chosen;
  }

  std::unique_ptr<Reader> open(const ReaderOptions& options, const TempFile& file,
                               const Memory& memory) {
    const File files[] = {file.file()};
    const MemoryRegion regions[] = {memory.region()};
    return open_reader(options, files, regions, reports_.done());
  }

  const uint64_t seed_ = fresh_seed();
  const ::testing::ScopedTrace trace_{__FILE__, __LINE__,
                                      "TORCH_MESH_TEST_SEED=" + std::to_string(seed_)};
  Reports reports_;
};

INSTANTIATE_TEST_SUITE_P(Backends, ReaderTest,
                         ::testing::Values(Setup{"uring", "uring", false},
                                           Setup{"threads", "threads", false},
                                           Setup{"faulty_uring", "uring", true},
                                           Setup{"faulty_threads", "threads", true}),
                         [](const auto& info) { return info.param.name; });

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
        if (random() % 3 == 0) hasten(*reader, tag);
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
  EXPECT_EQ(reader->stats().requests, kThreads * kEach);
}

// Holds the I/O thread in its first report, so that what is queued meanwhile has no race with it.
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

// The tags in order of completion when `queue` was queued behind one request at depth 1.
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

TEST_P(ReaderTest, HastenedPrefetchOvertakesTheOthers) {
  const TempFile file(4 * kChunk, seed_);
  const Memory memory(4 * kChunk);
  const auto tags = order_of(options(), file, memory, 3, [&](Reader& reader) {
    for (const uint64_t tag : {1, 2, 3}) {
      submit(reader, request_for(tag, 0, 0, 2 * kChunk, memory.at(0), Urgency::kPrefetch));
    }
    hasten(reader, 3);
    hasten(reader, 12345);
  });
  EXPECT_EQ(tags, (std::vector<uint64_t>{0, 3, 1, 2}));
}

TEST_P(ReaderTest, CallbackMaySubmitAndHasten) {
  const TempFile file(kChunk, seed_);
  const Memory memory(kChunk);
  const File files[] = {file.file()};
  std::unique_ptr<Reader> reader;
  const auto collect = reports_.done();
  Gate ready;
  reader = open_reader(options(), files, {}, [&](const ReadResult& result) {
    ready.pass();
    if (result.tag < 20) {
      submit(*reader, request_for(result.tag + 1, 0, 0, 100, memory.at(0), Urgency::kPrefetch));
      hasten(*reader, result.tag + 1);
    }
    collect(result);
  });
  ready.open();
  submit(*reader, request_for(0, 0, 0, 100, memory.at(0)));
  EXPECT_EQ(reports_.wait_for(21).back().tag, 20u);
}

TEST_P(ReaderTest, ShortReadsOnly) {
  const TempFile file(4 * kChunk, seed_);
  const Memory memory(4 * kChunk);
  const auto reader = open(only({.short_read = 1}), file, memory);
  submit(*reader, request_for(1, 0, 0, 4 * kChunk, memory.at(0)));
  EXPECT_EQ(reports_.wait_for(1)[0].error, 0);
  EXPECT_EQ(std::memcmp(memory.at(0), file.at(0), 4 * kChunk), 0);
  EXPECT_GE(reader->stats().short_reads, 4);
}

TEST_P(ReaderTest, InterruptedAndAgainAreRepeated) {
  const TempFile file(4 * kChunk, seed_);
  const Memory memory(20 * 4 * kChunk);
  const auto reader = open(only({.eintr = 0.5, .eagain = 0.5}), file, memory);
  for (uint64_t tag = 0; tag < 20; ++tag) {
    submit(*reader, request_for(tag, 0, 0, 4 * kChunk, memory.at(tag * 4 * kChunk)));
  }
  for (const ReadResult& result : reports_.wait_for(20)) {
    EXPECT_EQ(result.error, 0);
    EXPECT_EQ(std::memcmp(memory.at(result.tag * 4 * kChunk), file.at(0), 4 * kChunk), 0);
  }
  EXPECT_GT(reader->stats().retries, 0);
}

TEST_P(ReaderTest, AgainForeverEndsInAnError) {
  const TempFile file(kChunk, seed_);
  const Memory memory(kChunk);
  const auto reader = open(only({.eagain = 1}), file, memory);
  submit(*reader, request_for(1, 0, 0, kChunk, memory.at(0)));
  EXPECT_EQ(reports_.wait_for(1)[0].error, EAGAIN);
}

TEST_P(ReaderTest, DiskErrorOnceIsRetried) {
  const TempFile file(4 * kChunk, seed_);
  const Memory memory(4 * kChunk);
  ReaderOptions chosen = only({.eio_once = 1});
  chosen.retries = 1;
  const auto reader = open(chosen, file, memory);
  submit(*reader, request_for(1, 0, 0, 4 * kChunk, memory.at(0)));
  EXPECT_EQ(reports_.wait_for(1)[0].error, 0);
  EXPECT_EQ(std::memcmp(memory.at(0), file.at(0), 4 * kChunk), 0);
  EXPECT_EQ(reader->stats().retries, 4);
}

TEST_P(ReaderTest, DiskErrorForeverNamesFileAndOffset) {
  const TempFile other(kChunk, seed_), file(4 * kChunk, seed_);
  const Memory memory(4 * kChunk);
  ReaderOptions chosen = only({.eio_always = 1});
  chosen.retries = 2;
  chosen.depth = 1;
  const File files[] = {other.file(), file.file()};
  const MemoryRegion regions[] = {memory.region()};
  const auto reader = open_reader(chosen, files, regions, reports_.done());
  submit(*reader, request_for(1, 1, kChunk, 2 * kChunk, memory.at(0)));
  const ReadResult result = reports_.wait_for(1)[0];
  EXPECT_EQ(result.error, EIO);
  EXPECT_EQ(result.file, 1);
  EXPECT_EQ(result.offset, kChunk);
  EXPECT_EQ(reader->stats().retries, 2);
}

TEST_P(ReaderTest, DelayedAndReorderedReadsAllArrive) {
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

TEST_P(ReaderTest, FlippedBitIsLeftToTheChecksum) {
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

TEST_P(ReaderTest, WrongOffsetIsLeftToTheChecksum) {
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
  hasten(*reader, 1);
  reader->close();
}

TEST_P(ReaderTest, CloseFromTheCallbackIsRefused) {
  const TempFile file(kChunk, seed_);
  const Memory memory(kChunk);
  const File files[] = {file.file()};
  std::unique_ptr<Reader> reader;
  const auto collect = reports_.done();
  reader = open_reader(options(), files, {}, [&](const ReadResult& result) {
    expect_error(ErrorKind::kInvalid, "callback", [&] { reader->close(); });
    collect(result);
  });
  submit(*reader, request_for(0, 0, 0, 1, memory.at(0)));
  reports_.wait_for(1);
}

TEST_P(ReaderTest, FileThatCannotBeOpened) {
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

TEST_P(ReaderTest, FileCutOffUnderTheReader) {
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

TEST_P(ReaderTest, FileSystemThatRefusesDirectReads) {
  // kernfs files are read through the kernel's own buffer and nothing else.
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

TEST_P(ReaderTest, TmpfsIsReadWithANote) {
  if (::access("/dev/shm", W_OK) != 0) GTEST_SKIP() << "no writable tmpfs at /dev/shm";
  const TempFile file(2 * kChunk + 5, seed_, "/dev/shm");
  const Memory memory(4 * kChunk);
  const auto reader = open(options(), file, memory);
  EXPECT_TRUE(any_contains(reader->notes(), file.path()));
  submit(*reader, request_for(1, 0, 0, 2 * kChunk + 5, memory.at(0)));
  EXPECT_EQ(reports_.wait_for(1)[0].error, 0);
  EXPECT_EQ(std::memcmp(memory.at(0), file.at(0), 2 * kChunk + 5), 0);
}

TEST_P(ReaderTest, WithoutDirectReadsNothingNeedsAlignment) {
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
  const auto reader = open(options(), file, memory);
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
  EXPECT_EQ(reader->stats().requests, 0);
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
  expect_error(ErrorKind::kInvalid, "probability", [] { with_faults({.eio_once = 1.5}); });
  expect_error(ErrorKind::kInvalid, "probability", [] { with_faults({.delay = std::nan("")}); });
}

TEST_P(ReaderTest, ForkedChildIsRefusedAndDoesNotHang) {
  const TempFile file(4 * kChunk, seed_);
  const Memory memory(50 * 4 * kChunk);
  std::unique_ptr<Reader> reader = open(options(), file, memory);
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
    hasten(*reader, 1);
    reader->close();
    reader.reset();
    return failures;
  });
  EXPECT_TRUE(WIFEXITED(status) && WEXITSTATUS(status) == 0) << status;
  for (const ReadResult& result : reports_.wait_for(50)) EXPECT_EQ(result.error, 0);
}

TEST_P(ReaderTest, AlarmStorm) {
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

TEST_P(ReaderTest, DescriptorsAreGivenBack) {
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

// What a shell command printed, without the end of line; "" when it failed.
std::string output_of(const std::string& command) {
  FILE* pipe = ::popen((command + " 2>/dev/null").c_str(), "r");
  if (pipe == nullptr) return "";
  std::array<char, 256> line{};
  const bool read = std::fgets(line.data(), line.size(), pipe) != nullptr;
  if (::pclose(pipe) != 0 || !read) return "";
  return std::string(line.data(), std::strcspn(line.data(), "\n"));
}

TEST_P(ReaderTest, RealDiskErrorFromALoopDevice) {
  TempFile backing(64 * kChunk, seed_);
  const std::string device = output_of("losetup --find --show --direct-io=on " + backing.path());
  if (device.empty()) GTEST_SKIP() << "losetup cannot attach a loop device here (needs root)";
  {
    const Memory memory(4 * kChunk);
    const File files[] = {{device, backing.bytes()}};
    const auto reader = open_reader(options(), files, {}, reports_.done());
    submit(*reader, request_for(0, 0, 0, 4 * kChunk, memory.at(0)));
    EXPECT_EQ(reports_.wait_for(1)[0].error, 0);
    backing.truncate(kChunk);
    const int64_t gone = 40 * kChunk;
    submit(*reader, request_for(1, 0, gone, 4 * kChunk, memory.at(0)));
    const ReadResult result = reports_.wait_for(2)[1];
    EXPECT_EQ(result.error, EIO);
    EXPECT_EQ(result.file, 0);
    EXPECT_GE(result.offset, gone);
    EXPECT_LT(result.offset, gone + 4 * kChunk);
    EXPECT_GT(reader->stats().retries, 0);
    submit(*reader, request_for(2, 0, 0, kChunk, memory.at(0)));
    EXPECT_EQ(reports_.wait_for(3)[2].error, 0) << "a failed read must leave the reader usable";
  }
  EXPECT_EQ(std::system(("losetup --detach " + device).c_str()), 0);
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

TEST(Reader, AutoFindsABackendAndSaysWhyItFellBack) {
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

// ---- The scheduler: every order of events, without a thread or a disk.

constexpr int64_t kUnit = 512;

ReadRequest plain_request(uint64_t tag, int64_t offset, int64_t bytes, Urgency urgency) {
  static std::byte anywhere;
  ReadRequest request{};
  request.tag = tag;
  request.urgency = urgency;
  request.pieces = 1;
  request.piece[0] = {{0, offset, bytes}, bytes, &anywhere};
  return request;
}

TEST(ChunkScheduler, DepthIsNeverExceeded) {
  ChunkScheduler scheduler(2, 4096, kUnit, 0);
  scheduler.add(plain_request(1, 0, 4 * 4096, Urgency::kDemand));
  const auto first = scheduler.next();
  ASSERT_TRUE(first && scheduler.next());
  EXPECT_FALSE(scheduler.next());
  scheduler.complete(first->chunk, 4096);
  EXPECT_TRUE(scheduler.next());
  EXPECT_FALSE(scheduler.next());
}

TEST(ChunkScheduler, ShortReadResumesOnTheAlignedByteBefore) {
  ChunkScheduler scheduler(1, 4096, kUnit, 0);
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
  ChunkScheduler scheduler(1, 4096, kUnit, 0);
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
  ChunkScheduler scheduler(2, 4096, kUnit, 0);
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

TEST(ChunkScheduler, MediumErrorIsNotTakenForTheEndOfTheFile) {
  ChunkScheduler scheduler(1, 4096, kUnit, 1);
  scheduler.add(plain_request(1, 0, 4096, Urgency::kDemand));
  scheduler.complete(scheduler.next()->chunk, -ENODATA);
  scheduler.complete(scheduler.next()->chunk, -ENODATA);
  EXPECT_EQ(scheduler.take_finished()->error, EIO);
}

TEST(ChunkScheduler, ErrorThatWouldComeAgainIsNotRetried) {
  ChunkScheduler scheduler(1, 4096, kUnit, 5);
  scheduler.add(plain_request(1, 0, 4096, Urgency::kDemand));
  scheduler.complete(scheduler.next()->chunk, -EBADF);
  EXPECT_EQ(scheduler.take_finished()->error, EBADF);
  EXPECT_EQ(scheduler.stats().retries, 0);
}

TEST(ChunkScheduler, AWindowGoesBetweenDemandAndPrefetchAndTakesTheWholeDepth) {
  ChunkScheduler scheduler(8, 4096, kUnit, 1);
  scheduler.add(plain_request(1, 0, 8 * 4096, Urgency::kPrefetch));
  scheduler.add(plain_request(2, int64_t{1} << 20, 5 * 4096, Urgency::kWindow));
  scheduler.add(plain_request(3, int64_t{2} << 20, 4096, Urgency::kDemand));
  EXPECT_EQ(scheduler.next()->offset, int64_t{2} << 20);
  for (int32_t chunk = 0; chunk < 5; ++chunk) {
    EXPECT_EQ(scheduler.next()->offset, (int64_t{1} << 20) + chunk * 4096);
  }
  for (int32_t chunk = 0; chunk < 2; ++chunk) EXPECT_EQ(scheduler.next()->offset, chunk * 4096);
  EXPECT_FALSE(scheduler.next());  // a quarter of the depth is all that guesses get
}

TEST(ChunkScheduler, AHastenedWindowReadGoesBehindTheDemandThatWaits) {
  ChunkScheduler scheduler(8, 4096, kUnit, 1);
  for (const uint64_t tag : {1, 2}) {
    scheduler.add(plain_request(tag, static_cast<int64_t>(tag) * 4096, 4096, Urgency::kWindow));
  }
  scheduler.add(plain_request(3, 3 * 4096, 4096, Urgency::kDemand));
  scheduler.hasten(2);
  for (const int64_t block : {3, 2, 1}) EXPECT_EQ(scheduler.next()->offset, block * 4096);
}

TEST(ChunkScheduler, DemandGoesBeforeThePrefetchThatMustBeRepeated) {
  ChunkScheduler scheduler(2, 4096, kUnit, 1);
  scheduler.add(plain_request(1, 0, 4096, Urgency::kPrefetch));
  scheduler.complete(scheduler.next()->chunk, -EIO);
  scheduler.add(plain_request(2, 8192, 4096, Urgency::kDemand));
  EXPECT_EQ(scheduler.next()->offset, 8192);
  EXPECT_EQ(scheduler.next()->offset, 0);
}

TEST(ChunkScheduler, HastenReachesChunksThatAreCutAlready) {
  ChunkScheduler scheduler(2, 4096, kUnit, 1);
  scheduler.add(plain_request(1, 0, 4096, Urgency::kPrefetch));
  const auto first = scheduler.next();
  scheduler.hasten(1);
  scheduler.add(plain_request(2, 8192, 8192, Urgency::kDemand));
  scheduler.complete(first->chunk, -EIO);
  EXPECT_EQ(scheduler.next()->offset, 0);
}

TEST(ChunkScheduler, CancelReportsWhatNeverStarted) {
  ChunkScheduler scheduler(1, 4096, kUnit, 3);
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

// Any mixture of results, hastening and order, against a file that is only a number.
TEST(ChunkScheduler, RandomEventsReportEachRequestOnce) {
  const uint64_t seed = fresh_seed();
  const ::testing::ScopedTrace trace(__FILE__, __LINE__,
                                     "TORCH_MESH_TEST_SEED=" + std::to_string(seed));
  std::mt19937_64 random(seed);
  const auto up_to = [&](int64_t most) { return static_cast<int64_t>(random() % (most + 1)); };
  constexpr int32_t kDepth = 5;
  ChunkScheduler scheduler(kDepth, 4096, kUnit, 100);
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
    if (up_to(5) == 0) scheduler.hasten(up_to(added));
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

}  // namespace
}  // namespace torch_mesh
