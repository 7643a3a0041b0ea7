// The open files of a reader, and the alignment that direct I/O asks of them.
#pragma once

#include <cstdint>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "base/descriptor.h"
#include "store/extent.h"

namespace torch_mesh {

// Which drives a file can be read from.
class FileCopies {
 public:
  // Each file is on drive 0 alone.
  FileCopies() = default;
  // `descriptors`: [files][drives], -1 where a drive lacks the file.
  FileCopies(int32_t drives, std::vector<int32_t> descriptors)
      : drives_(drives), descriptors_(std::move(descriptors)) {}

  int32_t drives() const { return drives_; }
  // The index of the descriptor that reads `file` from `drive`; -1 if the drive lacks it.
  int32_t descriptor(int32_t file, int32_t drive) const {
    return drives_ == 1 ? file : descriptors_[static_cast<size_t>(file) * drives_ + drive];
  }

 private:
  int32_t drives_ = 1;
  std::vector<int32_t> descriptors_;
};

class FileTable {
 public:
  // Throws Error(kRead) for a file that cannot be opened or has shrunk, Error(kInvalid) for one
  // that is no file or has a negative size. Files are read through the page cache unless `direct`
  // asks for O_DIRECT and the file system takes it at kRecordAlignment; notes() says so. Copies on
  // other drives are read directly or not at all, since the page cache would hold each separately.
  FileTable(std::span<const File> files, bool direct);

  int64_t files() const { return std::ssize(buffered_); }
  // The files in their order, then their copies.
  std::span<const int> descriptors() const { return descriptors_; }
  const FileCopies& copies() const { return copies_; }
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
  // An empty descriptor, and the reason in `obstacle`, if the file system does not take direct
  // reads.
  Descriptor open_direct(const File& file, std::string& obstacle);
  void open_copies(std::span<const File> files);
  int32_t open_copy(const File& copy);
  int32_t add(Descriptor opened);  // returns its index

  std::vector<Descriptor> opened_;
  std::vector<int> descriptors_;  // theirs
  std::vector<bool> buffered_;    // by file
  FileCopies copies_;
  int64_t alignment_ = 1;
  std::vector<std::string> notes_;
};

}  // namespace torch_mesh
