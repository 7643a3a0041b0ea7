// Memory of slots.
#include "residency/memory/arena.h"

#include <gtest/gtest.h>

#include <cstring>
#include <string>

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
  EXPECT_GE(arena.huge_page_bytes(), 0);
  EXPECT_LE(arena.huge_page_bytes(), arena.bytes());
}

TEST(Arena, SaysWhatItCannotHave) {
  const Error error = error_of([] { Arena arena(int64_t{1} << 20, int64_t{1} << 30); });
  EXPECT_EQ(error.kind(), ErrorKind::kMemory);
  EXPECT_NE(std::string(error.what()).find("1073741824 MiB"), std::string::npos) << error.what();
  EXPECT_EQ(error_of([] { Arena arena(1, 1000); }).kind(), ErrorKind::kInvalid);
}

}  // namespace
}  // namespace torch_mesh
