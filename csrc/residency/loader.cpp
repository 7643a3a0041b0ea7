#include "residency/loader.h"

#include <pthread.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <exception>
#include <new>
#include <string>
#include <utility>

#include "base/read_error.h"
#include "base/start_thread.h"
#include "store/record.h"

namespace torch_mesh {
namespace {

// The part of a file that is read for an extent: whole blocks of the reader's alignment.
Extent aligned_superset(const Extent& extent, int64_t alignment) {
  const int64_t begin = extent.offset / alignment * alignment;
  return {extent.file, begin, round_up(extent.offset + extent.bytes, alignment) - begin};
}

int64_t bytes_of(const ReadRequest& request) {
  int64_t bytes = 0;
  for (int32_t piece = 0; piece < request.pieces; ++piece) bytes += request.piece[piece].from.bytes;
  return bytes;
}

uint64_t tag_of(int32_t slot, uint32_t generation) {
  return uint64_t{generation} << 32 | static_cast<uint32_t>(slot);
}

int32_t slot_of(uint64_t tag) { return static_cast<int32_t>(tag & UINT32_MAX); }

}  // namespace

int64_t staging_bytes(const Source& source) {
  if (!source.raw) return 0;
  int64_t largest = 0;
  for (size_t first = 0; first < source.extents.size(); first += source.pieces) {
    int64_t bytes = 0;
    for (int32_t piece = 0; piece < source.pieces; ++piece) {
      bytes += round_up(source.extents[first + piece].bytes, kRecordAlignment) + kRecordAlignment;
    }
    largest = std::max(largest, bytes);
  }
  return largest;
}

std::string describe(const Source& source, ExpertId id) {
  return concat("expert ", source.number_of(id), " of layer ", source.layer_of(id));
}

ErrorPlace error_place(const Source& source, ExpertId id) {
  const int32_t layer = source.layer_of(id), expert = source.number_of(id);
  if (source.extents.empty()) return {layer, expert, "", -1};
  const Extent& extent = source.extents_of(id)[0];
  return {layer, expert, source.files[extent.file].path, extent.offset};
}

Loader::Loader(const LoaderOptions& options, const Source& source, PackRecord pack,
               SlotMemory& memory, const Topology& topology, Done done)
    : options_(options),
      source_(source),
      pack_(std::move(pack)),
      memory_(memory),
      done_(std::move(done)),
      reads_(static_cast<size_t>(options.slots)),
      queue_links_(options.slots),
      queued_{IndexList(queue_links_), IndexList(queue_links_), IndexList(queue_links_)},
      checksums_(source.checksums.begin(), source.checksums.end()),
      to_finish_(queue_links_) {
  checksums_.resize(static_cast<size_t>(source.layers) * source.experts);
  to_submit_.reserve(static_cast<size_t>(options.slots));
  requests_.reserve(static_cast<size_t>(options.slots));
  refused_.reserve(static_cast<size_t>(options.slots));
  std::span<const MemoryRegion> staging;
  if (source.raw) {
    staging_.emplace(options.staging, torch_mesh::staging_bytes(source), topology);
    staging = staging_->segments();
    for (int32_t buffer = 0; buffer < options.staging; ++buffer) free_staging_.push_back(buffer);
  }
  reader_ = memory.open_reader(options.reader, source, staging,
                               [this](const ReadResult& result) { on_read(result); });
}

Loader::~Loader() { close(); }

void Loader::close() {
  reader_->close();
  if (!finisher_.joinable()) return;
  {
    const Lock lock(mutex_);
    finisher_closes_ = true;
  }
  to_finish_changed_.notify_one();
  finisher_.join();
}

void Loader::begin(const SlotTable& slots, std::span<const int32_t> reads) {
  const Lock lock(mutex_);
  for (const int32_t slot : reads) {
    Read& read = reads_[slot];
    read = {.state = Read::State::kQueued,
            .expert = slots[slot].expert,
            .generation = read.generation + 1};
    read.request.urgency = slots[slot].urgency;
    if (packs()) {
      queue_of(read.request.urgency).push_back(slot);
    } else {
      to_submit_.push_back(slot);
    }
  }
  begin_queued();
}

std::optional<Loader::Ended> Loader::take_refused() {
  const Lock lock(mutex_);
  if (refused_.empty()) return std::nullopt;
  Ended last = std::move(refused_.back());
  refused_.pop_back();
  return last;
}

// A refused read gives its staging buffer to the next in the queue.
void Loader::begin_queued() {
  for (take_staging(); !to_submit_.empty(); take_staging()) submit();
}

void Loader::take_staging() {
  for (const Urgency urgency : kUrgencies) {
    // The reader cannot put a demand read first that waits for a buffer: some are reserved for it.
    const int32_t reserved = urgency == Urgency::kPrefetch ? options_.staging / 2 : 0;
    IndexList& queue = queue_of(urgency);
    while (std::ssize(free_staging_) > reserved && !queue.empty()) {
      const int32_t slot = queue.pop_front();
      reads_[slot].staging = free_staging_.back();
      free_staging_.pop_back();
      to_submit_.push_back(slot);
    }
  }
}

void Loader::submit() {
  const std::optional<Error> error = caught([&] {
    for (int32_t slot : to_submit_) {
      fill_request(slot);
      requests_.push_back(reads_[slot].request);
    }
    reader_->submit(requests_);
    with_reader_ += static_cast<int32_t>(to_submit_.size());
    for (int32_t slot : to_submit_) reads_[slot].state = Read::State::kUnderWay;
  });
  if (error) {
    for (int32_t slot : to_submit_) {
      refused_.push_back({slot, reads_[slot].bytes, refusal(*error, reads_[slot].expert)});
      end(reads_[slot]);
    }
  }
  to_submit_.clear();
  requests_.clear();
}

void Loader::end(Read& read) {
  read.state = Read::State::kNone;
  if (read.staging >= 0) free_staging_.push_back(std::exchange(read.staging, -1));
}

Error Loader::refusal(const Error& error, ExpertId id) const {
  try {
    return Error(error.kind(), error.what(), error_place(source_, id), error.os_error());
  } catch (const std::bad_alloc&) {
    return kNoMemory;
  }
}

void Loader::fill_request(int32_t slot) {
  Read& read = reads_[slot];
  const std::span<const Extent> extents = source_.extents_of(read.expert);
  ReadRequest& request = read.request;
  request.tag = tag_of(slot, read.generation);
  request.pieces = source_.pieces;
  std::byte* to = packs() ? staging_->piece(read.staging) : memory_.destination(slot);
  for (int32_t piece = 0; piece < source_.pieces; ++piece) {
    const Extent from = aligned_superset(extents[piece], reader_->alignment());
    request.piece[piece] = {from, extents[piece].offset + extents[piece].bytes - from.offset, to};
    to += round_up(from.bytes, kRecordAlignment);
  }
}

void Loader::raise_priority(int32_t slot) {
  const Lock lock(mutex_);
  Read& read = reads_[slot];
  if (read.state == Read::State::kNone || read.request.urgency == Urgency::kDemand) return;
  const Urgency before = std::exchange(read.request.urgency, Urgency::kDemand);
  if (read.state == Read::State::kQueued) {
    queue_of(before).erase(slot);
    queue_of(Urgency::kDemand).push_back(slot);
    begin_queued();
  } else {
    try {
      reader_->raise_priority(tag_of(slot, read.generation));
    } catch (const std::bad_alloc&) {  // the read comes later than it could
    }
  }
}

bool Loader::will_need(std::span<const ExpertId> predicted) {
  if (!reader_->buffered()) return false;
  for (const ExpertId id : predicted) {
    for (const Extent& extent : source_.extents_of(id)) reader_->will_need(extent);
  }
  return !predicted.empty();
}

// Without the lock. The read is under way, so that no other thread changes it or uses its buffers.
void Loader::on_read(const ReadResult& result) {
  if (!hand_to_finisher(result)) finish(result);
}

bool Loader::hand_to_finisher(const ReadResult& result) {
  const bool works =
      result.error == 0 && (packs() || wants_checksum(reads_[slot_of(result.tag)].expert));
  {
    const Lock lock(mutex_);
    if (--with_reader_ == 0 || !works || no_finisher_) return false;
    if (!finisher_.joinable()) {
      try {
        finisher_ = start_thread("the thread that packs", [this] { run_finisher(); });
      } catch (const Error&) {
        no_finisher_ = true;
        return false;
      } catch (const std::bad_alloc&) {
        return false;
      }
    }
    reads_[slot_of(result.tag)].result = result;
    to_finish_.push_back(slot_of(result.tag));
  }
  to_finish_changed_.notify_one();
  return true;
}

void Loader::run_finisher() {
  pthread_setname_np(pthread_self(), "mesh-pack");
  Lock lock(mutex_);
  for (;;) {
    to_finish_changed_.wait(lock, [this] { return !to_finish_.empty() || finisher_closes_; });
    if (to_finish_.empty()) return;
    const ReadResult result = reads_[to_finish_.pop_front()].result;
    lock.unlock();
    finish(result);
    lock.lock();
  }
}

// Without the lock.
void Loader::finish(const ReadResult& result) {
  const int32_t slot = slot_of(result.tag);
  Read& read = reads_[slot];
  if (result.error == 0) read.bytes += bytes_of(read.request);
  bool again = false;
  std::optional<Error> error;
  try {
    error = outcome(result, again);
  } catch (const std::bad_alloc&) {
    error = kNoMemory;
  }
  for (int32_t piece = 0; again && piece < read.request.pieces; ++piece) {
    reader_->forget(read.request.piece[piece].from);
  }
  Ended ended{slot, read.bytes, std::move(error), result, read.again};
  if (read.again && !ended.error && read.first_drives > 1) {
    // Without memory for it, the fault stays unnamed.
    static_cast<void>(caught([&] { ended.wrong_copy = copy_error(read); }));
  }
  {
    const Lock lock(mutex_);
    read.again = again;
    if (again) {
      // Which drive was wrong is not known, and the original is what was checked when it was made.
      read.request.original = true;
      read.first_drives = result.drives;
      to_submit_.push_back(slot);
    } else {
      end(read);
    }
    begin_queued();
  }
  reader_->flush();  // first, since `done_` may wait
  if (!again) done_(std::move(ended));
  while (std::optional<Ended> refused = take_refused()) done_(std::move(*refused));
}

std::optional<Error> Loader::outcome(const ReadResult& result, bool& again) {
  const int32_t slot = slot_of(result.tag);
  if (result.error != 0) return read_error(slot, result);
  if (std::optional<Error> error = pack_record(slot)) return error;
  if (checksum_matches(slot)) return std::nullopt;
  // One wrong read may be a passing fault of bus or memory; a second says that the disk holds other
  // bytes.
  again = !reads_[slot].again;
  if (again) return std::nullopt;
  return checksum_error(reads_[slot].expert);
}

std::optional<Error> Loader::pack_record(int32_t slot) const {
  if (!packs()) return std::nullopt;
  const Read& read = reads_[slot];
  const ExpertId id = read.expert;
  const std::span<const Extent> extents = source_.extents_of(id);
  std::array<const std::byte*, kMaxPieces> pieces{};
  for (int32_t piece = 0; piece < source_.pieces; ++piece) {
    const Piece& from = read.request.piece[piece];
    pieces[piece] = from.to + (extents[piece].offset - from.from.offset);
  }
  try {
    pack_(id, {pieces.data(), static_cast<size_t>(source_.pieces)}, memory_.piece(slot));
    return std::nullopt;
  } catch (const std::bad_alloc&) {
    throw;
  } catch (const std::exception& error) {
    const auto* own = dynamic_cast<const Error*>(&error);
    return Error(own != nullptr ? own->kind() : ErrorKind::kInvalid,
                 concat("cannot pack ", describe(source_, id), ": ", error.what()),
                 error_place(source_, id));
  }
}

bool Loader::checksum_matches(int32_t slot) {
  const ExpertId id = reads_[slot].expert;
  if (!wants_checksum(id)) return true;
  const uint64_t checksum =
      record_checksum(source_.store_id, source_.layer_of(id), source_.number_of(id),
                      memory_.piece(slot), options_.record_bytes);
  std::optional<uint64_t>& expected = checksums_[id];
  if (expected.value_or(checksum) != checksum) return false;
  expected = checksum;
  // Another read of a mirrored file may be of other drives.
  if (options_.verify == Verify::kFirst && source_.drives() == 1) expected.reset();
  return true;
}

Error Loader::read_error(int32_t slot, const ReadResult& result) const {
  const ExpertId id = reads_[slot].expert;
  if (result.error == EBADMSG) return checksum_error(id);  // the owner of a shared pool says so
  ErrorPlace place = error_place(source_, id);
  if (result.file >= 0 && result.file < static_cast<int32_t>(source_.files.size())) {
    place.file = source_.files[result.file].path_on(result.drive);
    place.offset = result.offset;
  }
  return torch_mesh::read_error(describe(source_, id), place, result.error);
}

Error Loader::checksum_error(ExpertId id) const {
  const ErrorPlace place = error_place(source_, id);
  return Error(ErrorKind::kChecksum,
               wrong_checksum(describe(source_, id), place.file, place.offset), place);
}

Error Loader::copy_error(const Read& read) const {
  ErrorPlace place = error_place(source_, read.expert);
  const File& file = source_.files[source_.extents_of(read.expert)[0].file];
  std::string copies;
  for (int32_t drive = 1; drive < source_.drives(); ++drive) {
    if ((read.first_drives >> drive & 1) == 0 || file.path_on(drive).empty()) continue;
    copies += (copies.empty() ? "" : " or ") + file.path_on(drive);
  }
  place.file = copies;
  return Error(
      ErrorKind::kChecksum,
      concat("the bytes of ", describe(source_, read.expert), " in ", copies, " (offset ",
             place.offset, ") are wrong by their checksum and were read again from ", file.path,
             ", where they are right: the copy or its drive is damaged; copy "
             "the file again, or leave the folder out of mirrors"),
      place);
}

void Loader::validate() const {
  const Lock lock(mutex_);
  int32_t queued = 0, staged = 0;
  for (const Read& read : reads_) {
    queued += read.state == Read::State::kQueued;
    staged += read.staging >= 0;
  }
  check_invariant(queued == queued_[0].size() + queued_[1].size() + queued_[2].size(),
                  "the queues for staging buffers have lost a read");
  check_invariant(
      !packs() || staged + static_cast<int32_t>(free_staging_.size()) == options_.staging,
      "a staging buffer is lost");
}

}  // namespace torch_mesh
