#include "io/file_table.h"

#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <bit>
#include <cerrno>
#include <cstring>
#include <utility>

#include "base/aligned_memory.h"
#include "base/error.h"
#include "io/reader.h"
#include "store/record.h"

namespace torch_mesh {

namespace {

// Every Linux file system that does direct I/O at all takes pages.
constexpr int64_t kUnknownAlignment = 4096;

[[noreturn]] void fail_to_open(const File& file, int error, const std::string& what) {
  throw Error(ErrorKind::kRead, concat(what, " ", file.path, ": ", std::strerror(error)),
              {.file = file.path}, error);
}

int open_repeating(const File& file, int flags) {
  for (;;) {
    const int descriptor = ::open(file.path.c_str(), O_RDONLY | O_CLOEXEC | flags);
    if (descriptor >= 0 || errno != EINTR) return descriptor;
  }
}

// The alignment that the file system asks of direct I/O; 0 when it does not say.
int64_t reported_alignment([[maybe_unused]] int descriptor) {
#ifdef STATX_DIOALIGN
  struct statx status;
  if (::statx(descriptor, "", AT_EMPTY_PATH, STATX_DIOALIGN, &status) == 0 &&
      (status.stx_mask & STATX_DIOALIGN) != 0) {
    return std::max<int64_t>(status.stx_dio_mem_align, status.stx_dio_offset_align);
  }
#endif
  return 0;
}

// What direct reads are aligned to, if the file system takes them.
int64_t tried_alignment(int64_t reported) {
  return std::has_single_bit(static_cast<uint64_t>(reported)) ? reported : kUnknownAlignment;
}

// Some file systems accept O_DIRECT at open and refuse the reads, so one read is tried.
bool direct_read_refused(int descriptor, int64_t alignment) {
  const AlignedMemory block = aligned_memory(alignment, alignment);
  if (block == nullptr) throw Error(ErrorKind::kMemory, "no memory to probe direct I/O");
  ssize_t got;
  do {
    got = ::pread(descriptor, block.get(), alignment, 0);
  } while (got < 0 && errno == EINTR);
  // Any other error belongs to the request that meets it.
  return got < 0 && (errno == EINVAL || errno == EOPNOTSUPP);
}

// The most that the kernel reads ahead for one call, whatever the device. It cuts longer advice
// off.
constexpr int64_t kAdvised = 128 << 10;
// The kernel drops only whole folios from the page cache.
constexpr int64_t kMaxFolio = 2 << 20;

// Called before the file is opened, since opening a pipe waits for its writer.
void check_kind(const File& file) {
  struct stat status;
  if (::stat(file.path.c_str(), &status) != 0) fail_to_open(file, errno, "cannot open");
  if (S_ISDIR(status.st_mode)) fail_to_open(file, EISDIR, "cannot read");
  if (!S_ISREG(status.st_mode) && !S_ISBLK(status.st_mode)) {
    throw Error(
        ErrorKind::kInvalid,
        concat(file.path, " is neither a regular file nor a block device, so it holds no store"),
        {.file = file.path});
  }
}

void check_size(const File& file, int descriptor) {
  struct stat status;
  if (::fstat(descriptor, &status) != 0) fail_to_open(file, errno, "cannot stat");
  // A block device has no size in its inode.
  if (S_ISREG(status.st_mode) && status.st_size < file.bytes) {
    throw Error(
        ErrorKind::kRead,
        concat(file.path, " has ", status.st_size, " bytes and had ", file.bytes,
               " when its header was read: it was cut off or replaced; convert or download it "
               "again"),
        {.file = file.path, .offset = status.st_size}, ENODATA);
  }
}

[[noreturn]] void refuse_copy(const std::string& path, const std::string& obstacle) {
  throw Error(ErrorKind::kInvalid,
              concat(path, " cannot be read beside the original: ", obstacle,
                     ", and copies on several drives need direct reads; leave the mirror out"),
              {.file = path});
}

}  // namespace

FileTable::FileTable(std::span<const File> files, bool direct) {
  for (const File& file : files) open_one(file, direct);
  open_copies(files);
}

int32_t FileTable::add(Descriptor opened) {
  descriptors_.push_back(opened.get());
  opened_.push_back(std::move(opened));
  return static_cast<int32_t>(descriptors_.size()) - 1;
}

void FileTable::open_one(const File& file, bool direct) {
  if (file.bytes < 0) {
    throw Error(ErrorKind::kInvalid,
                concat("the size of ", file.path, " is given as ", file.bytes,
                       " bytes; it must be 0 or more"),
                {.file = file.path});
  }
  check_kind(file);
  if (direct) {
    std::string obstacle;
    if (Descriptor opened = open_direct(file, obstacle); opened.get() >= 0) {
      add(std::move(opened));
      buffered_.push_back(false);
      return;
    }
    notes_.push_back(file.path + ": " + obstacle +
                     "; reading through the page cache, which costs processor time");
  }
  Descriptor opened(open_repeating(file, 0));
  if (opened.get() < 0) fail_to_open(file, errno, "cannot open");
  check_size(file, opened.get());
  // Otherwise each random read also reads as much as the disk's read-ahead is set to.
  posix_fadvise(opened.get(), 0, 0, POSIX_FADV_RANDOM);
  add(std::move(opened));
  buffered_.push_back(true);
}

Descriptor FileTable::open_direct(const File& file, std::string& obstacle) {
  obstacle = "the file system refuses O_DIRECT";
  Descriptor opened(open_repeating(file, O_DIRECT));
  if (opened.get() < 0) {
    if (errno != EINVAL) fail_to_open(file, errno, "cannot open");
    return opened;
  }
  check_size(file, opened.get());
  const int64_t reported = reported_alignment(opened.get());
  const int64_t alignment = tried_alignment(reported);
  if (alignment > kRecordAlignment) {
    obstacle = concat("the file system wants direct reads in multiples of ", alignment,
                      " bytes, and records are aligned to ", kRecordAlignment);
    return Descriptor();
  }
  if (direct_read_refused(opened.get(), alignment)) return Descriptor();
  if (alignment != reported) {
    notes_.push_back(file.path + ": the file system does not say how direct I/O is aligned (" +
                     std::to_string(reported) + "); reading in units of 4096 bytes");
  }
  alignment_ = std::max(alignment_, alignment);
  return opened;
}

void FileTable::open_copies(std::span<const File> files) {
  const int32_t drives = drives_of(files);
  if (drives == 1) return;
  std::vector<int32_t> descriptors;
  for (size_t index = 0; index < files.size(); ++index) {
    const File& file = files[index];
    descriptors.push_back(static_cast<int32_t>(index));
    for (int32_t drive = 1; drive < drives; ++drive) {
      const std::string path = file.path_on(drive);
      if (!path.empty() && buffered_[index]) {
        refuse_copy(path, concat(file.path, " is read through the page cache"));
      }
      descriptors.push_back(path.empty() ? -1 : open_copy({path, file.bytes}));
    }
  }
  copies_ = FileCopies(drives, std::move(descriptors));
}

int32_t FileTable::open_copy(const File& copy) {
  check_kind(copy);
  std::string obstacle;
  Descriptor opened = open_direct(copy, obstacle);
  if (opened.get() < 0) refuse_copy(copy.path, obstacle);
  return add(std::move(opened));
}

bool FileTable::buffered() const { return std::ranges::find(buffered_, true) != buffered_.end(); }

void FileTable::will_need(const Extent& extent) const {
  if (!buffered_[extent.file]) return;
  for (int64_t at = 0; at < extent.bytes; at += kAdvised) {
    posix_fadvise(descriptors_[extent.file], extent.offset + at,
                  std::min(kAdvised, extent.bytes - at), POSIX_FADV_WILLNEED);
  }
}

void FileTable::forget(const Extent& extent) const {
  if (!buffered_[extent.file]) return;
  const int64_t begin = extent.offset / kMaxFolio * kMaxFolio;
  const int64_t end = extent.offset + extent.bytes + kMaxFolio;
  posix_fadvise(descriptors_[extent.file], begin, end - begin, POSIX_FADV_DONTNEED);
}

int64_t direct_io_alignment(const std::string& path) {
  const File file{path, 0};
  const Descriptor descriptor(open_repeating(file, O_DIRECT));
  if (descriptor.get() < 0) {
    if (errno == EINVAL) return -1;
    fail_to_open(file, errno, "cannot open");
  }
  const int64_t reported = reported_alignment(descriptor.get());
  const int64_t tried = tried_alignment(reported);
  return tried > kRecordAlignment || direct_read_refused(descriptor.get(), tried) ? -1 : reported;
}

}  // namespace torch_mesh
