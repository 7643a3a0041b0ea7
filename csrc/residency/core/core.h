// The pool's decisions: which experts are resident, which claims use them, what is read next and
// what is evicted. It has no threads, locks, clocks, files or slot memory. Each call is an event
// with Effects, which the caller carries out before the next event. Calls and completions may come
// in any order that the states allow, and tests try them all (tests/engine/core_test.cpp).
// The live pool and the replay of a trace both drive this core.
//
// The life of a slot:
//
//            reserve            land                 evict
//   EMPTY ───────────▶ LOADING ───────▶ READY ─────────────────▶ EMPTY
//     ▲                   │            (pinned by claims, evictable at zero pins)
//     └───────────────────┘
//        fail: the error stays with the slot until the last claim that joined has seen it
//
// - A pin counts a claim, of a forward or of a visit, that uses the slot or waits for its read. A
//   LOADING slot is never a victim, pinned or not, so a buffer is not reused before its read has
//   completed.
// - A claim waits for slots only while it holds no pin, first come first served; so forwards on a
//   small pool cannot deadlock, and none starves.
//
// Every read begins with SlotTable::read(). Reads that a claim needs come first, as many as it has
// slots for (claims.h, window.h). Any other is a ReadAhead, and Core::admits() is the one rule for
// it.
#pragma once

#include <cstdint>
#include <memory>
#include <span>
#include <vector>

#include "residency/core/claims.h"
#include "residency/core/effects.h"
#include "residency/core/expected.h"
#include "residency/core/sizing.h"
#include "residency/core/slots.h"
#include "residency/core/soft_pins.h"
#include "residency/core/statistics.h"
#include "residency/core/warm_up.h"
#include "residency/core/window.h"

namespace torch_mesh {

struct CoreOptions {
  int32_t layers = 0;
  int32_t experts = 0;  // per layer
  int32_t slots = 0;
  WarmUpOptions warm_up = {};
  SoftPinOptions soft_pins = {};
  PrefillWindow prefill = PrefillWindow::kAuto;
  int64_t reads_ahead = 1;        // expected or warmed experts that are read at a time
  int32_t slots_per_segment = 0;  // see Sizing
  bool reads = true;              // false: records come from fill(), and stay
};

// Kinds of reads that begin before a claim asks for them.
enum class ReadAhead : uint8_t {
  kForward,   // deferred by a forward that has its slots, or of its next layer, see window.h
  kHint,      // prefetch(), and experts that another pool has computed
  kExpected,  // predicted for the next layer, see expected.h
  kWarm,      // before any forward asks: into empty slots, while the disk is idle, see warm_up.h
};

class Core {
 public:
  Core(const CoreOptions& options, std::unique_ptr<Policy> policy);
  Core(const Core&) = delete;
  Core& operator=(const Core&) = delete;

  // Ends an event: detaches segments that it has left vacant, and returns all of its effects. The
  // caller carries them out, then clears them.
  Effects& end_event();

  // Begins a claim, made with its layer, part, experts and entries: takes the first slots and
  // queues their reads. It is alive until end(), or not at all if this throws std::bad_alloc.
  void begin(ClaimState& claim);
  // Takes the slots that it can get by now, and reads ahead for the next layer.
  void advance(ClaimState& claim);
  size_t release(ClaimState& claim, std::span<const int32_t> indices);  // as Claims::release()
  void end(ClaimState& claim);

  // A read of Effects::reads has ended. bytes: read for it.
  void landed(int32_t slot, int64_t bytes);
  void failed(int32_t slot, int64_t bytes, Error error);
  // Before that: the first read of the record had a wrong checksum.
  void read_again(int32_t slot) { slots_.count_second_read(slot); }

  // Hints, see Pool.
  void prefetch(int32_t layer, std::span<const int32_t> experts, Phase phase);
  void expect(int32_t layer, std::span<const int32_t> experts, Phase phase);
  void begin_sequence(int32_t layer) { slots_.policy().begin_sequence(layer); }
  void warm_up();

  // Events of sizing().
  void resize(int32_t slots);
  int64_t next_to_attach() { return sizing_.next_to_attach(); }
  void attached(int64_t segment);
  void attach_failed(int64_t segment);
  void detached(int64_t segment);
  void detach_failed(int64_t segment) { sizing_.detach_failed(segment); }

  // Evicts those of these experts that are READY and unpinned, and returns how many.
  int32_t evict(int32_t layer, std::span<const int32_t> experts);
  // For a core that reads nothing: returns a slot for the expert's record, after which filled()
  // is called; -1: the expert is in use.
  int32_t fill(ExpertId id);
  void filled(int32_t slot) { slots_.filled(slot); }

  // Begins no more reads ahead.
  void close() { closed_ = true; }

  void states(int32_t layer, std::span<SlotState> states) const;  // of each expert
  ExpertId id_of(int32_t layer, int32_t expert) const { return slots_.id_of(layer, expert); }
  const SlotTable& slots() const { return slots_; }
  Claims& claims() { return claims_; }  // to hand out, and for the queue
  const Sizing& sizing() const { return sizing_; }
  Statistics& statistics() { return slots_.statistics(); }
  const Statistics& statistics() const { return slots_.statistics(); }
  void reset_statistics() { slots_.reset_statistics(); }
  ModelUse& use() { return use_; }
  const ModelUse& use() const { return use_; }
  bool closed() const { return closed_; }

  // Throws std::logic_error naming the first broken invariant: expert map and slots agree, pins are
  // those of the claims alive, the policy's residents are the READY slots, counts add up ...
  void validate() const;

 private:
  struct LastForward {
    Phase phase = Phase::kNone;  // of the last claim that was a forward's
    int64_t rows = 0;            // of the last forward that has ended
  };

  void begin_forward(ClaimState& claim);
  void learn(const ClaimState& claim);
  // Whether one more read of this kind may begin.
  bool admits(ReadAhead what) const;
  void read_left_out(const ClaimState& claim);
  bool worth_a_slot(ExpertId id);
  void read_next_layer(const ClaimState& claim);
  // Begins expected reads, up to the number allowed under way, then those that warm the pool.
  void read_ahead();
  void read_ahead_when_sized();

  const bool reads_;
  const int64_t reads_ahead_;
  SlotTable slots_;
  SoftPins soft_pins_;
  WarmUp warm_up_;
  ModelUse use_;
  std::vector<LastForward> last_forwards_;  // by layer
  Expected expected_;
  Window window_;
  Claims claims_;
  Sizing sizing_;
  bool closed_ = false;
};

}  // namespace torch_mesh
