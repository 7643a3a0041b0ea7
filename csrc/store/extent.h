// Files, and ranges of bytes in them.
#pragma once

#include <cstdint>
#include <string>

namespace torch_mesh {

struct File {
  std::string path;
  int64_t bytes;  // the size when the store was opened; a file that shrank since is an error
};

struct Extent {
  int32_t file;  // index in the list of files
  int64_t offset;
  int64_t bytes;
};

}  // namespace torch_mesh
