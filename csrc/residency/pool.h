// The resident experts: slots, their states, promotion and eviction. One pool serves all MoE layers
// of a model.
//
// The life of a slot:
//
//            reserve            land                 evict
//   EMPTY ───────────▶ LOADING ───────▶ READY ─────────────────▶ EMPTY
//     ▲                   │            (pinned by readers, evictable at zero pins)
//     └───────────────────┘
//        fail: the error stays with the slot until the last forward that joined has seen it
//
// - A pin counts a claim, of a forward or of a visit, that uses the slot or waits for its read. A
//   LOADING slot is never a victim, pinned or not, so a buffer is not reused before its read has
//   completed.
// - A forward waits for slots only while it holds no pin, first come first served; so forwards on a
//   small pool cannot deadlock, and none starves.
// - Reading, checking and packing happen outside the lock.
// - With a mapped store slots hold no bytes: READY says that the page cache held the record, and an
//   evicted one is what the kernel is advised to take back first. See mapped.cpp.
// - resize() retires slots: a retired one is never reserved, and evicted as soon as nobody uses it.
//   The pages of a segment whose slots are all retired and EMPTY go back to the system.
#pragma once

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "base/error.h"
#include "base/runtime.h"
#include "io/reader.h"
#include "residency/arena.h"
#include "residency/kept_options.h"
#include "residency/policy.h"
#include "residency/stats.h"
#include "residency/topology.h"
#include "store/source.h"

namespace torch_mesh {

// In seconds, 31 years: what clocks can add to the present without an overflow.
inline constexpr double kLongestTimeout = 1e9;

enum class SlotState : uint8_t { kEmpty, kLoading, kReady };
enum class Verify : uint8_t { kFirst, kAlways, kNever };

struct PoolOptions {
  int32_t slots = 0;         // at most, and at first
  int32_t least_slots = 1;   // that resize() may leave
  int64_t record_bytes = 0;  // a multiple of 4 KiB
  std::string policy = "auto";
  bool quotas = false;  // of the layers, see quotas.cpp
  KeptOptions kept;     // a profile warms the pool: what it names is read while slots are empty
  Verify verify = Verify::kFirst;
  std::chrono::milliseconds timeout{30000};  // the longest wait for one read, and for a slot
  ReaderOptions reader;
  int32_t staging = 4;                              // buffers for raw records; ignored for a store
  Topology topology = Topology::of_this_process();  // whose nodes the slots are spread over
  int64_t segment_bytes = kSegmentBytes;            // memory comes and goes in pieces of this size
};

// Of one staging buffer: room for the aligned supersets of the pieces of any one record. 0 for a
// store.
int64_t staging_bytes(const Source& source);

// Turns the pieces of a raw record, each at the start of its own bytes, into a packed record.
// Called on the I/O thread.
using PackRecord =
    std::function<void(int32_t layer, std::span<const std::byte* const> pieces, std::byte* record)>;

class Claim;

// Every call throws Error(kForked) in a child of the process that opened the pool, and all but
// state(), the counts, drain() and validate() throw Error(kClosed) after close(). Claims alive at
// close() run to their end.
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
  // pool. At most half of the slots are loading prefetches at a time, so that a wrong guess cannot
  // hold up the forwards. A read that fails is kept in stats() and reaches no forward: one that
  // waits for it gets a read of its own.
  void prefetch(int32_t layer, std::span<const int32_t> experts, Phase phase = Phase::kNone);
  // Hint of a forward: `layer` is the next one, and likely to use these, the likeliest first.
  // Prefetches them one after the other as reads end, until the layer begins or another one is
  // foretold; then what has not begun is dropped. Else as prefetch().
  void expect(int32_t layer, std::span<const int32_t> experts, Phase phase = Phase::kNone);
  // Gives up the READY and unpinned ones among `experts`; returns how many. A memory-only pool
  // throws.
  int32_t evict(int32_t layer, std::span<const int32_t> experts);
  void observe(int32_t layer, std::span<const float> scores);
  // Begins to read what the profile names, where that was put off: see KeptOptions::elsewhere.
  void warm_up();
  // By forwards of whatever phase since the pool was opened, on top of what its profile says.
  ModelUse model_use() const;
  // What it does not see, as ModelUse::count_elsewhere() has it: `elsewhere` by expert.
  void count_elsewhere(int32_t layer, std::span<const int64_t> ids, int32_t top_k,
                       std::span<const int32_t> elsewhere, bool alone);

  // Keeps `slots` records from now on, from least_slots to as many as the options say, while
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
  PoolStats detailed_stats() const;
  // Choices of tokens that went to a resident expert instead of the one that scored higher.
  void count_rerouted(int32_t layer, int64_t choices, Phase phase);
  // What is prefetched and unused at this moment will count neither as used nor as wasted.
  void reset_stats();
  // Waits until `layer` has seen `forwards` forwards end since the pool was opened; false when the
  // pool is closed first, or at the end of `patience`.
  bool wait_for_forwards(int32_t layer, int64_t forwards, std::chrono::milliseconds patience) const;
  int64_t forwards(int32_t layer) const;  // that have ended since the pool was opened
  // Waits for all reads under way; for tests and for closing. Throws Error(kTimeout) and
  // Error(kInterrupted).
  void drain();
  // Refuses new claims; idempotent.
  void close();

  // Throws std::logic_error naming the first broken invariant (expert map and slots agree, pin
  // counts match the claims alive, policy residents are the READY slots, no slot is in two places
  // ...).
  void validate() const;

  int32_t layers() const;
  int32_t experts() const;
  int32_t slots() const;  // that may be used now
  int32_t least_slots() const;
  int32_t most_slots() const;
  int32_t segment_slots() const;  // memory comes and goes in so many
  int32_t pinned() const;         // slots with at least one pin
  int64_t memory_bytes() const;   // slots and staging buffers, as of now
  int64_t slot_bytes() const;     // those of them that resize() can give up; of a mapped store, too
  int64_t mapped_bytes() const;   // of a mapped store: in the page cache, and none of the pool's
  std::chrono::milliseconds timeout() const;
  const Topology& topology() const;
  const char* policy() const;
  const Reader* reader() const;  // nullptr in a memory-only pool

 private:
  friend class Claim;
  struct Impl;
  std::unique_ptr<Impl> impl_;
};

// What a claim is to the pool.
enum class ClaimKind : uint8_t {
  kForward,  // a use: it counts, teaches the policy, and begins its layer
  kLate,     // of a forward, for what an earlier claim of it deferred and counted
  // No forward: a mover, a prompt's way up, a gradient or a copy reads records. It is no access,
  // teaches nothing, and leaves what is foretold of the layer alone.
  kVisit,
};

// Which part of a forward a claim is. A forward whose rows go in chunks has one for each.
struct ForwardPart {
  Phase phase = Phase::kNone;
  bool last = true;
  // Of the prompt's tokens, in order: top_k ids each; those outside [0, experts) are none. Empty:
  // the claim is one use of each of its experts, else each token is one of those it chose.
  std::span<const int64_t> ids = {};
  int32_t top_k = 0;
  // The forward needs nearly all of its layer, and the next layer's will: see window.cpp.
  bool window = false;
  // The last so many of the claim's experts are not handed out: the forward comes for them with a
  // late claim, one layer later. See deferred.cpp.
  int32_t deferred = 0;
  // What would be deferred is computed from another pool instead: this one learns of it, and reads
  // what is worth a slot ahead of its next use. Neither an access nor waited for.
  bool stood_in = false;
  ClaimKind kind = ClaimKind::kForward;
};

struct ReadyExpert {
  int32_t index;  // position in the claim's list of experts
  const std::byte* record;
  int32_t node;  // of the pool's topology, where the record lies; -1: nobody knows
};

// The experts that one forward of one layer needs, handed out as they become ready: first all that
// are resident, then each cold one as it lands. Keeps as many cold reads under way as there are
// slots for.
class Claim {
 public:
  // `experts` are distinct and stay alive as long as the claim. Queues the first reads at once.
  // `scratch` is room for the claim's bookkeeping: an entry for each expert that is not deferred,
  // so that claiming allocates nothing.
  struct Entry {
    int32_t slot;
    uint8_t state;  // private to the pool
    bool read;      // for this claim, or ahead of it
  };
  Claim(Pool& pool, int32_t layer, std::span<const int32_t> experts, std::span<Entry> scratch,
        ForwardPart part = {});
  ~Claim();  // drops all pins; reads under way go on as if they were prefetches
  Claim(const Claim&) = delete;
  Claim& operator=(const Claim&) = delete;

  // Fills `ready` with experts that were not handed out yet, pinned until release(); waits while
  // there is none. Returns how many; 0 when every expert has been handed out. Throws Error when a
  // read failed, timed out, or the wait was interrupted, and Error(kInvalid) when only release() of
  // what the claim holds could give it another slot.
  int32_t next(std::span<ReadyExpert> ready);
  // The forward is done with this one; its slot may be reused, also by this claim.
  void release(int32_t index);
  // Throws Error(kRead) if some bytes of what was handed out were not to be had when they were
  // used, which only happens to a mapped store. release() asks, too.
  void check_read() const;
  // Whether every expert is resident or being read; false while some wait for a slot.
  bool placed() const { return waiting_ == 0; }

 private:
  void begin(std::span<const int32_t> experts);

  Pool& pool_;
  int32_t layer_;
  ForwardPart part_;
  std::span<const int32_t> experts_;
  std::span<Entry> entries_;
  int32_t waiting_ = 0;          // not reserved yet
  int32_t joined_ = 0;           // resident or being read for this claim, not handed out
  int32_t held_ = 0;             // handed out, not released
  int32_t reading_ = 0;          // read for this claim or ahead of it, not released
  int64_t losses_ = 0;           // of a mapped store, when this began
  Claim* next_alive_ = nullptr;  // the pool's list of claims, for validate()
  Claim* previous_alive_ = nullptr;

  friend struct Pool::Impl;
};

}  // namespace torch_mesh
