// The claims of forwards: the slots of their experts, and the queue of claims that wait for slots.
#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <span>
#include <vector>

#include "base/error.h"
#include "residency/core/forward.h"
#include "residency/core/slots.h"

namespace torch_mesh {

// One expert of a claim.
struct ClaimEntry {
  enum State : uint8_t {
    kWaiting,  // has no slot yet
    kJoined,   // pins a slot that is READY, LOADING or failed
    kHandedOut,
    kDone,
  };
  int32_t slot;
  State state;
  bool in_window;     // the slot was read into for this claim, or ahead of it
  int32_t miss = -1;  // in the pool's Timeline
};

// A claim's state in the core. Its maker keeps it alive, and does not move it.
struct ClaimState {
  int32_t layer = 0;
  ForwardPart part = {};
  std::span<const int32_t> experts = {};  // distinct; the last ones are those of part.deferral
  std::span<ClaimEntry> entries = {};     // one for each of the others
  int32_t waiting = 0;                    // not reserved yet
  int32_t joined = 0;                     // resident or being read for this claim, not handed out
  int32_t held = 0;                       // handed out, not released
  int32_t window_slots = 0;               // of entries that are in_window
  bool reads_next_layer = false;          // its forward does, see window.h
  // Its thread runs the interrupt hook, so others take slots before it. Otherwise a forward in a
  // signal handler would wait for this claim, which waits for the handler.
  bool passed_over = false;
};

// One expert that a claim may use, until it releases it.
struct HandedOut {
  int32_t index;  // in ClaimState::experts
  int32_t slot;
};

class Claims {
 public:
  explicit Claims(SlotTable& slots) : slots_(slots) {}

  void add(ClaimState& claim);     // with all entries kWaiting
  void remove(ClaimState& claim);  // drops all pins; reads under way go on

  // Takes slots for the experts that have none: first those that are resident or being read, then
  // empty or reusable ones. A claim that finds others in the queue takes nothing yet: pins on
  // experts that happen to be resident could keep a small pool full for ever, forward after
  // forward, while the head of the queue waits. Takes slots from other experts while its window has
  // fewer than `max_window` slots, see Window::slots_for().
  void reserve(ClaimState& claim, int32_t max_window);
  // Hands out experts that are READY and not handed out yet. Stops before one whose read failed. If
  // that is the first, it is done with, and its error is in `error`.
  int32_t hand_out(ClaimState& claim, std::span<HandedOut> ready, std::optional<Error>& error);
  // Releases the claim's experts at these positions of its list. Returns how many it held; it stops
  // at the first that it does not hold.
  size_t release(ClaimState& claim, std::span<const int32_t> indices);
  // Whether all reads that it waits for were begun as prefetches.
  bool waits_for_prefetches(const ClaimState& claim) const;
  // The first slot whose read it waits for; -1: none, or a read that it has joined has ended.
  int32_t late_slot(const ClaimState& claim) const;

  // A claim that finds no slot waits in the queue, and leaves it however the wait ends. Others may
  // pass it meanwhile. Neither allocates.
  void enter_queue(ClaimState& claim) { queue_.push_back(&claim); }
  void leave_queue(ClaimState& claim);
  bool queued() const { return !queue_.empty(); }

  void validate() const;

 private:
  void join_present(ClaimState& claim);
  bool reserve_one(ClaimState& claim, size_t index, int32_t max_window);
  void join(ClaimState& claim, size_t index, int32_t slot, bool in_window);
  void count(const ClaimState& claim, size_t index, CommonCount how);
  // Whether other claims in the queue take slots before it.
  bool is_behind_others(const ClaimState& claim) const;
  ExpertId id_of(const ClaimState& claim, size_t index) const {
    return slots_.id_of(claim.layer, claim.experts[index]);
  }
  static void leave_window(ClaimState& claim, ClaimEntry& entry) {
    claim.window_slots -= entry.in_window;
    entry.in_window = false;
  }

  SlotTable& slots_;
  std::vector<ClaimState*> alive_;
  std::vector<ClaimState*> queue_;  // those that wait for slots, in order
};

}  // namespace torch_mesh
