// The concept that carries out one chunk at a time. Everything a Reader promises (order, repeats,
// reports) stands above it, so a backend knows neither requests nor retries.
#pragma once

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

// `chunk` is below the depth that the backend was made with and names one chunk until it completes.
struct ChunkRead {
  int32_t chunk;
  int32_t file;
  int64_t offset;
  int64_t bytes;
  std::byte* to;
};

struct ChunkResult {
  int32_t chunk;
  int64_t result;  // bytes read, or a negative errno
};

// All members but wake() are called on the reader's I/O thread.
class Backend {
 public:
  // After stop(), or when start() threw: gives back what start() had taken by then.
  virtual ~Backend() = default;

  // Throws Error(kInvalid) when this backend cannot work here, with the reason.
  virtual void start() {}
  // Takes a chunk over without waiting for it. At most capacity() are under way at a time.
  virtual void submit(const ChunkRead& read) = 0;
  // Completed chunks, as many as fit into `results`. Returns early, perhaps with none, on wake()
  // and when the time is over.
  virtual int32_t wait(std::chrono::microseconds timeout, std::span<ChunkResult> results) = 0;
  // From any thread: ends the current wait(), or the next one if none is under way.
  virtual void wake() = 0;
  // Memory that reads may go into from now on (`attached`) or no more: a backend that pins memory
  // pins it, or lets go of it. Nothing may be under way into it. Must not throw: a note that there
  // is no memory for is lost.
  virtual void change_buffer(const MemoryRegion& buffer, bool attached) {
    (void)buffer, (void)attached;
  }
  // The reader closes, and waits for what is under way. A backend that waits for others, and not
  // for the kernel, ends it now. May be called again.
  virtual void cancel() {}
  // Gives everything back; nothing may be under way. May be called again.
  virtual void stop() {}

  virtual const char* name() const = 0;
  virtual int32_t capacity() const = 0;
  // What was tried and fell back from, in words.
  virtual std::vector<std::string> notes() const { return {}; }
};

std::unique_ptr<Backend> make_threads_backend(std::shared_ptr<const FileTable> files,
                                              int32_t threads, int32_t depth);

std::unique_ptr<Backend> make_uring_backend(std::shared_ptr<const FileTable> files,
                                            std::span<const MemoryRegion> buffers, int32_t depth);

}  // namespace torch_mesh
