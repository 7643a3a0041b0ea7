// Reads: from a reserved slot to a record that is packed, checked and READY, or to an error.
#include <algorithm>
#include <cerrno>
#include <cstring>
#include <exception>
#include <new>
#include <utility>

#include "residency/pool_impl.h"
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

std::string read_failure_advice(int error) {
  switch (error) {
    case ENODATA:
      return "the file is shorter than when it was opened; was it replaced or truncated?";
    case EIO:
      return "the disk reported an error and repeating did not help; see the kernel's log";
    case ECANCELED:
      return "the pool is closing";
    case ENOMEM:
      return "keep fewer experts resident, or raise the memory limit";
    default:
      return "the operating system refused the read";
  }
}

}  // namespace

void Pool::Impl::start_load(int32_t slot, Urgency urgency, Phase phase) {
  Load& load = loads[slot];
  load.urgency = urgency;
  ++load.generation;
  load.reread = false;
  load.phase = phase;
  load.speculative = load.unused = urgency != Urgency::kDemand;
  load.bytes = 0;
  if (urgency != Urgency::kDemand) {
    ++prefetching;
    ++stats_of(slot).prefetches;
    ++stats.experts[slots[slot].expert].prefetches;
  }
  if (!source.raw) {
    submit(slot);
    return;
  }
  load.queued = true;
  (urgency == Urgency::kDemand ? demand_queue : prefetch_queue).push_back(slot);
  submit_queued();
}

void Pool::Impl::submit_queued() {
  while (!free_staging.empty()) {
    IndexList& queue = demand_queue.empty() ? prefetch_queue : demand_queue;
    if (queue.empty()) return;
    const int32_t slot = queue.pop_front();
    loads[slot].queued = false;
    loads[slot].staging = free_staging.back();
    free_staging.pop_back();
    submit(slot);
  }
}

void Pool::Impl::submit(int32_t slot) {
  const ExpertId id = slots[slot].expert;
  ReadRequest request = request_for(slot);
  request.urgency = loads[slot].urgency;
  try {
    try {
      reader->submit(request);
    } catch (const Error& error) {
      fail(slot, Error(error.kind(), error.what(), place_of(id), error.os_error()));
    }
  } catch (const std::bad_alloc&) {
    fail(slot, no_memory);
  }
}

// Without the urgency, which may change while the I/O thread asks for the rest.
ReadRequest Pool::Impl::request_for(int32_t slot) const {
  const Load& load = loads[slot];
  const ExpertId id = slots[slot].expert;
  const Extent* extents = source.expert(id / experts, id % experts);
  ReadRequest request{};
  request.tag = uint64_t{load.generation} << 32 | static_cast<uint32_t>(slot);
  request.pieces = source.pieces;
  std::byte* to = source.raw ? staging_arena->piece(load.staging) : record_in(slot);
  for (int32_t piece = 0; piece < source.pieces; ++piece) {
    const Extent from = aligned_superset(extents[piece], reader->alignment());
    request.piece[piece] = {from, extents[piece].offset + extents[piece].bytes - from.offset, to};
    to += round_up(from.bytes, kRecordAlignment);
  }
  return request;
}

void Pool::Impl::hasten(int32_t slot) {
  Load& load = loads[slot];
  if (load.urgency == Urgency::kDemand) return;
  load.urgency = Urgency::kDemand;
  --prefetching;
  if (load.queued) {
    prefetch_queue.erase(slot);
    demand_queue.push_back(slot);
  } else {
    reader->hasten(uint64_t{load.generation} << 32 | static_cast<uint32_t>(slot));
  }
}

void Pool::Impl::on_read(const ReadResult& result) {
  // LOADING, so that nobody else changes the slot's expert or its buffers meanwhile.
  const auto slot = static_cast<int32_t>(result.tag & UINT32_MAX);
  std::optional<Error> error;
  const int64_t bytes = result.error != 0 ? 0 : bytes_of(request_for(slot));
  try {
    const int64_t losses = mapping ? mapping->losses() : 0;
    error = result.error != 0 ? read_error(slot, result) : pack_record(slot);
    const bool matches = error || checksum_matches(slot);
    if (!error && mapping && !mapping->intact_since(losses)) {
      const Extent& extent = extent_of(slots[slot].expert);
      error = read_error(slot, {result.tag, EIO, extent.file, extent.offset});
    } else if (!matches) {
      if (read_again(slot, bytes)) return;
      error = checksum_error(slot);
    }
  } catch (const std::bad_alloc&) {
    error = no_memory;
  }
  {
    const Lock lock(mutex);
    count_read(slot, bytes);
    if (!error) {
      land(slot);
    } else if (!begin_anew(slot, *error)) {
      fail(slot, std::move(*error));
    }
    submit_queued();
    read_ahead();
  }
  if (mapping) cool_evicted();
}

Error Pool::Impl::read_error(int32_t slot, const ReadResult& result) const {
  const ExpertId id = slots[slot].expert;
  ErrorPlace place = place_of(id);
  if (result.file >= 0 && result.file < static_cast<int32_t>(source.files.size())) {
    place.file = source.files[result.file].path;
    place.offset = result.offset;
  }
  const ErrorKind kind = result.error == ECANCELED ? ErrorKind::kClosed
                         : result.error == ENOMEM  ? ErrorKind::kMemory
                                                   : ErrorKind::kRead;
  return Error(kind,
               "cannot read " + describe(id) + " from " + place.file + " at offset " +
                   std::to_string(place.offset) + ": " + strerror(result.error) + "; " +
                   read_failure_advice(result.error),
               place, result.error);
}

Error Pool::Impl::checksum_error(int32_t slot) const {
  const ExpertId id = slots[slot].expert;
  const ErrorPlace place = place_of(id);
  return Error(ErrorKind::kChecksum,
               describe(id) +
                   " is not what was stored: its checksum is wrong in a second read, too (" +
                   place.file + ", offset " + std::to_string(place.offset) +
                   "); run torch-mesh verify on the store, then convert it again",
               place);
}

std::optional<Error> Pool::Impl::pack_record(int32_t slot) {
  if (!source.raw) return std::nullopt;
  const ExpertId id = slots[slot].expert;
  const Extent* extents = source.expert(id / experts, id % experts);
  const ReadRequest request = request_for(slot);
  std::array<const std::byte*, kMaxPieces> pieces{};
  for (int32_t piece = 0; piece < source.pieces; ++piece) {
    const Piece& read = request.piece[piece];
    pieces[piece] = read.to + (extents[piece].offset - read.from.offset);
  }
  try {
    pack(id / experts, {pieces.data(), static_cast<size_t>(source.pieces)}, arena.piece(slot));
    return std::nullopt;
  } catch (const Error& error) {
    return Error(error.kind(), "cannot pack " + describe(id) + ": " + error.what(), place_of(id));
  } catch (const std::bad_alloc&) {
    throw;
  } catch (const std::exception& error) {
    return Error(ErrorKind::kInvalid, "cannot pack " + describe(id) + ": " + error.what(),
                 place_of(id));
  }
}

bool Pool::Impl::checksum_matches(int32_t slot) {
  const ExpertId id = slots[slot].expert;
  const bool wanted = options.verify == Verify::kAlways ||
                      (options.verify == Verify::kFirst && checksum_known[id] && !verified[id]);
  if (!wanted) return true;
  const uint64_t checksum = record_checksum(source.store_id, id / experts, id % experts,
                                            record_in(slot), options.record_bytes);
  if (!checksum_known[id]) {
    checksums[id] = checksum;
    checksum_known[id] = true;
  }
  verified[id] = checksum == checksums[id];
  return verified[id];
}

// One wrong read may be a passing fault of bus or memory; a second says that the disk holds other
// bytes.
bool Pool::Impl::read_again(int32_t slot, int64_t bytes) {
  if (mapping) mapping->forget(extent_of(slots[slot].expert));
  const Lock lock(mutex);
  if (loads[slot].reread) return false;
  loads[slot].reread = true;
  count_read(slot, bytes);
  submit(slot);
  submit_queued();  // a submission that failed has given its staging buffer back
  return true;
}

void Pool::Impl::count_read(int32_t slot, int64_t bytes) {
  loads[slot].bytes += bytes;
  stats_of(slot).bytes_read += bytes;
}

void Pool::Impl::land(int32_t slot) {
  ++stats_of(slot).promoted;
  ++stats.experts[slots[slot].expert].promoted;
  slots.land(slot);
  end_load(slot);
}

// A forward that has joined a prefetch must not fail for a read that nobody had asked for: it gets
// the one that it would have had without the hint.
bool Pool::Impl::begin_anew(int32_t slot, const Error& error) {
  Load& load = loads[slot];
  if (!load.speculative || slots[slot].pins == 0 || error.kind() == ErrorKind::kClosed)
    return false;
  keep_prefetch_error(slot, error);
  load.speculative = false;
  load.reread = false;
  submit(slot);
  return true;
}

void Pool::Impl::keep_prefetch_error(int32_t slot, const Error& error) {
  ++stats_of(slot).prefetches_failed;
  try {
    stats.prefetch_error = error;
  } catch (const std::bad_alloc&) {
    stats.prefetch_error = no_memory;
  }
}

void Pool::Impl::fail(int32_t slot, Error error) {
  ++stats_of(slot).failed;
  if (loads[slot].speculative) keep_prefetch_error(slot, error);
  if (loads[slot].unused) count_wasted(slot);
  slots.fail(slot, std::move(error));
  end_load(slot);
}

void Pool::Impl::end_load(int32_t slot) {
  Load& load = loads[slot];
  if (load.urgency != Urgency::kDemand) --prefetching;
  load.urgency = Urgency::kDemand;
  if (load.staging >= 0) free_staging.push_back(std::exchange(load.staging, -1));
  if (slots[slot].pins > 0) landed.notify_all();
  if (slots.reusable(slot)) {
    wake_slot_waiters();
    vacate(slot);
  }
  if (slots.loading() == 0) idle.notify_all();
}

void Pool::Impl::validate_loads() const {
  int32_t prefetches = 0, queued = 0, staged = 0;
  for (int32_t slot = 0; slot < slots.size(); ++slot) {
    const Load& load = loads[slot];
    prefetches += load.urgency != Urgency::kDemand;
    queued += load.queued;
    staged += load.staging >= 0;
    const bool busy = load.queued || load.staging >= 0 || load.urgency != Urgency::kDemand;
    check_invariant(!busy || slots[slot].state == SlotState::kLoading,
                    "a slot that is not LOADING has a read");
  }
  check_invariant(prefetches == prefetching, "the count of prefetch reads is wrong");
  check_invariant(queued == demand_queue.size() + prefetch_queue.size(),
                  "the queues for staging buffers have lost a read");
  check_invariant(
      !source.raw || staged + static_cast<int32_t>(free_staging.size()) == options.staging,
      "a staging buffer is lost");
  validate_stats();
}

void Pool::Impl::validate_stats() const {
  std::vector<int64_t> unused(kPhases * static_cast<size_t>(layers));
  for (int32_t slot = 0; slot < slots.size(); ++slot) {
    if (!loads[slot].unused) continue;
    check_invariant(slots[slot].state != SlotState::kEmpty, "an EMPTY slot holds a prefetch");
    ++unused[static_cast<size_t>(loads[slot].phase) * layers + slots[slot].expert / experts];
  }
  for (size_t phase = 0; phase < kPhases; ++phase) {
    for (int32_t layer = 0; layer < layers; ++layer) {
      const LayerStats& counts = stats.layers[phase][layer];
      check_invariant(counts.hits + counts.cold_misses + counts.inflight_misses + counts.deferred ==
                          counts.accesses,
                      "hits, misses and deferrals do not add up to accesses");
      check_invariant(counts.prefetches == counts.prefetches_used + counts.prefetches_wasted +
                                               unused[phase * layers + layer],
                      "prefetches used, wasted and waiting do not add up to those issued");
    }
  }
}

}  // namespace torch_mesh
