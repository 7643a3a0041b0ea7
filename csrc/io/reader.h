// Reads from NVMe, through one interface for all backends.
//
// A Reader owns one I/O thread. It cuts requests into chunks and keeps a bounded number of them
// under way: demand chunks first, then those of a window, then prefetch chunks. It continues short
// reads, repeats what is worth repeating and reports each request exactly once. io_uring and a pool
// of pread threads differ only in the Backend, which carries out one chunk.
#pragma once

#include <array>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "base/owner_process.h"
#include "io/urgency.h"
#include "store/extent.h"
#include "store/source.h"

namespace torch_mesh {

// One contiguous read. With direct I/O, file offset, bytes and memory are multiples of the reader's
// alignment(), so a piece is the aligned superset of the bytes wanted. `needed` is how many of its
// bytes must be there, since the last block of a file may end early.
struct Piece {
  Extent from;
  int64_t needed;
  std::byte* to;
};

// The low 32 bits of a tag are below this, and differ among the requests that have not been
// reported.
inline constexpr uint32_t kMaxTags = 1 << 28;

struct ReadRequest {
  uint64_t tag;
  Urgency urgency;
  int32_t pieces;
  std::array<Piece, kMaxPieces> piece;
  bool original = false;  // reads the files themselves and no copy of theirs
};

struct ReadResult {
  uint64_t tag = 0;
  int error = 0;      // 0 or an errno; ENODATA: the file ended before `needed` bytes
  int32_t file = 0;   // where it failed
  int32_t drive = 0;  // of those with a copy of the file
  int64_t offset = 0;
  uint32_t drives = 0;                               // a bit for each that bytes were read from
  std::chrono::steady_clock::time_point begun = {};  // its first chunk; unset: never
  std::chrono::steady_clock::time_point ended = {};  // its last one
};

struct MemoryRegion {
  std::byte* data;
  size_t bytes;
};

class Backend;
class FileTable;

// Puts another backend between a reader and its own.
using Interpose = std::function<std::unique_ptr<Backend>(std::unique_ptr<Backend>,
                                                         std::shared_ptr<const FileTable>)>;

struct ReaderOptions {
  std::string backend = "auto";  // uring where it works, else threads; "uring"; "threads"
  int32_t depth = 16;            // chunks under way for each drive
  int64_t chunk_bytes = 1 << 20;
  // No chunk begins while this many bytes are under way; of several drives, 3 MiB on each at most.
  // Reads under way together share the disk and end together, and all their records are computed
  // after the last. 6 MiB keep a disk of 28 GB/s busy for 0.2 ms, which is its latency; more only
  // delay the first record.
  int64_t max_bytes_under_way = 6 << 20;
  int32_t threads = 8;            // of the "threads" backend, for each drive
  int32_t retries = 3;            // repeats of a chunk after errors of the disk
  bool direct = true;             // O_DIRECT where the file system allows it; else see FileTable
  Interpose interpose = nullptr;  // for tests
};

// A prefetch chunk starts while fewer bytes than these, and fewer chunks than a quarter of the
// depth, are under way. 2 MiB keep a disk of 7 GB/s busy, and delay the next demand read little.
inline constexpr int64_t kMaxBytesBesidePrefetch = 2 << 20;

class Reader {
 public:
  // Called on the I/O thread, once per request, in order of completion. Must not throw. It may call
  // submit(), raise_priority() and flush().
  using Done = std::function<void(const ReadResult&)>;

  virtual ~Reader() = default;  // lets what is under way complete, drops what was not started

  // Queues the requests, whose reads begin with flush(). From any thread; never waits for the disk.
  // Queues all of them or, when it throws, none: Error(kClosed) after close().
  virtual void submit(std::span<const ReadRequest> requests) = 0;
  // Makes the read `tag` a demand read, with flush(). Unknown tags are ignored.
  virtual void raise_priority(uint64_t tag) = 0;
  // Wakes the I/O thread if it sleeps and there is something to do. This is a system call: callers
  // should hold no lock.
  virtual void flush() = 0;
  // Adds memory that requests read into (`attached`), or removes it. A ring pins the pages of its
  // buffers, so they can be freed only once the buffer is removed. Carried out on the I/O thread,
  // which this wakes and which then calls `then`, once; like `Done`, it must not throw. No read
  // into the buffer may be under way. Throws Error(kClosed) after close().
  using Then = std::function<void()>;
  virtual void change_buffer(const MemoryRegion& buffer, bool attached, Then then) = 0;
  // Refuses new requests, reports those not started as ECANCELED, and waits for reads under way.
  virtual void close() = 0;

  // Whether files are read through the page cache, which may then hold records that the pool does
  // not.
  virtual bool buffered() const = 0;
  // For such files: advises the page cache to read this ahead, with flush(). The advice may be
  // lost.
  virtual void will_need(const Extent& extent) = 0;
  // Drops this from the page cache, so that the next read is one of the disk.
  virtual void forget(const Extent& extent) = 0;

  virtual const char* backend() const = 0;             // "uring", "threads", "shared"
  virtual int64_t alignment() const = 0;               // of offsets, lengths and memory, in bytes
  virtual std::vector<std::string> notes() const = 0;  // messages about fallbacks
};

// Opens a reader. `buffers` is memory that requests will read into; it is registered with io_uring
// if the memlock limit allows it. Throws Error(kRead) for a file that cannot be opened,
// Error(kInvalid) for a backend that is unknown or cannot work here (the message says why: seccomp,
// sysctl, not built in).
Owned<Reader> open_reader(const ReaderOptions& options, std::span<const File> files,
                          std::span<const MemoryRegion> buffers, Reader::Done done);

// Opens a reader over `backend`, in chunks of options.chunk_bytes. `files` has the files that
// requests name; `buffered` and `notes` are what the reader says of itself.
Owned<Reader> open_reader_over(std::unique_ptr<Backend> backend, const ReaderOptions& options,
                               std::shared_ptr<const FileTable> files, Reader::Done done,
                               bool buffered, std::vector<std::string> notes);

// The alignment of offsets, lengths and memory that O_DIRECT asks for on this file; 0 if the file
// system does not say, -1 if it refuses O_DIRECT or asks for more than records are aligned to.
// Throws Error(kRead) for a file that cannot be opened.
int64_t direct_io_alignment(const std::string& path);

// Why io_uring cannot be used in this process, or "" if it can. Probes by setting a ring up.
std::string uring_unavailable();

}  // namespace torch_mesh
