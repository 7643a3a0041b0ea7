// A file, buffers, completion reports and a reader of each backend, with and without faults.
#pragma once

#include <fcntl.h>
#include <gtest/gtest.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <chrono>
#include <condition_variable>
#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <memory>
#include <mutex>
#include <random>
#include <string>
#include <vector>

#include "base/error.h"
#include "io/reader.h"
#include "seed.h"
#include "store/record.h"
#include "testing/faults.h"

namespace torch_mesh::testing {

inline constexpr int64_t kChunk = 64 << 10;
inline constexpr auto kPatience = std::chrono::seconds(60);

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
  // Whether the page cache holds the whole range.
  bool cached(int64_t offset, int64_t bytes) const {
    const int descriptor = ::open(path_.c_str(), O_RDONLY | O_CLOEXEC);
    void* mapped = ::mmap(nullptr, bytes, PROT_READ, MAP_SHARED, descriptor, offset);
    ::close(descriptor);
    EXPECT_NE(mapped, MAP_FAILED);
    std::vector<unsigned char> pages((bytes + 4095) / 4096);
    EXPECT_EQ(::mincore(mapped, bytes, pages.data()), 0);
    ::munmap(mapped, bytes);
    return std::ranges::all_of(pages, [](unsigned char page) { return (page & 1) != 0; });
  }
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

// Collects completion reports; every wait has a time limit.
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
inline ReadRequest request_for(uint64_t tag, int32_t file, int64_t offset, int64_t needed,
                               std::byte* to, Urgency urgency = Urgency::kDemand) {
  ReadRequest request{};
  request.tag = tag;
  request.urgency = urgency;
  request.pieces = 1;
  request.piece[0] = {{file, offset, round_up(needed, 4096)}, needed, to};
  return request;
}

inline void submit(Reader& reader, const ReadRequest& request) {
  reader.submit({&request, 1});
  reader.flush();
}

inline void raise_priority(Reader& reader, uint64_t tag) {
  reader.raise_priority(tag);
  reader.flush();
}

inline int64_t open_descriptors() {
  return std::distance(std::filesystem::directory_iterator("/proc/self/fd"),
                       std::filesystem::directory_iterator());
}

inline bool any_contains(const std::vector<std::string>& notes, const std::string& part) {
  return std::any_of(notes.begin(), notes.end(),
                     [&](const std::string& note) { return note.find(part) != std::string::npos; });
}

// Runs `body` in a forked child and returns its wait status. An alarm kills a child that hangs.
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
  bool faulty;  // inject every fault that a reader must hide
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
                                       .max_delay = std::chrono::microseconds(500)});
    }
    return options;
  }
  // Options with only these faults.
  ReaderOptions only(Faults faults) const {
    ReaderOptions chosen = options();
    faults.seed = seed_;
    chosen.interpose = with_faults(faults);
    return chosen;
  }

  Owned<Reader> open(const ReaderOptions& options, const TempFile& file, const Memory& memory) {
    const File files[] = {file.file()};
    const MemoryRegion regions[] = {memory.region()};
    return open_reader(options, files, regions, reports_.done());
  }

  const uint64_t seed_ = fresh_seed();
  const ::testing::ScopedTrace trace_{__FILE__, __LINE__,
                                      "TORCH_MESH_TEST_SEED=" + std::to_string(seed_)};
  Reports reports_;
};

// Parameters for a suite that runs over every backend.
inline auto every_backend() {
  return ::testing::Values(Setup{"uring", "uring", false}, Setup{"threads", "threads", false},
                           Setup{"faulty_uring", "uring", true},
                           Setup{"faulty_threads", "threads", true});
}

inline std::string name_of_setup(const ::testing::TestParamInfo<Setup>& info) {
  return info.param.name;
}

}  // namespace torch_mesh::testing
