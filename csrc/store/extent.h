// Files, and ranges of bytes in them.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <iterator>
#include <span>
#include <string>
#include <vector>

namespace torch_mesh {

// The most drives that one file is read from.
inline constexpr int32_t kMaxDrives = 16;

struct File {
  std::string path;
  int64_t bytes;  // the size when the store was opened; a file that shrank since is an error
  // Paths of the same file on other drives: drive 1, 2 and so on, "" where a drive lacks it. Drive
  // 0 has `path`.
  std::vector<std::string> copies = {};

  std::string path_on(int32_t drive) const {
    if (drive == 0) return path;
    return drive <= std::ssize(copies) ? copies[drive - 1] : "";
  }
};

// How many drives these files are on.
inline int32_t drives_of(std::span<const File> files) {
  size_t copies = 0;
  for (const File& file : files) copies = std::max(copies, file.copies.size());
  return static_cast<int32_t>(copies) + 1;
}

struct Extent {
  int32_t file;  // index in the list of files
  int64_t offset;
  int64_t bytes;
};

}  // namespace torch_mesh
