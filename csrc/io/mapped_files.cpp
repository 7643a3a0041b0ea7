#include "io/mapped_files.h"

#include <fcntl.h>
#include <signal.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <cstring>

#include "base/error.h"

namespace torch_mesh {

// Found by the handler through a list that only grows, at any time and on any thread.
struct MappedFiles::Guarded {
  uintptr_t begin = 0;
  uintptr_t end = 0;
  Guarded* next = nullptr;
  std::atomic<bool> alive{true};
  std::atomic<int64_t> losses{0};
  std::atomic<int32_t> replacing{0};  // threads that put zeros in a page's place
};

namespace {

constexpr size_t kPage = 4096;
// Files begin with a huge page, so that the kernel can map them in such where it caches them so.
constexpr size_t kHugePage = size_t{2} << 20;
// Linux 5.14; older headers lack the name, older kernels answer EINVAL.
constexpr int kPopulateRead = 22;
constexpr int kCold = 20;  // Linux 5.4

size_t round_up_to(size_t bytes, size_t unit) { return (bytes + unit - 1) / unit * unit; }

struct Range {
  std::byte* data;
  size_t bytes;
};

// The whole pages that hold `bytes` from `data` on.
Range pages_of(std::byte* data, int64_t bytes) {
  const size_t lead = reinterpret_cast<uintptr_t>(data) % kPage;
  return {data - lead, round_up_to(static_cast<size_t>(bytes) + lead, kPage)};
}

}  // namespace

struct SigbusHandler {
  using Guarded = MappedFiles::Guarded;

  static inline std::atomic<Guarded*> first{nullptr};
  static inline struct sigaction before;

  static void install() {
    static std::once_flag once;
    std::call_once(once, [] {
      struct sigaction action = {};
      action.sa_sigaction = handle;
      action.sa_flags = SA_SIGINFO | SA_ONSTACK;
      sigemptyset(&action.sa_mask);
      if (sigaction(SIGBUS, nullptr, &before) != 0 || sigaction(SIGBUS, &action, nullptr) != 0) {
        throw Error(
            ErrorKind::kInvalid,
            std::string("io=\"mmap\" needs a handler for SIGBUS, which cannot be installed: ") +
                strerror(errno) + "; use io=\"auto\"");
      }
    });
  }

  static void add(Guarded* guarded) {
    guarded->next = first.load();
    while (!first.compare_exchange_weak(guarded->next, guarded)) {
    }
  }

  static void handle(int signal, siginfo_t* info, void* context) {
    const int saved = errno;
    const auto address = reinterpret_cast<uintptr_t>(info->si_addr);
    const bool touched = info->si_code == BUS_ADRERR || info->si_code == BUS_MCEERR_AR;
    for (Guarded* each = first.load(); touched && each != nullptr; each = each->next) {
      if (address < each->begin || address >= each->end || !each->alive.load()) continue;
      const bool replaced = replace(*each, address / kPage * kPage);
      errno = saved;
      if (replaced) return;
      break;
    }
    pass_on(signal, info, context);
    errno = saved;
  }

  // Whoever sees the zeros before they are counted sees that some are being put there.
  static bool replace(Guarded& guarded, uintptr_t page) {
    ++guarded.replacing;
    const long mapped =
        syscall(SYS_mmap, page, kPage, PROT_READ, MAP_PRIVATE | MAP_ANONYMOUS | MAP_FIXED, -1, 0);
    ++guarded.losses;
    --guarded.replacing;
    return mapped != -1;
  }

  static void pass_on(int signal, siginfo_t* info, void* context) {
    if ((before.sa_flags & SA_SIGINFO) != 0) {
      before.sa_sigaction(signal, info, context);
    } else if (before.sa_handler == SIG_DFL || before.sa_handler == SIG_IGN) {
      sigaction(SIGBUS, &before, nullptr);
      if (info->si_code <= 0) raise(signal);  // sent by somebody; a touch is repeated on return
    } else {
      before.sa_handler(signal);
    }
  }
};

bool populate_read_works() {
  // Of nothing: only the name is checked.
  return madvise(nullptr, 0, kPopulateRead) == 0;
}

MappedFiles::MappedFiles(std::span<const File> files)
    : files_(std::make_shared<const FileTable>(files, /*direct=*/false)), begin_(files.size()) {
  SigbusHandler::install();
  auto guarded = std::make_unique<Guarded>();  // before what would have to be given back without it
  for (const File& file : files) reserved_bytes_ += round_up_to(file.bytes + 1, kHugePage);
  reserved_bytes_ += kHugePage;
  void* reserved =
      mmap(nullptr, reserved_bytes_, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (reserved == MAP_FAILED) {
    throw Error(ErrorKind::kMemory,
                "no address space for the " + std::to_string(bytes()) + " bytes of a store: " +
                    strerror(errno) + "; raise ulimit -v, or use io=\"auto\"",
                {}, errno);
  }
  reserved_ = static_cast<std::byte*>(reserved);
  auto next =
      reinterpret_cast<std::byte*>(round_up_to(reinterpret_cast<uintptr_t>(reserved_), kHugePage));
  for (size_t file = 0; file < files.size(); ++file) {
    begin_[file] = next;
    next += round_up_to(files[file].bytes + 1, kHugePage);
    if (map(file)) continue;
    const int error = errno;
    munmap(reserved_, reserved_bytes_);
    throw Error(ErrorKind::kInvalid,
                files[file].path + " cannot be mapped: " + strerror(error) +
                    "; use io=\"auto\", which reads it",
                {.file = files[file].path}, error);
  }
  guarded->begin = reinterpret_cast<uintptr_t>(reserved_);
  guarded->end = guarded->begin + reserved_bytes_;
  guarded_ = guarded.release();
  SigbusHandler::add(guarded_);
}

MappedFiles::~MappedFiles() {
  guarded_->alive = false;
  munmap(reserved_, reserved_bytes_);
}

// Over what is there: each page is the file's, or one that was put in its place, at any moment.
bool MappedFiles::map(size_t file) {
  const int64_t bytes = files_->file_bytes(static_cast<int32_t>(file));
  if (bytes == 0) return true;
  void* mapped =
      mmap(begin_[file], bytes, PROT_READ, MAP_SHARED | MAP_FIXED, files_->descriptors()[file], 0);
  if (mapped == MAP_FAILED) return false;
  // Advice only. Else a fault reads around it as far as the disk's read-ahead goes: 8 MiB for a
  // page, where it is set so.
  madvise(begin_[file], bytes, MADV_RANDOM);
  madvise(begin_[file], bytes, MADV_DONTFORK);
  return true;
}

int64_t MappedFiles::bytes() const {
  int64_t sum = 0;
  for (size_t file = 0; file < begin_.size(); ++file) {
    sum += files_->file_bytes(static_cast<int32_t>(file));
  }
  return sum;
}

int64_t MappedFiles::populate(const Extent& extent) {
  if (mended_ != losses()) mend();
  const auto beyond_end = [&] {
    struct stat status;
    if (fstat(files_->descriptors()[extent.file], &status) != 0) return false;
    return S_ISREG(status.st_mode) && status.st_size < extent.offset + extent.bytes;
  };
  if (beyond_end()) return 0;
  const Range range = pages_of(at(extent), extent.bytes);
  // All of it at once: what follows would read page by page.
  madvise(range.data, range.bytes, MADV_WILLNEED);
  if (madvise(range.data, range.bytes, kPopulateRead) == 0) return extent.bytes;
  switch (errno) {
    case EINVAL: {  // an older kernel
      const int64_t before = losses();
      for (size_t at = 0; at < range.bytes; at += kPage) {
        static_cast<void>(*static_cast<const volatile std::byte*>(range.data + at));
      }
      if (intact_since(before)) return extent.bytes;
      break;
    }
    case EFAULT:  // touching it would raise SIGBUS
    case EHWPOISON:
      break;
    default:
      return -int64_t{errno};
  }
  return beyond_end() ? 0 : -EIO;
}

bool MappedFiles::in_memory(const Extent& extent) const {
  const Range range = pages_of(at(extent), extent.bytes);
  std::array<unsigned char, 1024> pages;
  for (size_t done = 0; done < range.bytes; done += pages.size() * kPage) {
    const size_t part = std::min(pages.size() * kPage, range.bytes - done);
    if (mincore(range.data + done, part, pages.data()) != 0) return true;
    const auto end = pages.begin() + static_cast<ptrdiff_t>(part / kPage);
    if (!std::all_of(pages.begin(), end, [](unsigned char page) { return (page & 1) != 0; })) {
      return false;
    }
  }
  return true;
}

void MappedFiles::cool(const Extent& extent) const {
  const Range range = pages_of(at(extent), extent.bytes);
  madvise(range.data, range.bytes, kCold);
}

void MappedFiles::forget(const Extent& extent) const {
  const Range range = pages_of(at(extent), extent.bytes);
  madvise(range.data, range.bytes, MADV_DONTNEED);
  posix_fadvise(files_->descriptors()[extent.file], extent.offset, extent.bytes,
                POSIX_FADV_DONTNEED);
}

int64_t MappedFiles::losses() const { return guarded_->losses; }

bool MappedFiles::intact_since(int64_t before) const {
  return guarded_->replacing == 0 && guarded_->losses == before;
}

// A loss during this is counted afterwards, and mended by the next call.
bool MappedFiles::mend() {
  const std::lock_guard lock(mending_);
  const int64_t now = losses();
  if (mended_ == now) return true;
  bool mended = true;
  for (size_t file = 0; file < begin_.size(); ++file) mended &= map(file);
  if (mended) mended_ = now;
  return mended;
}

}  // namespace torch_mesh
