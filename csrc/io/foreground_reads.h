// Reads that the thread which waits for them carries out itself, by a ring of its own.
//
// A few small reads take one latency of the disk, 70 to 200 us, to which waking the I/O thread of a
// Reader and being woken by it add 7 to 22. Requests, chunks, repeats and reports are a Reader's.
#pragma once

#include <chrono>
#include <memory>
#include <span>
#include <vector>

#include "base/owner_process.h"
#include "io/backend.h"
#include "io/chunk_scheduler.h"
#include "io/file_table.h"
#include "io/reader.h"

namespace torch_mesh {

class ForegroundReads {
 public:
  static constexpr size_t kMaxRequests = 64;

  // `files` are those of a Reader. Throws Error(kInvalid) where there is no ring.
  ForegroundReads(const ReaderOptions& options, std::shared_ptr<const FileTable> files,
                  Reader::Done done);
  ~ForegroundReads();  // drops what was not started, waits for what is under way
  ForegroundReads(const ForegroundReads&) = delete;
  ForegroundReads& operator=(const ForegroundReads&) = delete;

  // One thread at a time uses these; any thread may be the next. At most kMaxRequests have not been
  // reported. Valid requests only: a Reader would check them.
  void submit(std::span<const ReadRequest> requests);
  // Until something was reported or the time has come. Reports on this thread.
  void wait(std::chrono::steady_clock::time_point until);
  bool idle() const { return scheduler_.idle(); }  // all has been reported

 private:
  bool report_finished();

  const OwnerProcess owner_;
  std::unique_ptr<Backend> backend_;
  const Reader::Done done_;
  ChunkScheduler scheduler_;
  std::vector<ChunkResult> results_;
};

}  // namespace torch_mesh
