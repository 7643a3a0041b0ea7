// The facts about a forward that a claim passes to the pool.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>

namespace torch_mesh {

// The purpose of a claim or a prefetch. kNone: neither prefill nor decode, such as promote(), a
// backward, or a caller's own hint.
enum class Phase : uint8_t { kNone, kPrefill, kDecode };
inline constexpr size_t kPhases = 3;

// A forward of a layer with more rows than this is prefill. Generation of up to as many sequences
// at a time counts as decode, and so does a prompt as short as that: both choose few of the
// experts, and wait for each.
inline constexpr int64_t kMaxDecodeRows = 16;

constexpr Phase phase_of(int64_t rows) {
  return rows > kMaxDecodeRows ? Phase::kPrefill : Phase::kDecode;
}

// Consecutive forwards of a layer with the same number of rows, up to this many, are steps of as
// many sequences and not prompts: the next one will use as many experts, too.
inline constexpr int64_t kMaxStepRows = 128;

// Experts of a decode step that its forward does not compute with the rest.
struct Deferral {
  // The claim does not hand these out: one of ClaimKind::kDeferred uses them one layer later.
  std::span<const int32_t> experts = {};
  // Another pool computes them instead, and no such claim follows. This pool learns of their use,
  // and reads those worth a slot ahead of the next one.
  bool fallback = false;
};

enum class ClaimKind : uint8_t {
  kForward,   // counts its accesses, and teaches the policy and the predictions
  kDeferred,  // of experts that an earlier claim of the forward has deferred and counted
  // No forward: reads records to move or copy them to a GPU, for a gradient or to unpack. It counts
  // no access, teaches nothing, and keeps the layer's predictions.
  kVisit,
};

// The part of a forward that a claim covers: one chunk of its rows, or all of them.
struct ForwardPart {
  Phase phase = Phase::kNone;
  bool last = true;
  int64_t rows = 0;  // of the whole forward; 0: not known
  // Choices of a prompt's tokens in order, top_k each; ids outside [0, experts) are skipped. Each
  // counts as a use of its expert. Empty: the claim counts as one use of each of its experts.
  std::span<const int64_t> ids = {};
  int32_t top_k = 0;
  // Each of its experts is used once, so it may read into slots of experts that it has computed.
  // The core decides whether it does, see window.h.
  bool streams = false;
  // The deferred experts are the last ones of the claim's list.
  Deferral deferral = {};
  ClaimKind kind = ClaimKind::kForward;
};

}  // namespace torch_mesh
