// The memory of slots.
#include "residency/memory/arena.h"

#include <gtest/gtest.h>
#include <malloc.h>

#include <cstdio>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <new>
#include <string>

#include "allocations.h"
#include "error_of.h"

namespace torch_mesh {
namespace {

using namespace testing;

TEST(Arena, PiecesAreAlignedDistinctAndWritable) {
  Arena arena(70, int64_t{1} << 20);  // crosses a segment
  EXPECT_EQ(arena.bytes(), int64_t{70} << 20);
  EXPECT_EQ(arena.segments().size(), 2u);
  for (int32_t i = 0; i < 70; ++i) {
    EXPECT_EQ(reinterpret_cast<uintptr_t>(arena.piece(i)) % 4096, 0u);
    std::memset(arena.piece(i), i, size_t{1} << 20);
  }
  for (int32_t i = 0; i < 70; ++i) {
    EXPECT_EQ(arena.piece(i)[0], std::byte(i));
    EXPECT_EQ(arena.piece(i)[(1 << 20) - 1], std::byte(i));
  }
}

TEST(Arena, ErrorNamesTheSizeThatCannotBeAllocated) {
  const Error error = error_of([] { Arena arena(int64_t{1} << 20, int64_t{1} << 30); });
  EXPECT_EQ(error.kind(), ErrorKind::kMemory);
  EXPECT_NE(std::string(error.what()).find("1073741824 MiB"), std::string::npos) << error.what();
  EXPECT_EQ(error_of([] { Arena arena(1, 1000); }).kind(), ErrorKind::kInvalid);
}

// Bytes of this process's mapped address space.
int64_t mapped_bytes() {
  std::ifstream file("/proc/self/status");
  long long kib = 0;
  for (std::string line; std::getline(file, line);) {
    if (std::sscanf(line.c_str(), "VmSize: %lld kB", &kib) == 1) break;
  }
  return int64_t{kib} << 10;
}

TEST(Arena, CtrlCEndsThePreparationOfMemory) {
  constexpr int64_t kSegment = int64_t{4} << 20, kSegments = 8;
  const Runtime interrupted{.interrupted = [] { return true; }};
  mallopt(M_ARENA_MAX, 1);  // other threads' heaps would count as mapped too
  const auto attempt = [&] {
    return error_of([&] {
      Arena(kSegments, kSegment, Topology::of_this_process(), kSegment, Sharing::kPrivate,
            interrupted);
    });
  };
  EXPECT_EQ(attempt().kind(), ErrorKind::kInterrupted);  // warm-up: the stacks of threads are kept
  const int64_t mapped = mapped_bytes();
  EXPECT_EQ(attempt().kind(), ErrorKind::kInterrupted);
  EXPECT_LT(mapped_bytes() - mapped, kSegments * kSegment) << "the arena is still there";
}

TEST(Arena, EveryAllocationMayFail) {
  constexpr int64_t kSegment = int64_t{4} << 20, kSegments = 8;
  const Topology topology = Topology::of_this_process();
  const auto descriptors = [] {
    const std::filesystem::directory_iterator all("/proc/self/fd");
    return std::distance(begin(all), end(all));
  };
  mallopt(M_ARENA_MAX, 1);  // other threads' heaps would count as mapped too
  for (const Sharing sharing : {Sharing::kPrivate, Sharing::kShared}) {
    const auto attempt = [&] {
      try {
        Arena(kSegments, kSegment, topology, kSegment, sharing);
      } catch (const std::bad_alloc&) {
      } catch (const Error& error) {
        EXPECT_EQ(error.kind(), ErrorKind::kMemory) << error.what();
      }
    };
    attempt();  // warm-up: threads and the allocator keep some memory
    const int64_t mapped = mapped_bytes(), open = descriptors();
    EXPECT_GT(with_each_allocation_failing(attempt), 1);
    EXPECT_LT(mapped_bytes() - mapped, kSegments * kSegment) << "an arena is still there";
    EXPECT_EQ(descriptors(), open);
  }
}

}  // namespace
}  // namespace torch_mesh
