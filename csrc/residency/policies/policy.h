// A policy chooses which resident expert to evict. It is a state machine over dense expert ids
// (layer * experts + expert) without threads, clocks or memory of its own beyond what the
// constructor takes, so the very same object serves the live pool and a simulation of it.
#pragma once

#include <cstdint>
#include <memory>
#include <span>
#include <string_view>
#include <vector>

#include "residency/core/model_use.h"
#include "store/source.h"

namespace torch_mesh {

class Policy {
 public:
  explicit Policy(int64_t experts)  // of all layers
      : standing_(static_cast<size_t>(experts), Standing::kAbsent) {}
  virtual ~Policy() = default;

  void admit(ExpertId id) {  // has become resident, unpinned
    admitted(id);
    unpin(id);
  }
  void remove(ExpertId id) {  // is resident no more
    if (evictable(id)) pin(id);
    standing_[id] = Standing::kAbsent;
  }
  void pin(ExpertId id) {  // first pin: no victim until unpin()
    standing_[id] = Standing::kPinned;
    lost(id);
  }
  void unpin(ExpertId id) {  // last pin gone
    standing_[id] = Standing::kEvictable;
    gained(id);
  }
  bool resident(ExpertId id) const { return standing_[id] != Standing::kAbsent; }
  bool pinned(ExpertId id) const { return standing_[id] == Standing::kPinned; }
  virtual void touch(ExpertId id) { (void)id; }  // a forward uses it; resident
  // The unpinned resident expert to evict, or kNoExpert. Does not remove it.
  virtual ExpertId victim() = 0;

  // Whether `id`, which is not resident and need not be, is worth a read into the slot of `victim`.
  // Most policies say so of every expert.
  virtual bool prefers(ExpertId id, ExpertId victim) const {
    (void)id, (void)victim;
    return true;
  }

  // Starts from the uses by earlier runs, before any other call.
  virtual void start_from(const ModelUse& use) { (void)use; }
  // The layer's next forward is the first of a new sequence: forgets what is true of one text, and
  // keeps what is true of the model.
  virtual void begin_sequence(int32_t layer) { (void)layer; }

  // One forward of a layer begins and needs these experts, resident or not, each once. This is the
  // clock of policies that decay, and what policies that predict learn from.
  virtual void tick(int32_t layer, std::span<const int32_t> experts) { (void)layer, (void)experts; }
  // Called in place of tick() for a forward of a prompt: `ids` are the choices of its tokens, in
  // their order, top_k each; those outside [0, experts) are none.
  virtual void tick_prompt(int32_t layer, std::span<const int32_t> experts,
                           std::span<const int64_t> ids, int32_t top_k) {
    (void)ids, (void)top_k;
    tick(layer, experts);
  }

 protected:
  bool evictable(ExpertId id) const { return standing_[id] == Standing::kEvictable; }

 private:
  // An expert becomes resident (admitted) and then evictable (gained). It is no longer evictable
  // (lost) once it is pinned, and before it is removed.
  virtual void admitted(ExpertId id) { (void)id; }
  virtual void gained(ExpertId id) { (void)id; }
  virtual void lost(ExpertId id) { (void)id; }

  enum class Standing : uint8_t { kAbsent, kEvictable, kPinned };
  std::vector<Standing> standing_;  // by expert
};

struct PolicyOptions {
  int32_t layers;
  int32_t experts;  // per layer

  int64_t all() const { return int64_t{layers} * experts; }
};

// "auto" is the one that wins on traces (docs/decisions/0013-heat.md).
constexpr std::string_view resolve_policy(std::string_view name) {
  return name == "auto" ? "heat" : name;
}
// One of policy_names(); else Error(kInvalid).
std::unique_ptr<Policy> make_policy(std::string_view name, const PolicyOptions& options);
std::vector<std::string_view> policy_names();  // "auto" first

}  // namespace torch_mesh
