// The calls that graphs have captured, with pinned memory of their own: a captured graph may be
// launched at any time.
#pragma once

#include <cstdint>
#include <memory>
#include <span>
#include <vector>

#include "gpu/host_work.h"

namespace torch_mesh {

// Only make() is safe from several threads at once.
class CapturedCalls {
 public:
  // Tickets begin at `first`.
  CapturedCalls(std::shared_ptr<HostWork> work, Ticket first)
      : work_(std::move(work)), next_(first) {}
  // Keeps calls that a captured graph may still refer to.
  ~CapturedCalls() { retire(); }
  CapturedCalls(const CapturedCalls&) = delete;
  CapturedCalls& operator=(const CapturedCalls&) = delete;

  // The calls of all layers for one number of tokens. They share one block of pinned memory, since
  // they run one after another.
  struct Size;
  using Sizes = std::vector<std::shared_ptr<Size>>;
  // Throws Error(kInvalid) for a number of tokens below 1.
  Sizes make(std::span<const int32_t> tokens, int32_t top_k, Engine& engine) const;
  // Replaces those that were set before.
  void set(Sizes sizes);
  std::vector<int32_t> tokens() const;

  // Returns the ticket of the layer's call of that size. Throws Error(kInvalid) for a size that was
  // not set, and if it was captured before with another dtype, top_k or `sentinels`.
  Ticket take(const DeviceCall& call);
  // Returns a call of the current or earlier sizes. Throws Error(kInvalid) if there is none.
  HostCall& at(Ticket ticket) const;

 private:
  void retire();

  const std::shared_ptr<HostWork> work_;
  Sizes sizes_;
  std::vector<Size*> retired_;  // earlier sizes that graphs have captured
  Ticket next_;                 // never given to a call before, of any sizes
};

}  // namespace torch_mesh
