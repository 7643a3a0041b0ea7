// Reads from NVMe behind one interface, whatever carries them out.
//
// A Reader owns one I/O thread. It cuts requests into chunks, keeps a bounded number of them under
// way, takes demand chunks before those of a window and both before prefetch chunks, continues
// short reads, repeats what is worth repeating and reports each request exactly once. What differs
// between io_uring and a pool of preadv threads is only the Backend that carries out one chunk.
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

#include "io/urgency.h"
#include "store/extent.h"
#include "store/source.h"

namespace torch_mesh {

// One contiguous read. With direct I/O file offset, bytes and memory are multiples of the reader's
// alignment(), so a piece is the aligned superset of what is wanted; `needed` is how many of its
// bytes must be there (the last block of a file may end early).
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
};

struct ReadResult {
  uint64_t tag = 0;
  int error = 0;  // or an errno; ENODATA: the file ended before `needed` bytes
  int32_t file = 0;
  int64_t offset = 0;                                // where it failed
  std::chrono::steady_clock::time_point begun = {};  // its first chunk; unset: never
  std::chrono::steady_clock::time_point ended = {};  // its last one
};

struct MemoryRegion {
  std::byte* data;
  size_t bytes;
};

class Backend;
class FileTable;

// Puts something between a reader and its backend.
using Interpose = std::function<std::unique_ptr<Backend>(std::unique_ptr<Backend>,
                                                         std::shared_ptr<const FileTable>)>;

struct ReaderOptions {
  std::string backend = "auto";  // uring where it works, else threads; "uring"; "threads"
  int32_t depth = 16;            // chunks under way
  int64_t chunk_bytes = 1 << 20;
  int32_t threads = 8;            // of the "threads" backend
  int32_t retries = 3;            // repeats of a chunk that failed with EIO
  bool direct = true;             // O_DIRECT where the file system allows it; else see FileTable
  Interpose interpose = nullptr;  // for tests
};

// A prefetch begins where fewer bytes than these and less than a quarter of the depth are under
// way. Two MiB keep a disk of 7 GB/s busy, and delay what is needed next by little.
inline constexpr int64_t kMaxBytesBesidePrefetch = 2 << 20;

struct ReaderStats {
  int64_t requests;
  int64_t chunks;
  int64_t bytes;
  int64_t short_reads;
  int64_t retries;
};

class Reader {
 public:
  // Called on the I/O thread, once per request, in order of completion. Must not throw. It may call
  // submit(), raise_priority() and flush().
  using Done = std::function<void(const ReadResult&)>;

  virtual ~Reader() = default;  // lets what is under way complete, drops what was not started

  // From any thread; never waits for the disk, and begins with flush(). All requests or, when it
  // throws, none: Error(kClosed) after close().
  virtual void submit(std::span<const ReadRequest> requests) = 0;
  // The read `tag` becomes a demand read with flush(). Unknown tags are ignored.
  virtual void raise_priority(uint64_t tag) = 0;
  // Wakes the I/O thread if it sleeps and there is something to do: a system call, for which a
  // caller had better hold no lock.
  virtual void flush() = 0;
  // Memory that requests read into has come, or goes: a ring that pins its buffers lets go of the
  // pages, which nothing else could take away. Carried out on the I/O thread, which then calls
  // `then`, once; as `Done`, it must not throw. Nothing may be under way into the buffer. Throws
  // Error(kClosed) after close().
  using Then = std::function<void()>;
  virtual void register_buffer(const MemoryRegion& buffer, Then then) = 0;
  virtual void unregister_buffer(const MemoryRegion& buffer, Then then) = 0;
  // Refuses new requests, reports what was not started as ECANCELED, waits for what is under way.
  virtual void close() = 0;

  // Whether files are read through the page cache, which may then hold what the pool does not.
  virtual bool buffered() const = 0;
  // Of such files: the page cache reads this ahead, with flush(). Advice, which may be lost.
  virtual void will_need(const Extent& extent) = 0;
  // The page cache drops this, so that the next read is one of the disk.
  virtual void forget(const Extent& extent) = 0;

  virtual ReaderStats stats() const = 0;
  virtual const char* backend() const = 0;             // "uring", "threads", "shared"
  virtual int64_t alignment() const = 0;               // of offsets, lengths and memory, in bytes
  virtual std::vector<std::string> notes() const = 0;  // what was tried and fell back, in words
};

// `buffers` is memory that requests will read into; registered with io_uring where the memlock
// limit allows it. Throws Error(kRead) for a file that cannot be opened, Error(kInvalid) for a
// backend that is unknown or cannot work here (the message says why: seccomp, sysctl, not built
// in).
std::unique_ptr<Reader> open_reader(const ReaderOptions& options, std::span<const File> files,
                                    std::span<const MemoryRegion> buffers, Reader::Done done);

// Requests carried out by `backend`, whose chunks are options.chunk_bytes. `files` has those that
// requests name.
std::unique_ptr<Reader> open_reader_over(std::unique_ptr<Backend> backend,
                                         const ReaderOptions& options,
                                         std::shared_ptr<const FileTable> files, Reader::Done done);

// What O_DIRECT on this file wants offsets, lengths and memory to be multiples of; 0 if the file
// system does not say, -1 if it refuses O_DIRECT. Throws Error(kRead) for a file that cannot be
// opened.
int64_t direct_io_alignment(const std::string& path);

// Why io_uring cannot be used in this process, or "" if it can. Probes by setting a ring up.
std::string uring_unavailable();

}  // namespace torch_mesh
