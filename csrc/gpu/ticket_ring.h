// The calls that are under way in one stream: they take turns in a ring, and one block of pinned
// memory serves them all, since they follow each other.
#pragma once

#include <memory>
#include <vector>

#include "gpu/host_work.h"

namespace torch_mesh {

// Not safe from several threads at once, but for operator[].
class TicketRing {
 public:
  static constexpr Ticket kInFlight = 64;

  TicketRing(std::shared_ptr<HostWork> work, Stream stream);
  // Waits for the nodes of all calls.
  ~TicketRing();
  TicketRing(const TicketRing&) = delete;
  TicketRing& operator=(const TicketRing&) = delete;

  static bool names(Ticket ticket) { return ticket >= 0 && ticket < kInFlight; }
  static Ticket after(Ticket ticket) { return (ticket + 1) % kInFlight; }
  HostCall& operator[](Ticket ticket) { return *calls_[ticket]; }

  // The call whose turn it is, which may still be busy.
  HostCall& next() { return *calls_[next_]; }
  // Its ticket, with buffers that `call` fits in: next() has to be idle. Waits for all calls where
  // the buffers were too small.
  Ticket take(const DeviceCall& call, Engine& engine);

  // Adds how long the device waited for those that are known to have ended.
  void add_waits(HostShareStats& stats) const;
  void forget_waits();

 private:
  const std::shared_ptr<HostWork> work_;
  const Stream stream_;
  std::unique_ptr<CallBuffers> buffers_;
  std::vector<std::unique_ptr<HostCall>> calls_;
  Ticket next_ = 0;
};

}  // namespace torch_mesh
