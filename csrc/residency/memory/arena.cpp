#include "residency/memory/arena.h"

#include <fcntl.h>
#include <linux/mempolicy.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <cerrno>
#include <cstdio>
#include <cstring>
#include <fstream>
#include <new>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "base/at_end.h"
#include "base/error.h"
#include "base/interrupts.h"
#include "base/start_thread.h"

namespace torch_mesh {
namespace {

constexpr size_t kHugePage = size_t{2} << 20;
constexpr size_t kPage = 4096;
// Linux 5.14; older headers lack the name, older kernels answer EINVAL.
constexpr int kPopulateWrite = 23;
// Linux 5.1, likewise.
constexpr int kSealFutureWrite = 0x10;

int64_t available_bytes() {  // -1 where the kernel does not say
  std::ifstream file("/proc/meminfo");
  for (std::string line; std::getline(file, line);) {
    long long kib = 0;
    if (std::sscanf(line.c_str(), "MemAvailable: %lld kB", &kib) == 1) return int64_t{kib} << 10;
  }
  return -1;
}

std::string mebibytes(int64_t bytes) { return std::to_string(bytes >> 20) + " MiB"; }

[[noreturn]] void throw_no_memory(int64_t count, int64_t bytes, const char* why, int os_error) {
  const int64_t available = available_bytes();
  throw Error(
      ErrorKind::kMemory,
      concat("no memory for ", count, " buffers of ", bytes, " bytes (", mebibytes(count * bytes),
             "): ", why, (available < 0 ? "" : "; " + mebibytes(available) + " are available now"),
             "; keep fewer experts resident, or raise the memory limit"),
      {}, os_error);
}

// If the kernel refuses this, it places the pages by its own rules.
void prefer_nodes(std::byte* data, size_t bytes, int mode, std::span<const int32_t> nodes) {
  std::array<unsigned long, 16> mask{};
  constexpr int32_t kBits = 8 * sizeof(unsigned long);
  for (const int32_t node : nodes) mask[node / kBits] |= 1UL << node % kBits;
  syscall(SYS_mbind, data, bytes, mode, mask.data(), sizeof(mask) * 8, 0);
}

// Places a segment on one of the nodes that compute, or on the next when that is full. If threads
// run on one node alone, or it is unknown on which, interleaving gives each core the mean of all
// nodes' memory.
void place_on(std::byte* data, size_t bytes, const Topology& topology, int32_t node) {
  if (topology.nodes() > 1) {
    const int32_t preferred = topology.kernel_node(node);
    return prefer_nodes(data, bytes, MPOL_PREFERRED, {&preferred, 1});
  }
  const std::vector<int32_t> nodes = memory_nodes();
  if (nodes.size() > 1) prefer_nodes(data, bytes, MPOL_INTERLEAVE, nodes);
}

// Faults pages in; returns 0 or an errno. Registered pages must exist, and a forward must not pay
// for page faults.
int populate(std::byte* data, size_t bytes) {
  int status;
  do {
    status = madvise(data, bytes, kPopulateWrite);
  } while (status != 0 && (errno == EINTR || errno == EAGAIN));
  if (status == 0) return 0;
  if (errno != EINVAL) return errno;
  for (size_t at = 0; at < bytes; at += kPage) data[at] = std::byte{0};
  return 0;
}

// Faults segments in on several threads. The kernel clears pages on the thread that asks for them:
// one alone takes seconds for each 10 GB, and far longer if a virtual machine's host has to find
// them, too.
int populate(std::span<const MemoryRegion> segments, const Runtime& runtime) {
  std::atomic<size_t> next{0};
  std::atomic<int> failed{0};
  const auto populate_next = [&] {
    const size_t at = next++;
    if (at >= segments.size() || failed != 0) return false;
    if (const int error = populate(segments[at].data, segments[at].bytes)) failed = error;
    return true;
  };
  const auto work = [&] {
    while (populate_next()) {
    }
  };
  std::vector<std::thread> others;
  const size_t threads = std::min<size_t>(segments.size(), std::thread::hardware_concurrency());
  try {
    if (threads > 1) others.reserve(threads - 1);
    while (others.size() + 1 < threads) {
      others.push_back(start_thread("a thread that prepares memory", work));
    }
  } catch (const Error&) {  // those that have started do the work
  } catch (const std::bad_alloc&) {
  }
  {
    const AtEnd join([&] {
      for (std::thread& thread : others) thread.join();
    });
    try {
      while (populate_next()) check_interrupted(runtime, "memory for experts is prepared");
    } catch (...) {
      next = segments.size();  // the others end, too
      throw;
    }
  }
  return failed;
}

// Maps memory aligned to 2 MiB, so that every page of it can be a huge one; that of a memfd, unless
// `descriptor` is -1. nullptr: errno says why.
std::byte* map_aligned(size_t bytes, int descriptor) {
  const size_t room = bytes + kHugePage;
  void* mapped = mmap(nullptr, room, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (mapped == MAP_FAILED) return nullptr;
  auto* start = static_cast<std::byte*>(mapped);
  const size_t lead = (kHugePage - reinterpret_cast<uintptr_t>(start) % kHugePage) % kHugePage;
  if (lead > 0) munmap(start, lead);
  const size_t tail = room - lead - bytes;
  if (tail > 0) munmap(start + lead + bytes, tail);
  start += lead;
  if (descriptor < 0) return start;
  mapped = mmap(start, bytes, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_FIXED, descriptor, 0);
  if (mapped != MAP_FAILED) return start;
  const int error = errno;
  munmap(start, bytes);
  errno = error;
  return nullptr;
}

// The number of pieces in a segment. The arguments are not checked yet.
int64_t fitting_pieces(int64_t count, int64_t bytes, int32_t nodes, int64_t segment_bytes) {
  const int64_t fit = bytes > 0 ? segment_bytes / bytes : 1;
  const int64_t of_node = count / nodes + (count % nodes != 0);
  return std::max<int64_t>(1, std::min(fit, of_node));
}

}  // namespace

// Delegates to a constructor without memory, so that the destructor frees what there is by then if
// this constructor throws.
Arena::Arena(int64_t count, int64_t bytes, const Topology& topology, int64_t segment_bytes,
             Sharing sharing, const Runtime& runtime)
    : Arena(count, bytes, fitting_pieces(count, bytes, topology.nodes(), segment_bytes),
            topology.nodes()) {
  if (count < 0 || bytes < 1 || bytes % static_cast<int64_t>(kPage) != 0) {
    throw_invalid("an arena holds 0 or more pieces of a multiple of 4096 bytes; got ", count,
                  " of ", bytes);
  }
  if (count > INT64_MAX / bytes) {
    throw_invalid(count, " buffers of ", bytes, " bytes exceed the address space");
  }
  // Beyond this the kernel would rather kill the process than fail the allocation.
  const int64_t available = available_bytes();
  if (available >= 0 && count * bytes > available) {
    throw_no_memory(count, bytes, "that is more than is free", ENOMEM);
  }
  if (sharing == Sharing::kShared && count > 0) map_shared(count * bytes);
  segments_.reserve((count + pieces_per_segment_ - 1) / pieces_per_segment_);
  for (int64_t first = 0; first < count; first += pieces_per_segment_) {
    const size_t size = std::min(pieces_per_segment_, count - first) * bytes;
    std::byte* data =
        shared_.data != nullptr ? shared_.data + first * bytes : map_aligned(size, -1);
    if (data == nullptr) {
      const int error = errno;
      release();
      throw_no_memory(count, bytes, strerror(error), error);
    }
    segments_.push_back({data, size});
    // Advice only: without huge pages or fork protection everything still works.
    madvise(data, size, MADV_HUGEPAGE);
    madvise(data, size, MADV_DONTFORK);
    place_on(data, size, topology, node(first));
  }
  if (const int error = populate(segments_, runtime)) {
    release();
    throw_no_memory(count, bytes, strerror(error), error);
  }
}

Arena::Arena(int64_t count, int64_t bytes, int64_t pieces_per_segment, int32_t nodes)
    : count_(count), piece_bytes_(bytes), pieces_per_segment_(pieces_per_segment), nodes_(nodes) {}

Arena::~Arena() { release(); }

// Maps a sealed memfd: no process can cut off what others have mapped, and no other process can
// write to it.
void Arena::map_shared(int64_t bytes) {
  descriptor_.reset(memfd_create("torch_mesh_pool", MFD_CLOEXEC | MFD_ALLOW_SEALING));
  const auto size = static_cast<size_t>(bytes);
  if (descriptor() >= 0 && ftruncate(descriptor(), bytes) == 0) {
    shared_ = {map_aligned(size, descriptor()), size};
  }
  constexpr int kSeals = F_SEAL_SHRINK | F_SEAL_GROW | kSealFutureWrite | F_SEAL_SEAL;
  if (shared_.data != nullptr && fcntl(descriptor(), F_ADD_SEALS, kSeals) == 0) return;
  const int error = errno;
  throw Error(ErrorKind::kMemory,
              concat("no shared memory of ", mebibytes(bytes), ": ", strerror(error),
                     "; it takes memfd_create with seals, of Linux 5.1 or newer"),
              {}, error);
}

void Arena::release() {
  if (shared_.data != nullptr) {
    munmap(shared_.data, shared_.bytes);
  } else {
    for (const MemoryRegion& segment : segments_) munmap(segment.data, segment.bytes);
  }
  shared_ = {nullptr, 0};
  segments_.clear();
  descriptor_.reset();
}

std::byte* Arena::piece(int64_t index) const {
  return segments_[index / pieces_per_segment_].data + index % pieces_per_segment_ * piece_bytes_;
}

void Arena::drop(int64_t segment) const {
  // Drops whole huge pages, as the segment begins with one, so that none has to be split.
  madvise(segments_[segment].data, segments_[segment].bytes, MADV_DONTNEED);
}

void Arena::fault_in(int64_t segment) const {
  const MemoryRegion& region = segments_[segment];
  const int64_t count = first_of(segment + 1) - first_of(segment);
  const int64_t available = available_bytes();
  if (available >= 0 && static_cast<int64_t>(region.bytes) > available) {
    throw_no_memory(count, piece_bytes_, "that is more than is free", ENOMEM);
  }
  const int error = populate(region.data, region.bytes);
  if (error != 0) throw_no_memory(count, piece_bytes_, strerror(error), error);
}

}  // namespace torch_mesh
