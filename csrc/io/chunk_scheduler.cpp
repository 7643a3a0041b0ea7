#include "io/chunk_scheduler.h"

#include <algorithm>
#include <cassert>
#include <cerrno>
#include <chrono>
#include <cmath>
#include <limits>
#include <utility>

namespace torch_mesh {

namespace {

int32_t index_of(uint64_t tag) { return static_cast<int32_t>(tag & UINT32_MAX); }

// Tags that fit before the tables grow: most pools have fewer slots, and tables fewer reads.
constexpr size_t kReservedRequests = 4096;
// Limits of attempts in a row without progress. A kernel that keeps saying EAGAIN, or a file cut
// off within a block, must end in an error and not in a loop.
constexpr int32_t kMaxInterruptions = 1000;
constexpr int32_t kMaxShortStalls = 8;
// The most that is under way on each of several drives; the rest waits for the one that is free
// first. 3 MiB keep a drive of 14 GB/s busy for 0.2 ms.
constexpr int64_t kMaxBytesOfSeveral = 3 << 20;
// The speed of a drive is that of about its last this many seconds of reading.
constexpr double kSpeedSeconds = 0.2;
// After so many chunks of other drives a slow drive is tried again.
constexpr int32_t kForgetSpeedAfter = 256;

}  // namespace

ChunkScheduler::ChunkScheduler(int32_t depth, int64_t chunk_bytes, int64_t alignment,
                               int32_t retries, int64_t max_bytes_under_way, FileCopies copies,
                               Now now)
    : chunk_bytes_(chunk_bytes),
      alignment_(alignment),
      retries_(retries),
      max_bytes_under_way_(copies.drives() > 1 ? std::min(max_bytes_under_way, kMaxBytesOfSeveral)
                                               : max_bytes_under_way),
      copies_(std::move(copies)),
      now_(now),
      drives_(copies_.drives()) {
  assert(depth > 0 && chunk_bytes > 0 && chunk_bytes % alignment == 0);
  requests_.reserve(kReservedRequests);
  links_.resize(kReservedRequests);
  chunks_.resize(depth);
  for (int32_t chunk = depth - 1; chunk >= 0; --chunk) free_chunks_.push_back(chunk);
}

void ChunkScheduler::add(const ReadRequest& read) {
  assert(read.pieces >= 1 && read.pieces <= kMaxPieces);
  const int32_t index = index_of(read.tag);
  if (index >= std::ssize(requests_)) {
    links_.resize(index + 1);
    requests_.resize(static_cast<size_t>(index) + 1);
  }
  assert(requests_[index].state == RequestState::kFree);
  requests_[index] = {.read = read, .state = RequestState::kQueued, .result = {.tag = read.tag}};
  queue_of(read.urgency).push_back(index);
  ++live_;
  if (canceled_) fail_uncut(index, ECANCELED);
}

void ChunkScheduler::raise_priority(uint64_t tag) {
  if (static_cast<uint32_t>(tag) >= requests_.size()) return;
  const int32_t index = index_of(tag);
  Request& request = requests_[index];
  const bool waits = request.state == RequestState::kQueued || request.state == RequestState::kCut;
  if (!waits || request.read.tag != tag || request.read.urgency == Urgency::kDemand) return;
  if (request.state == RequestState::kQueued) {
    queue_of(request.read.urgency).erase(index);
    queue_of(Urgency::kDemand).push_back(index);
  }
  request.read.urgency = Urgency::kDemand;
}

void ChunkScheduler::cancel() {
  canceled_ = true;
  for (const Chunk& chunk : chunks_) {
    if (chunk.state == ChunkState::kReady) fail(chunk, ECANCELED);
  }
  for (const IndexList& queue : queued_) {
    while (!queue.empty()) fail_uncut(queue.front(), ECANCELED);
  }
}

std::optional<ChunkRead> ChunkScheduler::next() {
  estimate_paces();
  for (const Urgency urgency : kUrgencies) {
    for (int32_t index = 0; ready_ > 0 && index < std::ssize(chunks_); ++index) {
      const Chunk& chunk = chunks_[index];
      if (chunk.state != ChunkState::kReady) continue;
      if (requests_[chunk.request].read.urgency != urgency) continue;
      const int32_t drive = drive_for(chunk, urgency);
      if (drive >= 0) return start(index, drive);
    }
    if (free_chunks_.empty() || !any_room(urgency)) continue;
    const IndexList& queue = queue_of(urgency);
    for (int32_t request = queue.front(); request >= 0; request = queue.next(request)) {
      const int32_t drive = drive_for(next_chunk(request), urgency);
      if (drive >= 0) return start(cut(request), drive);
    }
  }
  return std::nullopt;
}

int32_t ChunkScheduler::drive_for(const Chunk& chunk, Urgency urgency) const {
  // Until it has read what is under way and this chunk.
  const auto time_of = [&](int32_t drive) {
    const int64_t bytes = drives_[drive].bytes + chunk.bytes - chunk.resume;
    return drives_[drive].pace * static_cast<double>(bytes) + drives_[drive].late;
  };
  int32_t best = -1;
  const auto better = [&](int32_t drive) {
    if (best < 0) return true;
    const bool failed = (chunk.failed_on >> drive & 1) != 0;
    const bool best_failed = (chunk.failed_on >> best & 1) != 0;
    return failed != best_failed ? best_failed : time_of(drive) < time_of(best);
  };
  for (int32_t drive = 0; drive < copies_.drives(); ++drive) {
    const bool lost = (chunk.lost_on >> drive & 1) != 0;
    if (!lost && is_on(chunk, drive) && better(drive)) best = drive;
  }
  return best >= 0 && room(best, urgency) ? best : -1;
}

void ChunkScheduler::estimate_paces() {
  if (drives_.size() == 1) return;
  double fastest = std::numeric_limits<double>::infinity();
  for (Drive& drive : drives_) {
    drive.pace = drive.seconds / std::max(drive.bytes_read, 1.0);
    if (drive.seconds > 0) fastest = std::min(fastest, drive.pace);
  }
  if (std::isinf(fastest)) fastest = 1;
  const Time now = now_();
  for (Drive& drive : drives_) {
    // A drive whose speed is not known counts as twice as fast as the fastest, so that it is tried.
    if (drive.seconds == 0) drive.pace = fastest / 2;
    // One that no longer answers would keep its speed, and reads would wait for it instead of going
    // to others. So it is expected to need as long again as it is overdue.
    const double waited = std::chrono::duration<double>(now - drive.counted_until).count();
    const double expected = drive.pace * static_cast<double>(drive.bytes);
    drive.late = drive.chunks == 0 ? 0 : std::max(0.0, waited - expected);
  }
}

void ChunkScheduler::count_begun(const Chunk& chunk) {
  if (drives_.size() == 1) return;
  for (int32_t index = 0; index < copies_.drives(); ++index) {
    Drive& drive = drives_[index];
    if (!is_on(chunk, index) || ++drive.passed_over <= kForgetSpeedAfter) continue;
    drive.seconds = drive.bytes_read = 0;
    drive.passed_over = 0;
  }
  Drive& own = drives_[chunk.drive];
  own.passed_over = 0;
  if (own.chunks == 0) own.counted_until = now_();
}

void ChunkScheduler::count_read(Drive& drive, int64_t bytes) {
  if (drives_.size() == 1) return;
  const Time now = now_();
  drive.seconds += std::chrono::duration<double>(now - drive.counted_until).count();
  drive.counted_until = now;
  drive.bytes_read += static_cast<double>(bytes);
  if (drive.seconds < kSpeedSeconds) return;
  drive.seconds /= 2;
  drive.bytes_read /= 2;
}

bool ChunkScheduler::any_room(Urgency urgency) const {
  for (int32_t drive = 0; drive < copies_.drives(); ++drive) {
    if (room(drive, urgency)) return true;
  }
  return false;
}

bool ChunkScheduler::room(int32_t drive, Urgency urgency) const {
  const Drive& load = drives_[drive];
  const int32_t depth = std::max(1, static_cast<int32_t>(chunks_.size()) / copies_.drives());
  if (urgency != Urgency::kPrefetch) {
    return load.chunks < depth && load.bytes < max_bytes_under_way_;
  }
  return load.chunks < std::max(1, depth / 4) &&
         load.bytes < std::min(max_bytes_under_way_, kMaxBytesBesidePrefetch);
}

// Moves on to the next byte that is needed; false when there is none.
bool ChunkScheduler::skip_to_needed(Request& request) const {
  while (request.cut_piece < request.read.pieces &&
         request.cut_offset >= request.read.piece[request.cut_piece].needed) {
    ++request.cut_piece;
    request.cut_offset = 0;
  }
  return request.cut_piece < request.read.pieces;
}

ChunkScheduler::Chunk ChunkScheduler::next_chunk(int32_t owner) const {
  const Request& request = requests_[owner];
  // A request with nothing left to cut has left the queue.
  const Piece& piece = request.read.piece[request.cut_piece];
  const int64_t bytes = std::min(chunk_bytes_, piece.from.bytes - request.cut_offset);
  return {.state = ChunkState::kReady,
          .request = owner,
          .file = piece.from.file,
          .offset = piece.from.offset + request.cut_offset,
          .bytes = bytes,
          .needed = std::min(bytes, piece.needed - request.cut_offset),
          .to = piece.to + request.cut_offset};
}

int32_t ChunkScheduler::cut(int32_t owner) {
  Request& request = requests_[owner];
  const int32_t index = free_chunks_.back();
  free_chunks_.pop_back();
  chunks_[index] = next_chunk(owner);
  ++ready_;
  ++request.chunks;
  request.cut_offset += chunks_[index].bytes;
  if (!skip_to_needed(request)) {
    queue_of(request.read.urgency).erase(owner);
    request.state = RequestState::kCut;
  }
  return index;
}

ChunkRead ChunkScheduler::start(int32_t index, int32_t drive) {
  Chunk& chunk = chunks_[index];
  assert(chunk.state == ChunkState::kReady);
  chunk.state = ChunkState::kUnderWay;
  --ready_;
  ReadResult& result = requests_[chunk.request].result;
  if (result.begun == std::chrono::steady_clock::time_point{}) {
    result.begun = now_();
  }
  chunk.drive = drive;
  count_begun(chunk);
  drives_[drive].bytes += chunk.bytes - chunk.resume;
  ++drives_[drive].chunks;
  return ChunkRead{.chunk = index,
                   .file = chunk.file,
                   .offset = chunk.offset + chunk.resume,
                   .bytes = chunk.bytes - chunk.resume,
                   .to = chunk.to + chunk.resume,
                   .descriptor = copies_.descriptor(chunk.file, drive)};
}

void ChunkScheduler::complete(int32_t index, int64_t result, bool final) {
  Chunk& chunk = chunks_[index];
  assert(chunk.state == ChunkState::kUnderWay);
  chunk.state = ChunkState::kReady;
  ++ready_;
  Drive& drive = drives_[chunk.drive];
  count_read(drive, std::max<int64_t>(0, result));
  drive.bytes -= chunk.bytes - chunk.resume;
  --drive.chunks;
  const int error = result >= 0 ? advance(chunk, result) : error_of(chunk, result, final);
  Request& request = requests_[chunk.request];
  if (result > 0) request.result.drives |= 1U << chunk.drive;
  if (result >= 0 && chunk.landed >= chunk.needed) {
    release(index);
    finish_if_complete(chunk.request);
  } else if (error != 0 || canceled_ || request.result.error != 0) {
    fail(chunk, error != 0 ? error : ECANCELED);
  }  // else next() will find it
}

int ChunkScheduler::error_of(Chunk& chunk, int64_t result, bool final) const {
  const int error = static_cast<int>(-result);
  if (final) return error;
  if (may_repeat(chunk, fault_of(error))) return 0;
  // To our callers ENODATA means the end of the file, and EBADMSG that the owner of a shared pool
  // has found a wrong checksum. The kernel's are a medium error and broken metadata.
  return error == ENODATA || error == EBADMSG ? EIO : error;
}

ChunkScheduler::Fault ChunkScheduler::fault_of(int error) {
  switch (error) {
    case EINTR:      // a signal came first
    case EAGAIN:     // the kernel ran out of something for a moment
    case EBUSY:      // likewise
    case ENOMEM:     // likewise; memory may come back
    case ECANCELED:  // the kernel dropped it, not this process
      return Fault::kInterruption;
    case EIO:        // the disk; the next attempt may be served by its own error correction
    case ENODATA:    // medium error, from the block layer
    case EREMOTEIO:  // target error
    case ETIMEDOUT:  // the device did not answer in time
    case ENOLINK:    // the path to it went away
    case EILSEQ:     // its protection information did not match
    case EBADMSG:    // the file system's own checksum is wrong
      return Fault::kDisk;
    default:  // EINVAL, EFAULT, EBADF, EISDIR, ESTALE …
      return Fault::kLasting;
  }
}

bool ChunkScheduler::may_repeat(Chunk& chunk, Fault fault) const {
  const uint32_t own = 1U << chunk.drive;
  if (fault == Fault::kLasting) chunk.lost_on |= own;
  chunk.failed_on |= own;
  if (is_on_other_than(chunk, chunk.failed_on)) return true;
  chunk.failed_on = own | chunk.lost_on;  // drives take turns
  if (!is_on_other_than(chunk, chunk.lost_on)) return false;
  return fault == Fault::kInterruption ? ++chunk.stalls <= kMaxInterruptions
                                       : ++chunk.retries <= retries_;
}

bool ChunkScheduler::is_on_other_than(const Chunk& chunk, uint32_t drives) const {
  for (int32_t drive = 0; drive < copies_.drives(); ++drive) {
    if (is_on(chunk, drive) && (drives >> drive & 1) == 0) return true;
  }
  return false;
}

bool ChunkScheduler::is_on(const Chunk& chunk, int32_t drive) const {
  if (requests_[chunk.request].read.original) return drive == 0;
  return copies_.descriptor(chunk.file, drive) >= 0;
}

int ChunkScheduler::advance(Chunk& chunk, int64_t bytes) const {
  assert(bytes <= chunk.bytes - chunk.resume);
  const int64_t landed = chunk.resume + bytes;
  chunk.stalls = landed > chunk.landed ? 0 : chunk.stalls + 1;
  chunk.landed = std::max(chunk.landed, landed);
  if (chunk.landed >= chunk.needed) return 0;
  // Direct I/O cannot go on from the middle of a block, so that block is read again. If the file
  // ends within it, each attempt returns the same bytes.
  chunk.resume = chunk.landed / alignment_ * alignment_;
  const bool ended = bytes == 0 || chunk.stalls > kMaxShortStalls;
  return ended && !may_repeat(chunk, Fault::kLasting) ? ENODATA : 0;
}

void ChunkScheduler::fail(const Chunk& chunk, int error) {
  fail(chunk.request, error, chunk.file, chunk.drive, chunk.offset + chunk.landed);
}

void ChunkScheduler::fail_uncut(int32_t request, int error) {
  const Request& each = requests_[request];
  const Extent& rest = each.read.piece[each.cut_piece].from;
  fail(request, error, rest.file, 0, rest.offset + each.cut_offset);
}

void ChunkScheduler::fail(int32_t owner, int error, int32_t file, int32_t drive, int64_t offset) {
  Request& request = requests_[owner];
  ReadResult& result = request.result;
  if (result.error == 0) {
    result.error = error;
    result.file = file;
    result.drive = drive;
    result.offset = offset;
  }
  if (request.state == RequestState::kQueued) {
    queue_of(request.read.urgency).erase(owner);
    request.state = RequestState::kCut;
  }
  for (int32_t index = 0; index < std::ssize(chunks_); ++index) {
    const Chunk& chunk = chunks_[index];
    if (chunk.state == ChunkState::kReady && chunk.request == owner) release(index);
  }
  finish_if_complete(owner);
}

void ChunkScheduler::release(int32_t index) {
  Chunk& chunk = chunks_[index];
  assert(chunk.state == ChunkState::kReady);
  chunk.state = ChunkState::kFree;
  --ready_;
  free_chunks_.push_back(index);
  --requests_[chunk.request].chunks;
}

// A failed request is reported only when its last chunk has returned, since the caller may then
// reuse the buffer.
void ChunkScheduler::finish_if_complete(int32_t index) {
  Request& request = requests_[index];
  if (request.state != RequestState::kCut || request.chunks > 0) return;
  request.state = RequestState::kFinished;
  request.result.ended = now_();
  finished_.push_back(index);
}

std::optional<ReadResult> ChunkScheduler::take_finished() {
  if (finished_.empty()) return std::nullopt;
  const int32_t index = finished_.pop_front();
  requests_[index].state = RequestState::kFree;
  --live_;
  return requests_[index].result;
}

}  // namespace torch_mesh
