// The calls that graphs have captured, with pinned memory of their own: who captured a graph may
// launch it at any time.
#pragma once

#include <cstdint>
#include <memory>
#include <span>
#include <vector>

#include "gpu/host_work.h"

namespace torch_mesh {

// Not safe from several threads at once, but for make().
class CapturedCalls {
 public:
  // Tickets begin at `first`.
  CapturedCalls(std::shared_ptr<HostWork> work, Ticket first)
      : work_(std::move(work)), next_(first) {}
  // What a captured graph may still name stays.
  ~CapturedCalls() { retire(); }
  CapturedCalls(const CapturedCalls&) = delete;
  CapturedCalls& operator=(const CapturedCalls&) = delete;

  // All layers' calls of one number of tokens, on one block: they follow each other.
  struct Size;
  using Sizes = std::vector<std::shared_ptr<Size>>;
  // Throws Error(kInvalid) for a number of tokens below 1.
  Sizes make(std::span<const int32_t> tokens, int32_t top_k, Engine& engine) const;
  // In place of those that were set before.
  void set(Sizes sizes);
  std::vector<int32_t> tokens() const;

  // The layer's call of that size. Error(kInvalid) for a size that was not set, and where it was
  // captured before as another kind of call.
  Ticket take(const DeviceCall& call);
  // One of those sizes or of earlier ones. Error(kInvalid) where there is none.
  HostCall& at(Ticket ticket) const;

 private:
  void retire();

  const std::shared_ptr<HostWork> work_;
  Sizes sizes_;
  std::vector<Size*> retired_;  // of earlier sizes, where graphs have captured them
  Ticket next_;                 // of no call before, whatever sizes were set
};

}  // namespace torch_mesh
