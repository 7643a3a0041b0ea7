// The resident experts: slots, their states, promotion and eviction. One pool serves all MoE layers
// of a model.
//
// core/core.h decides, loader.h reads, memory/ holds the records. This file adds the lock, the
// threads that wait, and their time-outs. Reading, checking and packing happen outside the lock.
#pragma once

#include <algorithm>
#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <mutex>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <thread>
#include <vector>

#include "base/error.h"
#include "base/owner_process.h"
#include "base/runtime.h"
#include "io/reader.h"
#include "residency/core/core.h"
#include "residency/loader.h"
#include "residency/memory/arena.h"
#include "residency/memory/slot_memory.h"
#include "residency/memory/topology.h"
#include "residency/timeline.h"
#include "store/source.h"

namespace torch_mesh {

// The longest time-out in seconds, 31 years: clocks can add it to the present without an overflow.
inline constexpr double kMaxTimeout = 1e9;

class Loan;

struct PoolOptions {
  int32_t slots = 0;         // at most, and at first
  int32_t min_slots = 1;     // that resize() may leave
  int64_t record_bytes = 0;  // a multiple of 4 KiB
  std::string policy = "auto";
  // With a profile its experts are read into empty slots when the pool is opened.
  WarmUpOptions warm_up = {};
  SoftPinOptions soft_pins = {};
  PrefillWindow prefill = PrefillWindow::kAuto;
  Verify verify = Verify::kFirst;
  std::chrono::milliseconds timeout{30000};  // the longest wait for one read, and for a slot
  ReaderOptions reader = {};
  int32_t staging = 4;                              // buffers for raw records; ignored for a store
  Topology topology = Topology::of_this_process();  // whose nodes the slots are spread over
  int64_t segment_bytes = kSegmentBytes;            // memory is attached and detached in these
  Sharing sharing = Sharing::kPrivate;              // kShared: to be lent, see lending/lender.h
  // If set, the slots are those that another process lends of its pool of the same store, as many
  // as `slots` says (see lending/loan.h). That pool verifies records, and `verify` is ignored.
  std::shared_ptr<Loan> loan = nullptr;
};

class Claim;

// In a forked child every call throws Error(kForked), except those that return what the pool was
// opened with; it must not be destroyed there (see Owned). After close(), fill(), promote(),
// prefetch(), evict(), warm_up(), resize() and new claims throw Error(kClosed); claims that exist
// at close() run to their end.
class Pool {
 public:
  // Reads from `source`; `pack` only for a raw one.
  Pool(const PoolOptions& options, const Runtime& runtime, Source source, PackRecord pack);
  // Records exist in memory only: layers * experts == slots, put there by fill(), evicted only by
  // another fill() of the same expert.
  Pool(const PoolOptions& options, const Runtime& runtime, int32_t layers, int32_t experts)
      : Pool(options, runtime, Source{.layers = layers, .experts = experts}, nullptr) {}
  ~Pool();  // waits for reads under way; no Claim may be alive

  // Memory-only pools: copies a packed record into a slot and makes it READY. Throws
  // Error(kInvalid) for one that a claim uses.
  void fill(int32_t layer, int32_t expert, std::span<const std::byte> record);

  // Blocking promotion, in waves if there are more experts than slots (the last ones stay). Throws
  // as a forward would. Counts accesses, but no forward.
  void promote(int32_t layer, std::span<const int32_t> experts);
  // Hint: queues prefetch reads into empty or evictable slots, and returns. Never throws for a full
  // pool. At most half of the slots are loading prefetches at a time, so that a wrong prediction
  // cannot hold up the forwards. A failed read is kept in stats() and reaches no forward: one that
  // waits for it gets a read of its own.
  void prefetch(int32_t layer, std::span<const int32_t> experts, Phase phase = Phase::kNone);
  // Hint of a forward: `layer` is the next one, and likely to use these, the likeliest first.
  // Prefetches them one after the other as reads end, until the layer begins or another one is
  // predicted; those not begun by then are dropped. After close() it does nothing, since a forward
  // that gives the hint may run to its end. Otherwise as prefetch().
  void expect(int32_t layer, std::span<const int32_t> experts, Phase phase = Phase::kNone);
  // Evicts the READY and unpinned ones among `experts`; returns how many. A memory-only pool
  // throws.
  int32_t evict(int32_t layer, std::span<const int32_t> experts);
  // Begins to read the profile's experts if that has been delayed, see WarmUpOptions::on_gpu.
  void warm_up();
  // Uses by forwards of any phase since the pool was opened, added to those of its profile.
  ModelUse model_use() const { return locked_core()->use(); }
  // Counts uses of experts on a GPU, as ModelUse::count_on_gpu() does. `on_gpu`: by expert.
  void count_on_gpu(int32_t layer, std::span<const int64_t> ids, int32_t top_k,
                    std::span<const int32_t> on_gpu, bool alone);

  // Changes the number of slots, to one from min_slots to that of the options. Forwards and reads
  // go on, and none fails for it. Returns the new number, or that of a later call, once the memory
  // of unused slots is freed and that of new slots is there. Does not wait for slots in use: they
  // are evicted, and their memory is freed, when their forwards or reads end. Error(kTimeout) and
  // Error(kInterrupted), while the I/O thread is busy, leave the rest to that thread or to the next
  // call. Throws Error(kMemory) if the system has no memory to grow; the pool then keeps its size.
  // A memory-only pool throws Error(kInvalid), since its records exist nowhere else.
  int32_t resize(int32_t slots);

  // Throws Error(kForked) in a child of the process that opened the pool.
  void check_process() const { owner_.check("this pool"); }
  // The states of all experts() of a layer at one moment.
  void states(int32_t layer, std::span<SlotState> states) const;
  std::vector<LayerStats> stats() const {  // by layer, over all phases
    return locked_core()->statistics().by_layer();
  }
  PoolTotals totals() const { return locked_core()->statistics().totals(); }
  PoolStats detailed_stats() const;
  // Counts choices of decode steps that resident experts replaced, see lossy_choices.h.
  void count_rerouted(int32_t layer, int64_t replaced);
  // Prefetches that are unused at this moment will count neither as used nor as unused.
  void reset_stats();
  // An error of each copy of a file that had wrong bytes, once: the original was read instead.
  std::optional<Error> take_wrong_copy();

  // Records the times of the next `count` misses of forwards, see timeline.h; 0: stops recording.
  void record_misses(int32_t count);
  std::vector<Miss> misses() const;
  // Waits until `layer` has seen `forwards` forwards end since the pool was opened; false when the
  // pool is closed first, or at the end of `patience`.
  bool wait_for_forwards(int32_t layer, int64_t forwards, std::chrono::milliseconds patience) const;
  int64_t forwards(int32_t layer) const;  // that have ended since the pool was opened
  // Waits for all reads under way; for tests. Throws Error(kTimeout) and Error(kInterrupted).
  void drain();
  // Refuses new claims; idempotent.
  void close();

  // Calls `call` when a read has ended or a slot may have become free. The pool's lock is held, so
  // `call` must not call the pool. It must not throw. Empty: no call any more. Throws
  // Error(kInvalid) if there is one already: a pool has one lender.
  void on_progress(std::function<void()> call);
  bool lent() const;  // whether there is such a call
  // The memfd of a shared pool's slots, its size, and the offset of a record in it. The first
  // throws Error(kInvalid) for a pool that is not shared.
  int shared_descriptor() const;
  int64_t shared_bytes() const { return options_.slots * options_.record_bytes; }
  int64_t shared_offset(const std::byte* record) const;
  const Source& source() const { return source_; }

  // Throws std::logic_error naming the first broken invariant (expert map and slots agree, pin
  // counts match the claims alive, policy residents are the READY slots, no slot is in two places
  // ...).
  void validate() const;

  int32_t layers() const { return source_.layers; }
  int32_t experts() const { return source_.experts; }
  // In the model's numbering of experts, of which a source may hold a range.
  int32_t first_expert() const { return source_.first_expert; }
  int32_t routed_experts() const { return std::max(experts(), source_.routed_experts); }
  int32_t slots() const { return locked_core()->slots().limit(); }  // that may be used now
  // Whether there is a slot for every expert now.
  bool covers_all() const { return locked_core()->slots().covers_all(); }
  int32_t min_slots() const { return options_.min_slots; }
  int32_t max_slots() const { return options_.slots; }
  int32_t segment_slots() const {  // slots of a segment of memory
    return std::max(1, static_cast<int32_t>(memory_->first_of(1)));
  }
  // Slots with at least one pin.
  int32_t pinned() const { return locked_core()->slots().pinned(); }
  int64_t memory_bytes() const;  // slots and staging buffers, as of now
  int64_t slot_bytes() const;    // slots alone, which resize() can free
  std::chrono::milliseconds timeout() const { return options_.timeout; }
  const Topology& topology() const { return options_.topology; }
  std::string_view policy() const { return resolve_policy(options_.policy); }
  const Reader* reader() const {  // nullptr in a memory-only pool
    return memory_only() ? nullptr : &loader_->reader();
  }

 private:
  friend class Claim;
  using Lock = std::unique_lock<std::mutex>;
  using Clock = std::chrono::steady_clock;

  bool memory_only() const { return loader_ == nullptr; }
  void check_experts(int32_t layer, std::span<const int32_t> indices) const;
  [[noreturn]] static void throw_closed();
  void check_open() const {  // with the lock
    if (core_.closed()) throw_closed();
  }
  LayerStats& stats_of(int32_t layer, Phase phase) { return core_.statistics().of(layer, phase); }
  Lock locked() const {  // Error(kForked) in a child
    check_process();
    return Lock(mutex_);
  }

  // Adds the time from its construction to its destruction.
  class Stopwatch {
   public:
    explicit Stopwatch(int64_t& nanoseconds) : nanoseconds_(nanoseconds) {}
    ~Stopwatch() { nanoseconds_ += std::chrono::nanoseconds(Clock::now() - begin_).count(); }
    Stopwatch(const Stopwatch&) = delete;
    Stopwatch& operator=(const Stopwatch&) = delete;

   private:
    int64_t& nanoseconds_;
    const Clock::time_point begin_ = Clock::now();
  };

  // The core for reading, with the lock held until the end of the expression.
  struct LockedCore {
    const Lock lock;
    const Core* core;
    const Core* operator->() const { return core; }
  };
  LockedCore locked_core() const { return {locked(), &core_}; }

  // One call of the pool: holds the lock for an event of the core, and carries out its effects at
  // the end.
  class Event {
   public:
    explicit Event(Pool& pool) : pool_(pool), lock_(pool.locked()) {}
    ~Event() {
      pool_.carry_out();
      pool_.flush(lock_);
    }
    Event(const Event&) = delete;
    Event& operator=(const Event&) = delete;

   private:
    Pool& pool_;
    Lock lock_;
  };

  using HintOfCore = void (Core::*)(int32_t, std::span<const int32_t>, Phase);
  // Returns false after close().
  bool hint(HintOfCore hint, int32_t layer, std::span<const int32_t> experts, Phase phase);

  // The last forward that has ended, of any layer.
  struct LastForward {
    std::thread::id thread;
    int32_t layer = 0;
    Phase phase = Phase::kNone;
    Clock::time_point end;
  };

  // Called with the lock held, after every event of the core.
  void carry_out();
  // Releases the lock, then begins the queued reads: the thread that this wakes may take this very
  // processor core.
  void flush(Lock& lock);
  // Begins the queued reads and takes the lock again. False if there are none. Otherwise the caller
  // looks again, since they may have landed meanwhile.
  bool flushed(Lock& lock);

  // How long a wait may last, and when to ask the interrupt hook next.
  struct Patience {
    Clock::time_point deadline;
    Clock::time_point ask;
  };
  Patience patience() const;
  // Waits on `condition` for 100 ms at most, asking the interrupt hook as often. False once the
  // deadline has passed. `queued`: the claim that waits for slots, if one does.
  bool wait(Lock& lock, std::condition_variable& condition, Patience& patience,
            ClaimState* queued = nullptr) const;

  // Attaches one segment that has to come back, without the lock while the kernel clears its pages.
  // False if there is none to attach now.
  bool grow(Lock& lock);

  void on_ended(Loader::Ended ended);
  void keep_wrong_copy(Error error);
  bool detach(int64_t segment);

  const OwnerProcess owner_;
  const PoolOptions options_;
  const Runtime runtime_;
  const Source source_;
  const std::shared_ptr<SlotMemory> memory_;

  mutable std::mutex mutex_;
  Core core_;
  std::condition_variable landed_;  // see Effects, also for the others
  std::condition_variable freed_;
  std::condition_variable idle_;
  std::condition_variable resized_;                // or the pool is closed
  mutable std::condition_variable forward_ended_;  // or the pool is closed
  std::function<void()> progress_;
  LastForward last_forward_;
  Timeline timeline_;
  std::vector<Error> wrong_copies_;  // the first of each
  std::atomic<int32_t> unreported_copies_ = 0;
  bool queued_ = false;  // there are queued reads since the last flush()

  std::unique_ptr<Loader> loader_;  // last: its threads use all of the above; null: memory only
};

struct ReadyExpert {
  int32_t index;  // position in the claim's list of experts
  const std::byte* record;
  int32_t node;  // of the pool's topology, where the record lies; -1: unknown
};

// The experts that one forward of one layer needs, handed out as they become ready: first the
// resident ones, then each cold one when it has been read. Keeps as many reads in flight as there
// are slots for.
class Claim {
 public:
  using Entry = ClaimEntry;

  // `experts` are distinct and stay alive as long as the claim; the last ones are those of
  // part.deferral. Queues the first reads at once. `scratch` is room for the claim's bookkeeping:
  // an entry for each of the others, so that claiming allocates nothing, unless more claims
  // than ever before are alive.
  Claim(Pool& pool, int32_t layer, std::span<const int32_t> experts, std::span<Entry> scratch,
        const ForwardPart& part = {});
  // Releases the experts that have been handed out, and drops all other pins. Reads under way go
  // on with the urgency that they have.
  ~Claim();
  Claim(const Claim&) = delete;
  Claim& operator=(const Claim&) = delete;

  // Fills `ready` with experts that were not handed out yet, pinned until release(), and returns
  // how many; waits while there are none. Returns 0 when every expert has been handed out. Throws
  // Error when a read failed, timed out, or the wait was interrupted, and Error(kInvalid) when the
  // claim has to release() experts before it can get another slot. `team`: threads that will
  // compute; they sleep through a long wait, see Runtime::wait_asleep.
  int32_t next(std::span<ReadyExpert> ready, int32_t team = 1);
  // As next(), but returns 0 where that would wait. Pool::on_progress() then reports reads and
  // slots that become ready.
  int32_t try_next(std::span<ReadyExpert> ready);
  // The forward no longer uses these; their slots may be reused, also by this claim.
  void release(std::span<const ReadyExpert> done);
  // Whether every expert is resident or being read; false while some wait for a slot.
  bool has_all_slots() const { return state_.waiting == 0; }
  // Whether its forward reads ahead for the next layer, see core/window.h.
  bool reads_next_layer() const { return state_.reads_next_layer; }

 private:
  int32_t take(std::span<ReadyExpert> ready, std::optional<Error>& error);
  void wait_for_slots(std::unique_lock<std::mutex>& lock);
  void wait_for_reads(std::unique_lock<std::mutex>& lock, int32_t team);
  void count_outside() const;

  const std::chrono::steady_clock::time_point begin_ = std::chrono::steady_clock::now();
  Pool& pool_;
  ClaimState state_;
};

}  // namespace torch_mesh
