// The files of a store mapped for reading, where the page cache holds them.
//
// Whoever touches a page that cannot be had (the file was cut off, or the disk failed after the
// kernel had taken the page back) gets SIGBUS, which ends a process. So the first mapping installs
// a handler for good: in the place of such a page of ours it puts zeros and counts a loss, and
// whoever used the bytes asks afterwards whether they were the file's. Signals for other addresses
// go to the handler that was there before. A handler that somebody installs later must do likewise.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <mutex>
#include <span>
#include <string>
#include <vector>

#include "io/file_table.h"
#include "store/extent.h"

namespace torch_mesh {

// Offsets of extents are multiples of the page size. Every call may come from any thread.
class MappedFiles {
 public:
  // Throws what FileTable throws, Error(kInvalid) for files that cannot be mapped.
  explicit MappedFiles(std::span<const File> files);
  ~MappedFiles();  // nobody may use the bytes any more
  MappedFiles(const MappedFiles&) = delete;
  MappedFiles& operator=(const MappedFiles&) = delete;

  const std::shared_ptr<const FileTable>& files() const { return files_; }
  int64_t bytes() const;  // of all files
  std::byte* at(const Extent& extent) const { return begin_[extent.file] + extent.offset; }

  // What a read is elsewhere: waits until the pages are in memory, and maps them. Returns how many
  // bytes are there, 0 beyond the file's end, or a negative errno.
  int64_t populate(const Extent& extent);
  // Whether all of its pages are in memory. Always, to the kernel, for a process that neither owns
  // the file nor may write to it.
  bool in_memory(const Extent& extent) const;
  // Advice that these pages be the next to go.
  void cool(const Extent& extent) const;
  // Drops the pages, unless other processes map them, so that populate() reads the disk again.
  void forget(const Extent& extent) const;

  // Losses so far; never falls.
  int64_t losses() const;
  // Whether all bytes that were used since losses() said `before` were the file's.
  bool intact_since(int64_t before) const;
  // Maps the files' own pages again where there are zeros; where it cannot, the next call does.
  bool mend();

 private:
  struct Guarded;  // what the signal handler knows of a mapping; never freed

  bool map(size_t file);  // else errno says why

  const std::shared_ptr<const FileTable> files_;
  std::byte* reserved_ = nullptr;
  size_t reserved_bytes_ = 0;
  std::vector<std::byte*> begin_;  // by file
  Guarded* guarded_ = nullptr;
  std::mutex mending_;
  std::atomic<int64_t> mended_{0};  // losses that are mended

  friend struct SigbusHandler;
};

// Whether this kernel fills page tables on request (Linux 5.14); without, pages are touched one by
// one.
bool populate_read_works();

}  // namespace torch_mesh
