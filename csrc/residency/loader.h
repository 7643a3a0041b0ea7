// Reads records into slots, packs raw weights, and compares checksums.
//
// Records of a store are read into their slots. Raw weights are read into one of a few staging
// buffers and packed into the slot from there; a read without a free buffer waits for one, and
// prefetches leave half of them to demand reads. Where `verify` wants a checksum, a wrong one is
// reported after a second read, which is of the file itself and of no copy of it.
#pragma once

#include <array>
#include <condition_variable>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <mutex>
#include <optional>
#include <span>
#include <thread>
#include <vector>

#include "base/error.h"
#include "io/index_list.h"
#include "io/reader.h"
#include "residency/core/slots.h"
#include "residency/memory/arena.h"
#include "residency/memory/slot_memory.h"
#include "store/source.h"

namespace torch_mesh {

enum class Verify : uint8_t { kFirst, kAlways, kNever };

// Packs the pieces of a raw record, each given by its first byte, into `record`. `id`: of the
// expert in its source. Called on the loader's threads, for one record at a time on each.
using PackRecord =
    std::function<void(ExpertId id, std::span<const std::byte* const> pieces, std::byte* record)>;

// The size of a staging buffer: room for the aligned supersets of any record's pieces. 0 for a
// store.
int64_t staging_bytes(const Source& source);

// "expert 7 of layer 3", and where its record begins.
std::string describe(const Source& source, ExpertId id);
ErrorPlace error_place(const Source& source, ExpertId id);

struct LoaderOptions {
  int32_t slots = 0;
  int64_t record_bytes = 0;
  int32_t staging = 4;  // buffers for raw records; ignored for a store
  Verify verify = Verify::kFirst;
  ReaderOptions reader;
};

class Loader {
 public:
  // The end of a read: a record that is ready to be used, or an error.
  struct Ended {
    int32_t slot;
    int64_t bytes;  // that were read for it
    std::optional<Error> error;
    ReadResult read = {};  // the last one, where it was not refused
    bool again = false;    // it is a second read, after a wrong checksum
    // What the second read shows of the first: wrong bytes of a copy on another drive.
    std::optional<Error> wrong_copy = {};
  };
  // Called once for each read that no caller of take_refused() got, on a thread of the loader's. It
  // may call begin(), raise_priority() and flush(), and must not throw.
  using Done = std::function<void(Ended)>;

  // `memory`, `source` and `topology` outlive the loader. `source` has passed validate(). Throws
  // what a Reader throws on opening.
  Loader(const LoaderOptions& options, const Source& source, PackRecord pack, SlotMemory& memory,
         const Topology& topology, Done done);
  ~Loader();

  // Queues the reads of these slots, which begin with flush(). Those that cannot be queued have
  // failed: take_refused() returns one after the other, each once. A thread of the loader's may get
  // one first, and calls `done` for it.
  void begin(const SlotTable& slots, std::span<const int32_t> reads);
  std::optional<Ended> take_refused();
  // Makes the read into a slot a demand read, if it is still in flight.
  void raise_priority(int32_t slot);
  // A hint for reads through the page cache: these experts are likely to be read next. Returns
  // whether there is something to flush().
  bool will_need(std::span<const ExpertId> predicted);
  void flush() { reader_->flush(); }  // see Reader
  // Waits for the reads under way, and then for `done` of each.
  void close();

  Reader& reader() { return *reader_; }
  const Reader& reader() const { return *reader_; }
  int64_t staging_bytes() const { return staging_ ? staging_->bytes() : 0; }
  // Throws std::logic_error if a staging buffer is lost or a read waits in vain.
  void validate() const;

 private:
  using Lock = std::unique_lock<std::mutex>;

  // The read of a slot.
  struct Read {
    enum class State : uint8_t { kNone, kQueued, kUnderWay };  // queued for a staging buffer
    State state = State::kNone;
    bool again = false;         // the second read, after a wrong checksum
    uint32_t first_drives = 0;  // those of the first one
    ExpertId expert = kNoExpert;
    int32_t staging = -1;     // index of the buffer that a raw record is read into; -1: none
    uint32_t generation = 0;  // so that a late raise_priority() cannot mean the slot's next read
    int64_t bytes = 0;
    ReadRequest request{};
    ReadResult result{};
  };

  IndexList& queue_of(Urgency urgency) { return queued_[static_cast<size_t>(urgency)]; }
  bool packs() const { return static_cast<bool>(pack_); }
  bool wants_checksum(ExpertId id) const {
    return options_.verify == Verify::kAlways ||
           (options_.verify == Verify::kFirst && checksums_[id].has_value());
  }
  // Called with the lock held.
  void fill_request(int32_t slot);
  void take_staging();
  void submit();
  Error refusal(const Error& error, ExpertId id) const;
  void begin_queued();
  void end(Read& read);
  // Called on the I/O thread.
  void on_read(const ReadResult& result);
  bool hand_to_finisher(const ReadResult& result);
  // Called on the I/O thread or the finisher's.
  void finish(const ReadResult& result);
  std::optional<Error> outcome(const ReadResult& result, bool& again);
  std::optional<Error> pack_record(int32_t slot) const;
  bool checksum_matches(int32_t slot);
  Error read_error(int32_t slot, const ReadResult& result) const;
  Error checksum_error(ExpertId id) const;
  Error copy_error(const Read& read) const;
  void run_finisher();

  const LoaderOptions options_;
  const Source& source_;
  const PackRecord pack_;
  SlotMemory& memory_;
  const Done done_;
  std::optional<Arena> staging_;

  mutable std::mutex mutex_;
  // By slot. While a read is under way, only the thread that finishes it changes it, except for its
  // urgency.
  std::vector<Read> reads_;
  std::vector<int32_t> free_staging_;
  IndexLinks queue_links_;
  std::array<IndexList, kUrgencies.size()> queued_;  // for a staging buffer
  std::vector<int32_t> to_submit_;                   // slots
  std::vector<ReadRequest> requests_;                // of those
  int32_t with_reader_ = 0;     // reads that are not reported by the reader yet
  std::vector<Ended> refused_;  // has room for all

  // By expert: the one to compare with, if there is one (still). Used only by the thread that
  // finishes the expert's read.
  std::vector<std::optional<uint64_t>> checksums_;

  // A second thread, which packs and hashes while the I/O thread has other reads in flight.
  std::thread finisher_;
  std::condition_variable to_finish_changed_;
  IndexList to_finish_;  // slots, whose reads have results
  bool finisher_closes_ = false;
  bool no_finisher_ = false;  // the system refused a thread

  Owned<Reader> reader_;  // last: its thread uses all of the above
};

}  // namespace torch_mesh
