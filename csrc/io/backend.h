// A backend carries out the reads of chunks. All that a Reader promises (order, repeats, reports)
// is above it, so a backend knows neither requests nor retries.
#pragma once

#include <algorithm>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "io/file_table.h"
#include "io/reader.h"

namespace torch_mesh {

// `chunk` names a chunk until it completes; it is below the depth that the backend was made with.
struct ChunkRead {
  int32_t chunk;
  int32_t file;
  int64_t offset;
  int64_t bytes;
  std::byte* to;
  int32_t descriptor;  // index in FileTable::descriptors()
};

struct ChunkResult {
  int32_t chunk;
  int64_t result;      // bytes read, or a negative errno
  bool final = false;  // an error that another process has repeated and named already
};

// Moves the first of `ended` to `results`, as many as fit, and returns how many.
inline int32_t take(std::vector<ChunkResult>& ended, std::span<ChunkResult> results) {
  const auto count = std::min(std::ssize(ended), std::ssize(results));
  std::copy_n(ended.begin(), count, results.begin());
  ended.erase(ended.begin(), ended.begin() + count);
  return static_cast<int32_t>(count);
}

// All members but wake(), name() and capacity() are called on the reader's I/O thread.
class Backend {
 public:
  // Called after stop(), or when start() threw: gives back what start() had taken by then.
  virtual ~Backend() = default;

  // Throws Error(kInvalid) when this backend cannot work here, with the reason.
  virtual void start() {}
  // Begins the read of a chunk, without waiting for it. At most capacity() are under way at a time.
  virtual void submit(const ChunkRead& read) = 0;
  // Waits for completed chunks, as many as fit into `results`, and returns how many. Returns early,
  // perhaps with none, on wake() and when the time is over.
  virtual int32_t wait(std::chrono::microseconds timeout, std::span<ChunkResult> results) = 0;
  // From any thread: ends the current wait(), or the next one if none is under way.
  virtual void wake() = 0;
  // Reads may go into this memory from now on (`attached`), or no more: a backend that pins memory
  // pins or unpins it. No read into it may be under way. Must not throw: a note is lost if there is
  // no memory for it.
  virtual void change_buffer(const MemoryRegion& buffer, bool attached) {
    (void)buffer, (void)attached;
  }
  // The reader closes, and waits for the reads under way. A backend whose reads wait for another
  // process ends them now. May be called again.
  virtual void cancel() {}
  // Gives everything back; no read may be under way. May be called again.
  virtual void stop() {}

  virtual const char* name() const = 0;
  virtual int32_t capacity() const = 0;
  // Messages about fallbacks: what was tried and could not be used.
  virtual std::vector<std::string> notes() const { return {}; }
};

std::unique_ptr<Backend> make_threads_backend(std::shared_ptr<const FileTable> files,
                                              int32_t threads, int32_t depth);

std::unique_ptr<Backend> make_uring_backend(std::shared_ptr<const FileTable> files,
                                            std::span<const MemoryRegion> buffers, int32_t depth);

}  // namespace torch_mesh
