#include "io/chunk_scheduler.h"

#include <algorithm>
#include <cassert>
#include <cerrno>
#include <chrono>

namespace torch_mesh {

namespace {

int32_t index_of(uint64_t tag) { return static_cast<int32_t>(tag & UINT32_MAX); }

// Tags that fit before the tables grow: most pools have fewer slots, and tables fewer reads.
constexpr size_t kReservedRequests = 4096;
// Limits of attempts in a row without progress. A kernel that keeps saying EAGAIN, or a file cut
// off within a block, must end in an error and not in a loop.
constexpr int32_t kMaxInterruptions = 1000;
constexpr int32_t kMaxShortStalls = 8;

}  // namespace

ChunkScheduler::ChunkScheduler(int32_t depth, int64_t chunk_bytes, int64_t alignment,
                               int32_t retries, int64_t max_bytes_under_way)
    : chunk_bytes_(chunk_bytes),
      alignment_(alignment),
      retries_(retries),
      max_bytes_under_way_(max_bytes_under_way) {
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
  if (canceled_) {
    stop_cutting(index);
    finish_if_complete(index);
  }
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
  for (size_t index = 0; index < chunks_.size(); ++index) {
    if (chunks_[index].state == ChunkState::kReady) fail(static_cast<int32_t>(index), ECANCELED);
  }
  for (const IndexList& queue : queued_) {
    while (!queue.empty()) {
      const int32_t request = queue.front();
      stop_cutting(request);
      finish_if_complete(request);
    }
  }
}

std::optional<ChunkRead> ChunkScheduler::next() {
  if (bytes_under_way_ >= max_bytes_under_way_) return std::nullopt;
  for (const Urgency urgency : kUrgencies) {
    if (urgency == Urgency::kPrefetch && !room_for_prefetch()) break;
    int32_t chunk;
    // Another chunk of the request may have failed while this one waited to be repeated.
    while ((chunk = ready_chunk(urgency)) >= 0 && unwanted(chunks_[chunk])) fail(chunk, ECANCELED);
    if (chunk < 0) chunk = cut(urgency);
    if (chunk >= 0) return start(chunk);
  }
  return std::nullopt;
}

bool ChunkScheduler::room_for_prefetch() const {
  return under_way() < std::max(1, static_cast<int32_t>(chunks_.size()) / 4) &&
         bytes_under_way_ < kMaxBytesBesidePrefetch;
}

int32_t ChunkScheduler::under_way() const {
  return static_cast<int32_t>(chunks_.size() - free_chunks_.size()) - ready_;
}

int32_t ChunkScheduler::ready_chunk(Urgency urgency) const {
  if (ready_ == 0) return -1;
  for (size_t index = 0; index < chunks_.size(); ++index) {
    const Chunk& chunk = chunks_[index];
    if (chunk.state == ChunkState::kReady && requests_[chunk.request].read.urgency == urgency) {
      return static_cast<int32_t>(index);
    }
  }
  return -1;
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

int32_t ChunkScheduler::cut(Urgency urgency) {
  IndexList& queue = queue_of(urgency);
  if (free_chunks_.empty() || queue.empty()) return -1;
  const int32_t owner = queue.front();
  Request& request = requests_[owner];
  // A request with nothing left to cut has left the queue.
  const Piece& piece = request.read.piece[request.cut_piece];
  const int32_t index = free_chunks_.back();
  free_chunks_.pop_back();
  const int64_t bytes = std::min(chunk_bytes_, piece.from.bytes - request.cut_offset);
  chunks_[index] = Chunk{.state = ChunkState::kReady,
                         .request = owner,
                         .file = piece.from.file,
                         .offset = piece.from.offset + request.cut_offset,
                         .bytes = bytes,
                         .needed = std::min(bytes, piece.needed - request.cut_offset),
                         .to = piece.to + request.cut_offset};
  ++ready_;
  ++request.chunks;
  request.cut_offset += bytes;
  if (!skip_to_needed(request)) {
    queue.erase(owner);
    request.state = RequestState::kCut;
  }
  return index;
}

ChunkRead ChunkScheduler::start(int32_t index) {
  Chunk& chunk = chunks_[index];
  assert(chunk.state == ChunkState::kReady);
  chunk.state = ChunkState::kUnderWay;
  --ready_;
  ReadResult& result = requests_[chunk.request].result;
  if (result.begun == std::chrono::steady_clock::time_point{}) {
    result.begun = std::chrono::steady_clock::now();
  }
  bytes_under_way_ += chunk.bytes - chunk.resume;
  return ChunkRead{.chunk = index,
                   .file = chunk.file,
                   .offset = chunk.offset + chunk.resume,
                   .bytes = chunk.bytes - chunk.resume,
                   .to = chunk.to + chunk.resume};
}

void ChunkScheduler::complete(int32_t index, int64_t result, bool final) {
  Chunk& chunk = chunks_[index];
  assert(chunk.state == ChunkState::kUnderWay);
  chunk.state = ChunkState::kReady;
  ++ready_;
  bytes_under_way_ -= chunk.bytes - chunk.resume;
  if (result >= 0) {
    advance(index, result);
    return;
  }
  const int error = static_cast<int>(-result);
  if (!final && may_repeat(chunk, error)) {  // it is ready already, and next() will find it
    if (unwanted(chunk)) fail(index, ECANCELED);
  } else {
    // The block layer reports a medium error as ENODATA, which to our callers means the end of the
    // file.
    fail(index, error == ENODATA && !final ? EIO : error);
  }
}

bool ChunkScheduler::may_repeat(Chunk& chunk, int error) const {
  switch (error) {
    case EINTR:      // a signal came first
    case EAGAIN:     // the kernel ran out of something for a moment
    case EBUSY:      // likewise
    case ENOMEM:     // likewise; memory may come back
    case ECANCELED:  // the kernel dropped it, not this process
      return ++chunk.stalls <= kMaxInterruptions;
    case EIO:        // the disk; the next attempt may be served by its own error correction
    case ENODATA:    // medium error, from the block layer
    case EREMOTEIO:  // target error
    case ETIMEDOUT:  // the device did not answer in time
    case ENOLINK:    // the path to it went away
    case EILSEQ:     // its protection information did not match
      return ++chunk.retries <= retries_;
    default:  // EINVAL, EFAULT, EBADF, EISDIR, ESTALE …: the same again would fail the same way
      return false;
  }
}

void ChunkScheduler::advance(int32_t index, int64_t bytes) {
  Chunk& chunk = chunks_[index];
  assert(bytes <= chunk.bytes - chunk.resume);
  const int64_t landed = chunk.resume + bytes;
  if (landed >= chunk.needed) {
    release(index);
    return;
  }
  const bool progress = landed > chunk.landed;
  chunk.landed = std::max(chunk.landed, landed);
  chunk.stalls = progress ? 0 : chunk.stalls + 1;
  // Direct I/O cannot go on from the middle of a block, so that block is read again. If the file
  // ends within it, each attempt returns the same bytes.
  chunk.resume = chunk.landed / alignment_ * alignment_;
  if (bytes == 0 || chunk.stalls > kMaxShortStalls) {
    fail(index, ENODATA);
  } else if (unwanted(chunk)) {
    fail(index, ECANCELED);
  }
}

bool ChunkScheduler::unwanted(const Chunk& chunk) const {
  return canceled_ || requests_[chunk.request].result.error != 0;
}

void ChunkScheduler::record_error(Request& request, int error, int32_t file, int64_t offset) {
  if (request.result.error != 0) return;
  request.result = {.tag = request.read.tag, .error = error, .file = file, .offset = offset};
}

void ChunkScheduler::fail(int32_t index, int error) {
  const Chunk& chunk = chunks_[index];
  Request& request = requests_[chunk.request];
  record_error(request, error, chunk.file, chunk.offset + chunk.landed);
  stop_cutting(chunk.request);
  release(index);
}

void ChunkScheduler::release(int32_t index) {
  Chunk& chunk = chunks_[index];
  assert(chunk.state == ChunkState::kReady);
  chunk.state = ChunkState::kFree;
  --ready_;
  free_chunks_.push_back(index);
  --requests_[chunk.request].chunks;
  finish_if_complete(chunk.request);
}

// Drops the bytes that are not cut into chunks yet: the request has failed or the reader closes.
void ChunkScheduler::stop_cutting(int32_t index) {
  Request& request = requests_[index];
  if (request.state != RequestState::kQueued) return;
  queue_of(request.read.urgency).erase(index);
  request.state = RequestState::kCut;
  const Extent& rest = request.read.piece[request.cut_piece].from;
  record_error(request, ECANCELED, rest.file, rest.offset + request.cut_offset);
}

// A failed request is reported only when its last chunk has returned, since the caller may then
// reuse the buffer.
void ChunkScheduler::finish_if_complete(int32_t index) {
  Request& request = requests_[index];
  if (request.state != RequestState::kCut || request.chunks > 0) return;
  request.state = RequestState::kFinished;
  request.result.ended = std::chrono::steady_clock::now();
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
