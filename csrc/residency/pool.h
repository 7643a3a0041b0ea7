// The resident experts: slots, their states, promotion and eviction. One pool serves all MoE layers
// of a model.
//
// What it decides is core/core.h, what reads is loader.h, where records lie is memory/. Here are
// what those do not know: threads that wait, and for how long. Reading, checking and packing happen
// outside the lock.
#pragma once

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <mutex>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "base/error.h"
#include "base/runtime.h"
#include "io/reader.h"
#include "residency/core/claims.h"
#include "residency/core/forward.h"
#include "residency/core/soft_pins.h"
#include "residency/core/statistics.h"
#include "residency/core/window.h"
#include "residency/loader.h"
#include "residency/memory/arena.h"
#include "residency/memory/topology.h"
#include "residency/timeline.h"
#include "store/source.h"

namespace torch_mesh {

// In seconds, 31 years: what clocks can add to the present without an overflow.
inline constexpr double kMaxTimeout = 1e9;

class Loan;

struct PoolOptions {
  int32_t slots = 0;         // at most, and at first
  int32_t min_slots = 1;     // that resize() may leave
  int64_t record_bytes = 0;  // a multiple of 4 KiB
  std::string policy = "auto";
  SoftPinOptions
      soft_pins;  // a profile warms the pool: what it names is read while slots are empty
  PrefillWindow prefill = PrefillWindow::kAuto;
  Verify verify = Verify::kFirst;
  std::chrono::milliseconds timeout{30000};  // the longest wait for one read, and for a slot
  ReaderOptions reader;
  int32_t staging = 4;                              // buffers for raw records; ignored for a store
  Topology topology = Topology::of_this_process();  // whose nodes the slots are spread over
  int64_t segment_bytes = kSegmentBytes;            // memory comes and goes in pieces of this size
  Sharing sharing = Sharing::kPrivate;              // kShared: to be lent, see lending/lender.h
  // Slots are those that another process lends, see lending/loan.h: as many, of its pool of the
  // same store. `verify` is that pool's.
  std::shared_ptr<Loan> loan = nullptr;
};

class Claim;

// In a child of the process that opened it, every call throws Error(kForked) but those that say
// what the pool was opened with. After close(), fill(), promote(), prefetch(), expect(), evict(),
// observe(), warm_up(), resize() and new claims throw Error(kClosed); claims alive at close() run
// to their end.
class Pool {
 public:
  // Reads from `source`; `pack` only for a raw one.
  Pool(const PoolOptions& options, const Runtime& runtime, Source source, PackRecord pack);
  // Records exist in memory only: layers * experts == slots, put there by fill(), never evicted.
  Pool(const PoolOptions& options, const Runtime& runtime, int32_t layers, int32_t experts);
  ~Pool();  // waits for reads under way; no Claim may be alive

  // Memory-only pools: copies a packed record into a slot and makes it READY. Throws
  // Error(kInvalid) for one that a claim uses.
  void fill(int32_t layer, int32_t expert, std::span<const std::byte> record);

  // Blocking promotion, in waves if there are more experts than slots (the last ones stay). Counts
  // and throws as a forward would.
  void promote(int32_t layer, std::span<const int32_t> experts);
  // Hint: queues prefetch reads into empty or evictable slots, and returns. Never throws for a full
  // pool. At most half of the slots are loading prefetches at a time, so that a wrong prediction
  // cannot hold up the forwards. A read that fails is kept in stats() and reaches no forward: one
  // that waits for it gets a read of its own.
  void prefetch(int32_t layer, std::span<const int32_t> experts, Phase phase = Phase::kNone);
  // Hint of a forward: `layer` is the next one, and likely to use these, the likeliest first.
  // Prefetches them one after the other as reads end, until the layer begins or another one is
  // predicted; then what has not begun is dropped. Else as prefetch().
  void expect(int32_t layer, std::span<const int32_t> experts, Phase phase = Phase::kNone);
  // Evicts the READY and unpinned ones among `experts`; returns how many. A memory-only pool
  // throws.
  int32_t evict(int32_t layer, std::span<const int32_t> experts);
  void observe(int32_t layer, std::span<const float> scores);
  // Begins to read what the profile names, where that was put off: see SoftPinOptions::on_gpu.
  void warm_up();
  // By forwards of whatever phase since the pool was opened, on top of what its profile says.
  ModelUse model_use() const;
  // What it does not see, as ModelUse::count_on_gpu() has it: `on_gpu` by expert.
  void count_on_gpu(int32_t layer, std::span<const int64_t> ids, int32_t top_k,
                    std::span<const int32_t> on_gpu, bool alone);

  // Keeps `slots` records from now on, from min_slots to as many as the options say, while
  // forwards and reads go on: none fails or loses its place for it. Returns the number of slots, or
  // that of a later call, once the memory of unused slots has gone and what was missing has come.
  // What is in use is not waited for: it is evicted and its memory goes when its forwards or reads
  // end. Error(kTimeout) and Error(kInterrupted), while the I/O thread is busy elsewhere, leave the
  // rest to that thread or the next call. Throws Error(kMemory) if the system has no memory to
  // grow; the pool then keeps what it has. A memory-only pool throws Error(kInvalid): its records
  // exist nowhere else.
  int32_t resize(int32_t slots);

  // Throws Error(kForked) in a child of the process that opened the pool.
  void check_process() const;
  SlotState state(int32_t layer, int32_t expert) const;
  // Of each expert of a layer, as of one moment; `states` has room for experts() of them.
  void states(int32_t layer, std::span<SlotState> states) const;
  std::vector<LayerStats> stats() const;  // by layer, over all phases
  PoolTotals totals() const;
  PoolStats detailed_stats() const;
  // So many choices of decode steps went to resident experts instead, see core/deferral.h.
  void count_rerouted(int32_t layer, int64_t replaced);
  // What is prefetched and unused at this moment will count neither as used nor as unused.
  void reset_stats();
  // Records when the next `count` misses of forwards were claimed, read and computed; 0: no more.
  void record_misses(int32_t count);
  std::vector<Miss> misses() const;
  // Waits until `layer` has seen `forwards` forwards end since the pool was opened; false when the
  // pool is closed first, or at the end of `patience`.
  bool wait_for_forwards(int32_t layer, int64_t forwards, std::chrono::milliseconds patience) const;
  int64_t forwards(int32_t layer) const;  // that have ended since the pool was opened
  // Waits for all reads under way; for tests and for closing. Throws Error(kTimeout) and
  // Error(kInterrupted).
  void drain();
  // Refuses new claims; idempotent.
  void close();

  // `call` whenever a read has ended or a slot may have become free: with the pool's lock, so that
  // it may not ask the pool anything. Must not throw. Empty: no call.
  void on_progress(std::function<void()> call);
  // Of a shared pool: the memfd that its slots lie in, its size, and where in it a record is.
  // Throws Error(kInvalid) for one that is not.
  int shared_descriptor() const;
  int64_t shared_bytes() const;
  int64_t shared_offset(const std::byte* record) const;
  const Source& source() const;

  // Throws std::logic_error naming the first broken invariant (expert map and slots agree, pin
  // counts match the claims alive, policy residents are the READY slots, no slot is in two places
  // ...).
  void validate() const;

  int32_t layers() const;
  int32_t experts() const;
  // As the model numbers them and its routers know them: a source may have a range of them.
  int32_t first_expert() const;
  int32_t routed_experts() const;
  int32_t slots() const;  // that may be used now
  int32_t min_slots() const;
  int32_t max_slots() const;
  int32_t segment_slots() const;  // memory comes and goes in so many
  int32_t pinned() const;         // slots with at least one pin
  int64_t memory_bytes() const;   // slots and staging buffers, as of now
  int64_t slot_bytes() const;     // those of them that resize() can free
  std::chrono::milliseconds timeout() const;
  const Topology& topology() const;
  std::string_view policy() const;
  const Reader* reader() const;  // nullptr in a memory-only pool

 private:
  friend class Claim;
  struct Impl;
  std::unique_ptr<Impl> impl_;
};

struct ReadyExpert {
  int32_t index;  // position in the claim's list of experts
  const std::byte* record;
  int32_t node;  // of the pool's topology, where the record lies; -1: unknown
};

// The experts that one forward of one layer needs, handed out as they become ready: first all that
// are resident, then each cold one as it lands. Keeps as many cold reads under way as there are
// slots for.
class Claim {
 public:
  using Entry = ClaimEntry;

  // `experts` are distinct and stay alive as long as the claim; the last ones are those of
  // part.deferral. Queues the first reads at once. `scratch` is room for the claim's bookkeeping:
  // an entry for each of the others, so that claiming allocates nothing.
  Claim(Pool& pool, int32_t layer, std::span<const int32_t> experts, std::span<Entry> scratch,
        const ForwardPart& part = {});
  ~Claim();  // drops all pins; reads under way go on as if they were prefetches
  Claim(const Claim&) = delete;
  Claim& operator=(const Claim&) = delete;

  // Fills `ready` with experts that were not handed out yet, pinned until release(); waits while
  // there is none. Returns how many; 0 when every expert has been handed out. Throws Error when a
  // read failed, timed out, or the wait was interrupted, and Error(kInvalid) when only release() of
  // what the claim holds could give it another slot. `team`: the threads that would compute what is
  // ready; through a long wait they sleep, see Runtime::wait_asleep.
  int32_t next(std::span<ReadyExpert> ready, int32_t team = 1);
  // As next(), but 0 also where that would wait. No thread waits then: reads and slots that
  // become ready later are told by Pool::on_progress().
  int32_t try_next(std::span<ReadyExpert> ready);
  // The forward is done with these; their slots may be reused, also by this claim.
  void release(std::span<const ReadyExpert> done);
  // Whether every expert is resident or being read; false while some wait for a slot.
  bool placed() const { return state_.waiting == 0; }
  // Whether what it has computed makes room for what it waits for, see core/window.h.
  bool window() const { return state_.window; }

 private:
  int32_t take(std::span<ReadyExpert> ready, std::optional<Error>& error);
  void wait_for_slots(std::unique_lock<std::mutex>& lock);
  void wait_for_reads(std::unique_lock<std::mutex>& lock, int32_t team);
  void count_outside() const;

  const std::chrono::steady_clock::time_point begin_ = std::chrono::steady_clock::now();
  Pool::Impl& impl_;
  ClaimState state_;
};

}  // namespace torch_mesh
