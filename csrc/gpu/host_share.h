// The host's share of a layer whose experts are partly on a device, partly in the pool. Hidden
// states, ids and routing weights are copied to the host in a separate stream. There a host node
// computes the experts that the device does not have, promoting cold ones, and their sum is copied
// to the device. The device computes its own experts meanwhile; the submitting thread waits for
// neither.
//
// The device's table says which experts it has, and is copied with the rest. So table and share
// agree however far the host has run ahead, and when a captured graph is launched again.
//
// This class enqueues work in streams. TicketRing and CapturedCalls own calls and their memory;
// HostWork runs their nodes.
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
  // `engine` is that of the pool with the layer's other experts; calls after its end fail. A prompt
  // that needs more than `block_bytes` of pinned memory is split into parts.
  HostShare(std::shared_ptr<Driver> driver, std::weak_ptr<Engine> engine,
            UsedExperts used = nullptr, int64_t block_bytes = int64_t{64} << 20);
  // Waits for pending calls. Pinned memory that a captured graph may still use is kept.
  ~HostShare();
  HostShare(const HostShare&) = delete;
  HostShare& operator=(const HostShare&) = delete;

  // Enqueues a call after all work of `stream`. Returns without waiting, unless kInFlight calls are
  // pending or a prompt longer than any before needs larger buffers. Throws a pending error of a
  // host node, before more is computed from its output. Throws Error(kInvalid) for a captured call
  // of a size that was not set.
  Ticket submit(const DeviceCall& call, Stream stream);
  // Work enqueued in `stream` from now on begins after the sum is in the call's output.
  void join(Ticket ticket, Stream stream);

  // Waits until the call's node has ended, and throws its error. To be called before kInFlight
  // other calls are submitted, which reuse the ticket. Throws Error(kInvalid) for a captured call,
  // whose node runs at every launch of its graph: wait for the stream of the launch, then call
  // check().
  void wait(Ticket ticket);

  // Work enqueued in `stream` from now on begins after tables and inputs of all calls so far have
  // been read. Changes of the table have to wait for that.
  void follow_inputs(Stream stream);

  // Sets buffers for captured calls of these numbers of tokens, with top_k experts a token. They
  // replace those that were set before. Graphs of one size share buffers, and so must be launched
  // in one stream. Graphs that were captured with earlier buffers keep those.
  void set_capture_sizes(std::span<const int32_t> tokens, int32_t top_k);
  std::vector<int32_t> capture_sizes();

  // Waits for all host nodes of calls that were not captured, then calls check().
  void synchronize();
  // Throws a pending error of a host node, once: the first since the last one thrown. The output of
  // a failed node is NaN.
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
  OwnedEvent inputs_;          // inputs of the last uncaptured call are copied
  OwnedStream captured_side_;  // a stream belongs to a capture until that ends

  std::mutex submitting_;  // keeps a call's operations together in the side stream
  TicketRing ring_;
  CapturedCalls captured_;
};

}  // namespace torch_mesh
