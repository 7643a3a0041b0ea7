// The host's share of a layer whose experts lie partly on a device, partly in the pool: hidden
// states, ids and routing weights come down a stream of its own, a host node computes the experts
// that the device does not have, promotions and all, and their sum goes up again. The device
// computes its own experts meanwhile, and the thread that asks waits for neither.
//
// Which experts are whose is read from the device's own table, which comes down with the rest:
// table and share then agree however far the host has run ahead, and when a captured graph is
// launched again.
//
// Here is what goes into streams. A call and its memory are of the TicketRing, or of CapturedCalls;
// what its node does is HostWork's.
#pragma once

#include <cstdint>
#include <memory>
#include <mutex>
#include <span>
#include <vector>

#include "gpu/captured_calls.h"
#include "gpu/host_work.h"
#include "gpu/ticket_ring.h"

namespace torch_mesh {

class HostShare {
 public:
  // `engine`: of the pool that holds the layer's other experts; a call after its end fails. A
  // prompt that needs more than `block_bytes` of pinned memory comes in parts.
  HostShare(std::shared_ptr<Driver> driver, std::weak_ptr<Engine> engine,
            UsedExperts used = nullptr, int64_t block_bytes = int64_t{64} << 20);
  // Waits for what is under way. Pinned memory that a captured graph may still name stays.
  ~HostShare();
  HostShare(const HostShare&) = delete;
  HostShare& operator=(const HostShare&) = delete;

  // Behind all that `stream` has been given. Returns without waiting, unless kInFlight calls are
  // under way or a longer prompt than ever needs larger buffers. Throws what a host node kept, so
  // that it is known before more is computed from it; Error(kInvalid) for a captured call of a
  // size that was not set.
  Ticket submit(const DeviceCall& call, Stream stream);
  // What `stream` is given from now on comes after the sum.
  void join(Ticket ticket, Stream stream);

  // Waits until the call's node has ended; throws what the node failed with. Before kInFlight
  // others are submitted, or it is forgotten. Error(kInvalid) for a captured call, whose node runs
  // whenever its graph is launched: who launches it waits for the stream, and then asks check().
  void wait(Ticket ticket);

  // What `stream` is given from here on comes after all tables and inputs of calls so far have been
  // read: what changes the table has to wait for that.
  void follow_inputs(Stream stream);

  // Buffers for captured calls of so many tokens each, top_k experts a token, in place of those
  // that were set before. Graphs of one size share theirs, and so must be launched in one stream;
  // those that were captured with earlier ones keep them.
  void set_capture_sizes(std::span<const int32_t> tokens, int32_t top_k);
  std::vector<int32_t> capture_sizes();

  // Waits for all host nodes of calls that were not captured; then throws what a node kept, once.
  void synchronize();
  // Throws what a node kept, once: the first failure since the last. Its output was NaN.
  void check();

  HostShareStats stats();
  void reset_stats();

  static constexpr Ticket kInFlight = TicketRing::kInFlight;

 private:
  HostCall& called(Ticket ticket);
  Ticket submit_part(const DeviceCall& call, Ticket part_before, Engine& engine, Stream stream,
                     bool capturing);
  void enqueue(HostCall& call, Engine& engine, Stream stream, bool capturing);

  const std::shared_ptr<Driver> driver_;
  const std::shared_ptr<HostWork> work_;
  const int64_t block_bytes_;
  OwnedStream side_;
  OwnedEvent inputs_;          // of the last call that was not captured have come down
  OwnedStream captured_side_;  // a stream belongs to a capture until that ends

  std::mutex submitting_;  // a call's operations stand together in the side stream
  TicketRing ring_;
  CapturedCalls captured_;
};

}  // namespace torch_mesh
