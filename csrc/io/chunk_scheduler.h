// The scheduling of a reader, as plain data: requests in, chunks out, completions in, reports out.
// It has no threads and makes no system calls, so that a test can try every order of events. It
// reads the clock for the times in reports, and for the speeds of several drives.
#pragma once

#include <array>
#include <chrono>
#include <cstdint>
#include <optional>
#include <vector>

#include "io/backend.h"
#include "io/file_table.h"
#include "io/index_list.h"
#include "io/reader.h"

namespace torch_mesh {

class ChunkScheduler {
 public:
  using Time = std::chrono::steady_clock::time_point;
  using Now = Time (*)();

  ChunkScheduler(int32_t depth, int64_t chunk_bytes, int64_t alignment, int32_t retries,
                 int64_t max_bytes_under_way, FileCopies copies = {},
                 Now now = &std::chrono::steady_clock::now);

  void add(const ReadRequest& request);  // std::bad_alloc changes nothing
  void raise_priority(uint64_t tag);
  // Starts no more chunks. Requests that lack chunks finish with ECANCELED once those under way
  // have returned.
  void cancel();

  // The chunk to start now, in the order of Urgency; within one, repeats before new chunks, which
  // are first come, first served. It is read from the drive that will have read it first, of those
  // with its file, and after an error from one that has not failed; the original of a request from
  // the first drive alone. None when `depth` chunks are under way, or the limit of bytes on each
  // drive with something to read.
  std::optional<ChunkRead> next();
  // `result` and `final`: as in ChunkResult.
  void complete(int32_t chunk, int64_t result, bool final = false);
  // The next finished request, in order of completion.
  std::optional<ReadResult> take_finished();

  // Whether nothing waits, is under way or is left to be taken.
  bool idle() const { return live_ == 0; }

 private:
  enum class RequestState : uint8_t {
    kFree,
    kQueued,    // in the queue of its urgency, with bytes not cut into chunks yet
    kCut,       // all chunks cut, or no more to be cut; some have not returned
    kFinished,  // in the finished queue
  };
  enum class ChunkState : uint8_t {
    kFree,
    kReady,     // cut, to be started (again)
    kUnderWay,  // with the backend
  };
  struct Request {
    ReadRequest read;
    RequestState state = RequestState::kFree;
    ReadResult result;       // with its first error
    int32_t cut_piece = 0;   // the next bytes to cut
    int64_t cut_offset = 0;  // within that piece
    int32_t chunks = 0;      // cut and not returned
  };
  struct Chunk {
    ChunkState state;
    int32_t request;
    int32_t file;
    int64_t offset;
    int64_t bytes;
    int64_t needed;
    std::byte* to;
    int64_t landed = 0;      // bytes that are there, from the front
    int64_t resume = 0;      // where the next attempt starts: `landed`, aligned down
    int32_t drive = 0;       // of the last attempt
    uint32_t failed_on = 0;  // a bit for each drive to be avoided, since it has returned an error
    uint32_t lost_on = 0;    // a bit for each whose error would be the same again
    int32_t retries = 0;     // after errors of the disk
    int32_t stalls = 0;      // attempts in a row without progress
  };
  struct Drive {
    int64_t bytes = 0;  // under way
    int32_t chunks = 0;
    // Its speed while it reads, with more weight on recent reads. Counted for several drives alone.
    Time counted_until;
    double seconds = 0;
    double bytes_read = 0;
    int32_t passed_over = 0;  // chunks of other drives since its last one
    // As estimated last:
    double pace = 1;  // seconds a byte; the same of all drives while no speed is known
    double late = 0;  // seconds by which what is under way is overdue
  };
  IndexList& queue_of(Urgency urgency) { return queued_[static_cast<size_t>(urgency)]; }

  // The drive that will have read the chunk first, of those that have not failed, or else of all
  // but the lost ones. -1 if it has no room.
  int32_t drive_for(const Chunk& chunk, Urgency urgency) const;
  // For several drives.
  void estimate_paces();
  void count_begun(const Chunk& chunk);
  void count_read(Drive& drive, int64_t bytes);
  // Whether a chunk may start on `drive`. A chunk under way cannot be overtaken, and shares the
  // drive with those that begin after it. So a prefetch begins only beside the last demand reads,
  // which it slows down little. Few are under way at a time, so that they delay the next demand
  // reads little.
  bool room(int32_t drive, Urgency urgency) const;
  bool any_room(Urgency urgency) const;  // on some drive
  Chunk next_chunk(int32_t request) const;
  int32_t cut(int32_t request);
  bool skip_to_needed(Request& request) const;
  ChunkRead start(int32_t chunk, int32_t drive);
  // Counts bytes that have landed. Returns ENODATA where the file has ended, or 0.
  int advance(Chunk& chunk, int64_t bytes) const;
  // The error of an attempt with this result; 0 if the chunk is to be repeated.
  int error_of(Chunk& chunk, int64_t result, bool final) const;
  enum class Fault : uint8_t {
    kInterruption,
    kDisk,
    kLasting,  // the same again would fail the same way
  };
  static Fault fault_of(int error);
  // Notes a fault of the drive that it was read from. Whether it is worth another attempt: on a
  // drive that has not failed, or a limited number of times on those that may do better.
  bool may_repeat(Chunk& chunk, Fault fault) const;
  bool is_on_other_than(const Chunk& chunk, uint32_t drives) const;
  // Whether the chunk may be read from there: the drive has its file, or is the original's where
  // the request asks for that.
  bool is_on(const Chunk& chunk, int32_t drive) const;
  void fail(const Chunk& chunk, int error);     // its request, there
  void fail_uncut(int32_t request, int error);  // at the first byte that is not cut
  // The first error of a request is the one that it ends with. Drops all of it that is not under
  // way.
  void fail(int32_t request, int error, int32_t file, int32_t drive, int64_t offset);
  void release(int32_t chunk);
  void finish_if_complete(int32_t request);

  const int64_t chunk_bytes_;
  const int64_t alignment_;
  const int32_t retries_;
  const int64_t max_bytes_under_way_;  // of a drive
  const FileCopies copies_;
  const Now now_;
  bool canceled_ = false;

  std::vector<Request> requests_;  // by the low bits of tags
  std::vector<Chunk> chunks_;      // `depth` of them, never more
  std::vector<int32_t> free_chunks_;
  IndexLinks links_{0};
  std::array<IndexList, kUrgencies.size()> queued_{IndexList(links_), IndexList(links_),
                                                   IndexList(links_)};  // by urgency
  IndexList finished_{links_};
  int32_t ready_ = 0;
  std::vector<Drive> drives_;
  int64_t live_ = 0;
};

}  // namespace torch_mesh
