// What the host does of a call: a node in a stream finds the inputs in pinned memory, asks the
// engine for the experts that the device does not have, and leaves their sum there.
#pragma once

#include <atomic>
#include <cstdint>
#include <exception>
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

// Names a call until it is joined; a captured one for good.
using Ticket = int32_t;

// Pinned memory of one call, and what its node needs beside that.
class CallBuffers {
 public:
  // For calls of so many tokens and experts a token at most.
  CallBuffers(Driver& driver, Engine& engine, int32_t tokens, int32_t top_k);

  std::byte* x() const { return memory_.data(); }
  float* out() const { return reinterpret_cast<float*>(memory_.data() + out_); }
  int64_t* ids() const { return reinterpret_cast<int64_t*>(memory_.data() + ids_); }
  float* weights() const { return reinterpret_cast<float*>(memory_.data() + weights_); }
  int32_t* table() const { return reinterpret_cast<int32_t*>(memory_.data() + table_); }

  const int32_t tokens, top_k;
  std::vector<int64_t> host_ids;  // with the sentinel where the device has the expert

 private:
  const int64_t out_, ids_, weights_, table_;  // where each begins
  const PinnedMemory memory_;
};

class HostWork;

// One call and its node, which a stream or a graph knows by address.
struct HostCall {
  explicit HostCall(std::shared_ptr<HostWork> work);

  // Until its node has ended. Asks the interrupt hook, so the caller holds no lock. Throws where
  // the device is lost, and Error(kInterrupted).
  void wait_until_idle(const Runtime& runtime) const;

  const std::shared_ptr<HostWork> work;
  DeviceCall call{};
  CallBuffers* buffers = nullptr;
  int32_t hidden = 0;
  int64_t bytes_down = 0, bytes_up = 0;
  Ticket part_before = -1;         // of the same prompt; -1: this is the first
  std::exception_ptr failure;      // under the lock of `work`
  std::atomic<bool> busy = false;  // its node has not ended; never of a captured call
  bool timed = false;              // joined, by a stream that was not captured
  const OwnedEvent ready, done;
  const OwnedEvent arrived;  // of the device, at the join
};

// What host nodes know. It outlives the share where a captured graph names its nodes: one that is
// launched too late computes while the engine lives, and finds it closed afterwards.
class HostWork {
 public:
  HostWork(std::shared_ptr<Driver> driver, std::weak_ptr<Engine> engine, UsedExperts used)
      : driver_(std::move(driver)), engine_(std::move(engine)), used_(std::move(used)) {}

  Driver& driver() const { return *driver_; }
  const std::weak_ptr<Engine>& engine() const { return engine_; }

  // The node of a call. What fails makes its output NaN and is kept.
  void run(HostCall& call) noexcept;
  // Throws the first failure since the last that was thrown.
  void check();
  // Throws what this call failed with, once; no later caller is told.
  void check(HostCall& call);
  // `used` is not told any more.
  void forget_used();

  HostShareStats stats() const;
  void reset_stats();

 private:
  bool compute(const HostCall& call);

  const std::shared_ptr<Driver> driver_;
  const std::weak_ptr<Engine> engine_;
  mutable std::mutex mutex_;
  UsedExperts used_;
  std::exception_ptr failure_;
  HostShareStats stats_;
};

}  // namespace torch_mesh
