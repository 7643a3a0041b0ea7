// The host's share of a layer whose experts lie partly on a device, partly in the pool: hidden
// states, ids and routing weights come down a stream of its own, a host node computes the experts
// that the device does not have, promotions and all, and their sum goes up again. The device
// computes its own experts meanwhile, and the thread that asks waits for neither.
//
// Which experts are whose is read from the device's own table, which comes down with the rest:
// table and share then agree however far the host has run ahead, and when a captured graph is
// launched again.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <mutex>
#include <span>
#include <vector>

#include "engine/engine.h"
#include "gpu/driver.h"

namespace torch_mesh {

// One forward as it lies on the device, without gaps between rows. All of it has to stay there
// until the call is joined.
struct DeviceCall {
  int32_t layer;
  int32_t tokens, top_k;
  DeviceAddress x;  // [tokens][hidden]
  ScalarType x_type;
  DeviceAddress ids;      // int64 [tokens][top_k]
  DeviceAddress weights;  // fp32 [tokens][top_k]
  DeviceAddress table;    // int32 [experts]: the expert's slot on the device, or -1
  DeviceAddress out;      // fp32 [tokens][hidden]
  bool sentinels;         // as in ExpertsCall
};

struct HostShareStats {
  int64_t calls = 0;
  int64_t all_on_device = 0;  // calls for which the host had nothing to compute
  int64_t failed = 0;
  int64_t bytes_down = 0, bytes_up = 0;
  double node_seconds = 0;  // in host nodes
  // How long the device had done its own and waited for the host, over the last calls that are
  // known to have ended; a captured one is never known.
  double waited_seconds = 0;
  int64_t waited_calls = 0;
};

// Told of every id that a host node sees, one node at a time.
using UsedExperts = std::function<void(int32_t layer, std::span<const int64_t> ids, int32_t top_k)>;

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

  // Names a call until it is joined; a captured one for good.
  using Ticket = int32_t;

  // Behind all that `stream` has been given. Returns without waiting, unless kInFlight calls are
  // under way or a longer prompt than ever needs larger buffers. Throws what a host node kept, so
  // that it is known before more is computed from it; Error(kInvalid) for a captured call of a
  // size that was not set.
  Ticket submit(const DeviceCall& call, Stream stream);
  // What `stream` is given from now on comes after the sum.
  void join(Ticket ticket, Stream stream);

  // Waits until the call's node has ended; throws what the node failed with. Before kInFlight
  // others are submitted, or it is forgotten.
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

  static constexpr int32_t kInFlight = 64;

 private:
  struct Block;
  struct Core;
  struct Call;
  struct Captured;

  Ticket free_ticket(const DeviceCall& call, Engine& engine, bool capturing);
  Call& called(Ticket ticket);
  void wait_until_idle(const Call& call, Engine& engine);
  void enqueue(Call& call, Engine& engine, Stream stream, bool capturing);
  void retire();

  std::shared_ptr<Driver> driver_;
  std::shared_ptr<Core> core_;  // what host nodes know
  const int64_t block_bytes_;
  OwnedStream side_;
  OwnedEvent inputs_;          // of the last call that was not captured have come down
  OwnedStream captured_side_;  // a stream belongs to a capture until that ends

  std::mutex submitting_;         // a call's operations stand together in the side stream
  std::unique_ptr<Block> block_;  // of all calls that are not captured: they follow each other
  std::vector<std::unique_ptr<Call>> calls_;
  Ticket next_ = 0;
  std::vector<std::shared_ptr<Captured>> captured_;
  std::vector<Captured*> retired_;    // of earlier sizes, where graphs have captured them
  Ticket next_captured_ = kInFlight;  // of no call before, whatever sizes were set
};

}  // namespace torch_mesh
