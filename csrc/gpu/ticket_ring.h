// The pending calls of one stream, in a ring of reused entries. One block of pinned memory serves
// them all, since they run one after another.
#pragma once

#include <memory>
#include <vector>

#include "gpu/host_work.h"

namespace torch_mesh {

// Only operator[] is safe from several threads at once.
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

  // The call that take() takes next, which may still be busy.
  HostCall& next() { return *calls_[next_]; }
  // Takes next(), which has to be idle, and returns its ticket. Its buffers fit `call`; waits for
  // all calls if they have to grow.
  Ticket take(const DeviceCall& call, Engine& engine);

  // Adds how long the device waited, over the calls that are known to have ended.
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
