// Files, and ranges of bytes in them.
#pragma once

#include <cstdint>
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

  const std::string& path_on(int32_t drive) const { return drive == 0 ? path : copies[drive - 1]; }
};

struct Extent {
  int32_t file;  // index in the list of files
  int64_t offset;
  int64_t bytes;
};

}  // namespace torch_mesh
