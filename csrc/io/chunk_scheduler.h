// The scheduling of a reader, as plain data: requests in, chunks out, completions in, reports out.
// It has no threads and makes no system calls, so that a test can try every order of events. It
// reads the clock only for the times in reports.
#pragma once

#include <array>
#include <cstdint>
#include <optional>
#include <vector>

#include "io/backend.h"
#include "io/index_list.h"
#include "io/reader.h"

namespace torch_mesh {

class ChunkScheduler {
 public:
  ChunkScheduler(int32_t depth, int64_t chunk_bytes, int64_t alignment, int32_t retries,
                 int64_t max_bytes_under_way);

  void add(const ReadRequest& request);  // std::bad_alloc changes nothing
  void raise_priority(uint64_t tag);
  // Starts no more chunks. Requests that lack chunks finish with ECANCELED once those under way
  // have returned.
  void cancel();

  // The chunk to start now, in the order of Urgency; within one, repeats before new chunks, which
  // are first come, first served. None when `depth` chunks or the limit of bytes are under way, or
  // nothing that waits may start.
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
    int64_t landed = 0;   // bytes that are there, from the front
    int64_t resume = 0;   // where the next attempt starts: `landed`, aligned down
    int32_t retries = 0;  // after errors of the disk
    int32_t stalls = 0;   // attempts in a row without progress
  };
  IndexList& queue_of(Urgency urgency) { return queued_[static_cast<size_t>(urgency)]; }

  // Whether a prefetch chunk may start. A chunk under way cannot be overtaken, and shares the disk
  // with those that begin after it. So a prefetch begins only beside the last demand reads, which
  // it slows down little. Few are under way at a time, so that they delay the next demand reads
  // little.
  bool room_for_prefetch() const;
  int32_t under_way() const;
  int32_t ready_chunk(Urgency urgency) const;
  int32_t cut(Urgency urgency);
  bool skip_to_needed(Request& request) const;
  ChunkRead start(int32_t chunk);
  void advance(int32_t chunk, int64_t bytes);
  bool may_repeat(Chunk& chunk, int error) const;
  bool unwanted(const Chunk& chunk) const;
  void fail(int32_t chunk, int error);
  void release(int32_t chunk);
  void stop_cutting(int32_t request);
  static void record_error(Request& request, int error, int32_t file, int64_t offset);
  void finish_if_complete(int32_t request);

  const int64_t chunk_bytes_;
  const int64_t alignment_;
  const int32_t retries_;
  const int64_t max_bytes_under_way_;
  bool canceled_ = false;

  std::vector<Request> requests_;  // by the low bits of tags
  std::vector<Chunk> chunks_;      // `depth` of them, never more
  std::vector<int32_t> free_chunks_;
  IndexLinks links_{0};
  std::array<IndexList, kUrgencies.size()> queued_{IndexList(links_), IndexList(links_),
                                                   IndexList(links_)};  // by urgency
  IndexList finished_{links_};
  int32_t ready_ = 0;
  int64_t bytes_under_way_ = 0;
  int64_t live_ = 0;
};

}  // namespace torch_mesh
