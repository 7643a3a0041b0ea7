// The open files of a reader, and the alignment that direct I/O asks of them.
#pragma once

#include <cstdint>
#include <span>
#include <string>
#include <vector>

#include "base/descriptor.h"
#include "store/extent.h"

namespace torch_mesh {

class FileTable {
 public:
  // Throws Error(kRead) for a file that cannot be opened or has shrunk, Error(kInvalid) for one
  // that is no file or has a negative size. Files are read through the page cache unless `direct`
  // asks for O_DIRECT and the file system takes it at kRecordAlignment; notes() says so.
  FileTable(std::span<const File> files, bool direct);

  std::span<const int> descriptors() const { return descriptors_; }
  // The alignment of offsets, lengths and memory; 1 when every file is read through the page cache.
  int64_t alignment() const { return alignment_; }
  // Whether some file is read through the page cache.
  bool buffered() const;
  // Advise the page cache to read these bytes ahead, or to drop them; without effect on files that
  // are read directly. From any thread.
  void will_need(const Extent& extent) const;
  void forget(const Extent& extent) const;
  const std::vector<std::string>& notes() const { return notes_; }

 private:
  void open_one(const File& file, bool direct);
  void add(Descriptor opened, bool buffered);

  std::vector<Descriptor> opened_;
  std::vector<int> descriptors_;  // theirs
  std::vector<bool> buffered_;
  int64_t alignment_ = 1;
  std::vector<std::string> notes_;
};

}  // namespace torch_mesh
