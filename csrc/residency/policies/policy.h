// A policy chooses which resident expert to give up. It is a state machine over dense expert ids
// (layer * experts + expert) without threads, clocks or memory of its own beyond what the
// constructor takes, so the very same object serves the live pool and a simulation of it.
#pragma once

#include <cstdint>
#include <memory>
#include <span>
#include <string_view>
#include <vector>

#include "residency/core/model_use.h"

namespace torch_mesh {

using ExpertId = int32_t;
inline constexpr ExpertId kNoExpert = -1;

class Policy {
 public:
  virtual ~Policy() = default;
  virtual const char* name() const = 0;

  virtual void admit(ExpertId id) = 0;   // has become resident, unpinned
  virtual void remove(ExpertId id) = 0;  // is resident no more (evicted, or its read failed)
  virtual void touch(ExpertId id) = 0;   // a forward uses it; resident
  virtual void pin(ExpertId id) = 0;     // first pin: no victim until unpin()
  virtual void unpin(ExpertId id) = 0;   // last pin gone
  // The unpinned resident expert to give up, or kNoExpert. Does not remove it.
  virtual ExpertId victim() = 0;

  // Whether `id`, which is not resident and need not be, is worth a read into the slot of `victim`.
  // Most policies give a slot to whatever is used.
  virtual bool prefers(ExpertId id, ExpertId victim) const {
    static_cast<void>(id), static_cast<void>(victim);
    return true;
  }

  // What earlier runs used, before anything else is told. Most policies have no use for it.
  virtual void start_from(const ModelUse& use) { static_cast<void>(use); }
  // The layer's next forward is the first of a new sequence: forgets what is true of one text, not
  // what is true of the model.
  virtual void begin_sequence(int32_t layer) { static_cast<void>(layer); }

  // What the calls above amount to; for validation.
  virtual bool resident(ExpertId id) const = 0;
  virtual bool pinned(ExpertId id) const = 0;

  // The pool has room for this many now. Those that are too many are removed one by one, before or
  // after.
  virtual void resize(int32_t slots) { static_cast<void>(slots); }

  // Router scores of one token over all experts of a layer (probabilities). Most policies have no
  // use for them.
  virtual void observe(int32_t layer, std::span<const float> scores) { (void)layer, (void)scores; }
  // One forward of a layer begins and needs these experts, resident or not, each once: the clock of
  // policies that decay, and all that policies which predict learn from. Scores of its tokens are
  // observed before.
  virtual void tick(int32_t layer, std::span<const int32_t> experts) { (void)layer, (void)experts; }
  // In place of tick() where the forward is that of a prompt: `ids` are what its tokens chose, in
  // their order, top_k each; those outside [0, experts) are none.
  virtual void tick_prompt(int32_t layer, std::span<const int32_t> experts,
                           std::span<const int64_t> ids, int32_t top_k) {
    (void)ids, (void)top_k;
    tick(layer, experts);
  }
};

struct PolicyOptions {
  int32_t layers;
  int32_t experts;  // per layer
  int32_t slots;
};

// By name, see policy.cpp; "auto" is the one that wins on traces. Else Error(kInvalid).
std::unique_ptr<Policy> make_policy(std::string_view name, const PolicyOptions& options);
std::vector<std::string_view> policy_names();  // "auto" first

}  // namespace torch_mesh
