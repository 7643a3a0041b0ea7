// The host's work for a call. A node in a stream reads the inputs from pinned memory, has the
// engine compute the experts that the device does not have, and writes their sum to pinned memory.
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

// The tensors of one forward on the device, contiguous. They have to stay allocated until the call
// is joined.
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
  // How long the device waited for the host after computing its own experts, over the last calls
  // that are known to have ended. Captured calls are never known to have.
  double waited_seconds = 0;
  int64_t waited_calls = 0;
};

// Called with all ids that a host node sees, by one node at a time.
using UsedExperts = std::function<void(int32_t layer, std::span<const int64_t> ids, int32_t top_k)>;

// Names a call until it is joined; a captured one for good.
using Ticket = int32_t;

// Pinned memory of one call, and what else its node needs.
class CallBuffers {
 public:
  // For calls of at most `tokens` tokens with `top_k` experts each.
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

// One call and its node, to which a stream or a graph refers by address.
struct HostCall {
  explicit HostCall(std::shared_ptr<HostWork> work);

  // Waits until its node has ended. Calls the interrupt hook, so the caller must hold no lock.
  // Throws if the device is lost, and Error(kInterrupted).
  void wait_until_idle(const Runtime& runtime) const;

  const std::shared_ptr<HostWork> work;
  DeviceCall call{};
  CallBuffers* buffers = nullptr;
  int32_t hidden = 0;
  int64_t bytes_down = 0, bytes_up = 0;
  Ticket part_before = -1;         // the prompt's part before; -1: this is the first
  std::exception_ptr failure;      // under the lock of `work`
  std::atomic<bool> busy = false;  // its node has not ended; never set if captured
  bool timed = false;              // joined, by a stream that was not captured
  const OwnedEvent ready, done;
  const OwnedEvent arrived;  // the device has reached the join
};

// The state of host nodes. It outlives the share if a captured graph contains a node. A node that
// is launched after the share's end computes while the engine lives, and fails once it is closed.
class HostWork {
 public:
  HostWork(std::shared_ptr<Driver> driver, std::weak_ptr<Engine> engine, UsedExperts used)
      : driver_(std::move(driver)), engine_(std::move(engine)), used_(std::move(used)) {}

  Driver& driver() const { return *driver_; }
  const std::weak_ptr<Engine>& engine() const { return engine_; }

  // Runs the node of a call. An error makes the output NaN and is kept.
  void run(HostCall& call) noexcept;
  // Throws the first error since the last one thrown.
  void check();
  // Throws the error of this call, once: neither check() throws it again.
  void check(HostCall& call);
  // Stops calling `used`.
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
