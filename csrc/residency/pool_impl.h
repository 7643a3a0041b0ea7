// What pool.cpp (the calls), claim.cpp (the forwards), landing.cpp (the reads) and mapped.cpp
// share.
#pragma once

#include <condition_variable>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <vector>

#include "base/owner_process.h"
#include "io/mapped_files.h"
#include "residency/arena.h"
#include "residency/expected.h"
#include "residency/kept.h"
#include "residency/pool.h"
#include "residency/slots.h"

namespace torch_mesh {

// Adds the time from its making to its end.
class Stopwatch {
 public:
  explicit Stopwatch(int64_t& nanoseconds) : nanoseconds_(nanoseconds) {}
  ~Stopwatch() { nanoseconds_ += std::chrono::nanoseconds(Clock::now() - begin_).count(); }
  Stopwatch(const Stopwatch&) = delete;
  Stopwatch& operator=(const Stopwatch&) = delete;

 private:
  using Clock = std::chrono::steady_clock;
  int64_t& nanoseconds_;
  const Clock::time_point begin_ = Clock::now();
};

// The read under way into a slot, or that filled it.
struct Load {
  Urgency urgency = Urgency::kDemand;
  uint32_t generation = 0;     // so that a late hasten() cannot mean the slot's next read
  int32_t staging = -1;        // index of the buffer that a raw record is read into; -1: none (yet)
  bool queued = false;         // waits for a staging buffer
  bool reread = false;         // the second read, after a wrong checksum
  Phase phase = Phase::kNone;  // that queued it
  bool speculative = false;    // begun as a prefetch; the forward that joins may begin it anew
  // Read or being read by a prefetch that no forward has come for; stays while READY.
  bool unused = false;
  int64_t bytes = 0;  // read into the slot by this load
};

struct Pool::Impl {
  using Lock = std::unique_lock<std::mutex>;

  // A claim in the queue for slots; lives on the waiting thread's stack.
  struct Ticket {
    Ticket* next = nullptr;
    Ticket* previous = nullptr;
  };

  Impl(const PoolOptions& options, const Runtime& runtime, Source source, PackRecord pack);
  Impl(const PoolOptions& options, const Runtime& runtime, int32_t layers, int32_t experts);

  bool memory_only() const { return reader == nullptr; }
  ExpertId id_of(int32_t layer, int32_t expert) const { return layer * experts + expert; }
  LayerStats& stats_of(int32_t layer, Phase phase) {
    return stats.layers[static_cast<size_t>(phase)][layer];
  }
  // Those of the read under way into a slot, or of the one that filled it.
  LayerStats& stats_of(int32_t slot) {
    return stats_of(slots[slot].expert / experts, loads[slot].phase);
  }
  void check_process() const;
  void check_open() const;  // with the lock
  void check_experts(int32_t layer, std::span<const int32_t> indices) const;
  std::string describe(ExpertId id) const;  // "expert 7 of layer 3"
  ErrorPlace place_of(ExpertId id) const;

  // pool.cpp, with the lock: an empty slot for `id`, evicting if it must; -1: all are pinned or
  // loading.
  int32_t reserve(ExpertId id, Phase phase);
  // READY and unpinned → EMPTY, counted.
  // With a slot for every expert nothing is given up: what is used tells a policy nothing.
  bool covers_all() const { return slots.limit() == layers * experts; }
  void evict(int32_t slot, Phase phase);
  void count_wasted(int32_t slot);
  void wake_slot_waiters();
  // Begins as many of the expected reads as the reader keeps under way, then those that warm it.
  void read_ahead();

  // resizing.cpp, with the lock.
  // To be called when nobody uses a slot any more; of retired ones it evicts what is in them, and
  // lets their segment go.
  void vacate(int32_t slot);
  void retarget(int32_t slots);
  bool settled() const;
  // Takes the first segment that is wanted back; without the lock while the kernel clears its
  // pages. False if there is none to take now.
  bool grow(Lock& lock);
  int64_t present_bytes() const;
  void validate_segments() const;

  // How long a wait may last, and when to ask the interrupt hook next.
  struct Patience {
    std::chrono::steady_clock::time_point deadline;
    std::chrono::steady_clock::time_point ask;
  };
  Patience patience() const;
  // Waits on `condition` for 100 ms at most, asking the interrupt hook as often. False once the
  // deadline has passed.
  bool wait(Lock& lock, std::condition_variable& condition, Patience& patience) const;

  // landing.cpp. With the lock:
  void start_load(int32_t slot, Urgency urgency, Phase phase);
  void hasten(int32_t slot);
  // On the I/O thread, without the lock:
  void on_read(const ReadResult& result);

  // claim.cpp, with the lock:
  void reserve_for(Claim& claim, bool at_head_of_queue);
  bool reserve_one(Claim& claim, size_t entry);
  void join_present(Claim& claim);
  void join(const Claim& claim, int32_t slot);
  void count_access(const Claim& claim, size_t entry, int64_t LayerStats::*how,
                    int64_t ExpertStats::*expert_how);
  void learn(int32_t layer, std::span<const int32_t> indices, const ForwardPart& part);
  void unpin(int32_t slot);
  int32_t hand_out(Claim& claim, std::span<ReadyExpert> ready);
  void wait_for_slots(Claim& claim, Lock& lock);
  void wait_for_reads(const Claim& claim, Lock& lock);
  void end_read(Claim& claim, Claim::Entry& entry);

  // deferred.cpp, with the lock:
  void defer(const Claim& claim, std::span<const int32_t> indices);
  void stand_in(const Claim& claim, std::span<const int32_t> indices);
  void forget_awaited(int32_t layer);
  ExpertId choose_victim();

  // mapped.cpp
  bool maps() const { return options.reader.backend == "mmap" && !source.files.empty(); }
  const Extent& extent_of(ExpertId id) const { return *source.expert(id / experts, id % experts); }
  std::byte* record_in(int32_t slot) const;
  bool still_there(int32_t slot);
  void cool_evicted();
  int64_t losses_so_far();

  // window.cpp, with the lock:
  int32_t window_slots(int32_t layer, bool last_chunk) const;
  void read_next_layer(const Claim& claim);

  void validate_claims() const;
  void validate_loads() const;
  void validate_stats() const;

  const OwnerProcess owner;
  const PoolOptions options;
  const Runtime runtime;
  const Source source;
  const PackRecord pack;
  const int32_t layers;
  const int32_t experts;

  // Ready to be copied, which takes no memory.
  const Error no_memory{ErrorKind::kMemory, "no memory to read an expert"};

  const std::shared_ptr<MappedFiles> mapping;  // of a mapped store, whose arena is empty
  Arena arena;
  std::optional<Arena> staging_arena;  // for a raw source

  mutable std::mutex mutex;
  std::condition_variable landed;  // a read that claims joined has ended
  std::condition_variable freed;   // a slot may be reused, or the head of the queue has changed
  std::condition_variable idle;    // no read is under way
  SlotTable slots;
  std::vector<Load> loads;  // by slot
  Kept kept;
  ModelUse use;
  bool warming;                   // reads what a profile names
  std::vector<Phase> last_phase;  // by layer, of the last claim that was a forward's
  Expected expected;
  Phase expected_phase = Phase::kNone;  // of the forward that foretold
  std::vector<ExpertId> awaited;        // deferred, and not come for yet
  // Of the arena. Only one that is kPresent has slots below slots.limit().
  enum class SegmentState : uint8_t {
    kPresent,
    kLeaving,  // its slots are retired and EMPTY; the I/O thread unregisters and drops it
    kAbsent,
    kComing,  // a resize() faults it in, then the I/O thread registers it
  };
  std::vector<SegmentState> segments;
  int32_t target;                   // slots that the last resize() asked for
  bool grown = false;               // it has made the pool larger
  bool growing = false;             // some resize() faults a segment in
  std::condition_variable resized;  // a segment has come or gone, or the pool is closed
  PoolStats stats;
  std::vector<int64_t> forwards;                  // by layer; never reset
  mutable std::condition_variable forward_ended;  // or the pool is closed
  mutable int32_t forward_waiters = 0;
  std::vector<ExpertId> to_cool;  // evicted from a mapped store, and the kernel not told yet
  int64_t losses_seen = 0;
  Claim* claims = nullptr;  // alive
  Ticket* first_ticket = nullptr;
  Ticket* last_ticket = nullptr;
  int32_t prefetching = 0;  // loads that nobody waits for yet, those of a window included
  bool closed = false;

  // Loads that wait for a staging buffer.
  std::vector<int32_t> free_staging;
  IndexLinks queue_links;
  IndexList demand_queue;
  IndexList prefetch_queue;

  // By expert id; of the I/O thread alone.
  std::vector<uint64_t> checksums;
  std::vector<bool> checksum_known;
  std::vector<bool> verified;

  std::unique_ptr<Reader> reader;

 private:
  Impl(const PoolOptions& options, const Runtime& runtime, Source source, PackRecord pack,
       int32_t layers, int32_t experts);

  void open();
  void submit(int32_t slot);
  ReadRequest request_for(int32_t slot) const;
  void submit_queued();
  void end_load(int32_t slot);
  void count_read(int32_t slot, int64_t bytes);
  void land(int32_t slot);
  // resizing.cpp
  void raise_limit();
  void let_go(int64_t segment);
  bool vacant(int64_t segment) const;
  void on_dropped(int64_t segment);
  void on_registered(int64_t segment);

  void keep_prefetch_error(int32_t slot, const Error& error);
  void fail(int32_t slot, Error error);
  bool begin_anew(int32_t slot, const Error& error);
  Error read_error(int32_t slot, const ReadResult& result) const;
  Error checksum_error(int32_t slot) const;
  std::optional<Error> pack_record(int32_t slot);
  bool checksum_matches(int32_t slot);
  bool read_again(int32_t slot, int64_t bytes);
};

}  // namespace torch_mesh
