#include "gpu/host_share.h"

#include <algorithm>
#include <atomic>
#include <chrono>
#include <exception>
#include <limits>
#include <string>
#include <thread>
#include <utility>

#include "base/error.h"
#include "engine/grouping.h"
#include "gpu/live_engine.h"

namespace torch_mesh {
namespace {

using Clock = std::chrono::steady_clock;

constexpr auto kPoll = std::chrono::microseconds(50);
constexpr auto kLook = std::chrono::milliseconds(100);  // for Ctrl-C and a device that is lost
constexpr auto kLastWait = std::chrono::seconds(5);     // for nodes that a lost device never runs
constexpr int64_t kAlignment = 64;

constexpr int64_t padded(int64_t bytes) {
  return (bytes + kAlignment - 1) / kAlignment * kAlignment;
}

}  // namespace

// What host nodes know. It outlives the share where a captured graph names its nodes: one that is
// launched too late computes while the engine lives, and finds it closed afterwards.
struct HostShare::Core {
  std::shared_ptr<Driver> driver;
  std::weak_ptr<Engine> engine;
  std::mutex mutex;
  UsedExperts used;
  std::exception_ptr failure;
  HostShareStats stats;

  void run(Call& call) noexcept;
  bool compute(const Call& call);
  void check() {
    const std::lock_guard lock(mutex);
    if (failure != nullptr) std::rethrow_exception(std::exchange(failure, nullptr));
  }
};

// Pinned memory of one call.
struct HostShare::Block {
  Block(Driver& driver, Engine& engine, int32_t tokens, int32_t top_k)
      : tokens(tokens),
        top_k(top_k),
        x_bytes(padded(int64_t{tokens} * engine.layout().hidden * sizeof(float))),
        ids_bytes(padded(int64_t{tokens} * top_k * sizeof(int64_t))),
        weights_bytes(padded(int64_t{tokens} * top_k * sizeof(float))),
        table_bytes(padded(int64_t{engine.pool().experts()} * sizeof(int32_t))),
        memory(driver, 2 * x_bytes + ids_bytes + weights_bytes + table_bytes),
        host_ids(static_cast<size_t>(tokens) * top_k) {}

  std::byte* x() const { return memory.data(); }
  float* out() const { return reinterpret_cast<float*>(memory.data() + x_bytes); }
  int64_t* ids() const { return reinterpret_cast<int64_t*>(memory.data() + 2 * x_bytes); }
  float* weights() const {
    return reinterpret_cast<float*>(memory.data() + 2 * x_bytes + ids_bytes);
  }
  int32_t* table() const {
    return reinterpret_cast<int32_t*>(memory.data() + 2 * x_bytes + ids_bytes + weights_bytes);
  }

  const int32_t tokens, top_k;  // at most
  const int64_t x_bytes, ids_bytes, weights_bytes, table_bytes;
  const PinnedMemory memory;
  std::vector<int64_t> host_ids;  // with the sentinel where the device has the expert
};

struct HostShare::Call {
  explicit Call(std::shared_ptr<Core> core)
      : core(std::move(core)),
        ready(*this->core->driver),
        done(*this->core->driver, /*timed=*/true),
        arrived(*this->core->driver, /*timed=*/true) {}

  const std::shared_ptr<Core> core;
  DeviceCall call{};
  Block* block = nullptr;
  int32_t hidden = 0;
  int64_t bytes_down = 0, bytes_up = 0;
  Ticket first = 0;                // of a prompt's parts, up to this one
  std::exception_ptr failure;      // under the core's mutex
  std::atomic<bool> busy = false;  // its node is in the stream and has not ended
  bool timed = false;              // joined, by a stream that was not captured
  const OwnedEvent ready, done;
  const OwnedEvent arrived;  // of the device, at the join
};

// All layers' calls of one captured size.
struct HostShare::Captured {
  Captured(const std::shared_ptr<Core>& core, Engine& engine, int32_t tokens, int32_t top_k)
      : core(core), block(*core->driver, engine, tokens, top_k) {
    for (int32_t layer = 0; layer < engine.pool().layers(); ++layer) {
      calls.push_back(std::make_unique<Call>(core));
    }
  }

  const std::shared_ptr<Core> core;          // and so the driver, which the block goes back to
  Block block;                               // of all layers: they follow each other
  std::vector<std::unique_ptr<Call>> calls;  // of each layer: its arguments live on in the graph
  Ticket first = 0;                          // the first layer's, once one was captured
  bool used() const { return first > 0; }
};

void HostShare::Core::run(Call& call) noexcept {
  const auto begin = Clock::now();
  std::exception_ptr problem;
  bool computed = true;
  try {
    computed = compute(call);
  } catch (...) {
    problem = std::current_exception();
    std::fill_n(call.block->out(), int64_t{call.call.tokens} * call.hidden,
                std::numeric_limits<float>::quiet_NaN());
  }
  {
    const std::lock_guard lock(mutex);
    ++stats.calls;
    if (!computed) ++stats.all_on_device;
    if (problem != nullptr) ++stats.failed;
    stats.bytes_down += call.bytes_down;
    stats.bytes_up += call.bytes_up;
    stats.node_seconds += std::chrono::duration<double>(Clock::now() - begin).count();
    call.failure = problem;
    if (failure == nullptr) failure = std::move(problem);
  }
  call.busy.store(false, std::memory_order_release);
}

// Whether there was anything to compute.
bool HostShare::Core::compute(const Call& call) {
  const auto live = live_engine(engine);
  const DeviceCall& device = call.call;
  Block& block = *call.block;
  const int64_t pairs = int64_t{device.tokens} * device.top_k;
  const int32_t experts = live->pool().experts();
  check_expert_ids(block.ids(), device.tokens, device.top_k, experts, device.sentinels);
  {
    const std::lock_guard lock(mutex);
    if (used) used(device.layer, {block.ids(), static_cast<size_t>(pairs)}, device.top_k);
  }

  bool any = false;
  for (int64_t i = 0; i < pairs; ++i) {
    const int64_t id = block.ids()[i];
    const bool here = id < experts && block.table()[id] < 0;
    block.host_ids[i] = here ? id : experts;
    any |= here;
  }
  // A profile shall know of what the device computes, too.
  live->pool().count_elsewhere(device.layer, {block.ids(), static_cast<size_t>(pairs)},
                               device.top_k, {block.table(), static_cast<size_t>(experts)}, !any);
  if (!any) {
    std::fill_n(block.out(), int64_t{device.tokens} * call.hidden, 0.0f);
    return false;
  }
  live->experts(ExpertsCall{.layer = device.layer,
                            .tokens = device.tokens,
                            .top_k = device.top_k,
                            .x = {block.x(), device.x_type, call.hidden},
                            .ids = block.host_ids.data(),
                            .weights = block.weights(),
                            .sentinels = true,
                            .out = {block.out(), ScalarType::kFloat32, call.hidden}});
  return true;
}

HostShare::HostShare(std::shared_ptr<Driver> driver, std::weak_ptr<Engine> engine, UsedExperts used,
                     int64_t block_bytes)
    : driver_(std::move(driver)),
      core_(std::make_shared<Core>()),
      block_bytes_(block_bytes),
      side_(*driver_),
      inputs_(*driver_),
      captured_side_(*driver_) {
  core_->driver = driver_;
  core_->engine = std::move(engine);
  core_->used = std::move(used);
  for (Ticket i = 0; i < kInFlight; ++i) calls_.push_back(std::make_unique<Call>(core_));
}

HostShare::~HostShare() {
  drain(*driver_, side_);
  const auto deadline = Clock::now() + kLastWait;
  const auto any_busy = [this] {
    return std::ranges::any_of(calls_, [](const auto& call) { return call->busy.load(); });
  };
  while (any_busy() && Clock::now() < deadline) std::this_thread::sleep_for(kPoll);
  if (any_busy()) {  // the device is lost; should its driver come back to them, they are there
    for (auto& call : calls_) static_cast<void>(call.release());
    static_cast<void>(block_.release());
  }
  retire();
  const std::lock_guard lock(core_->mutex);
  core_->used = nullptr;
}

// Never destroyed: who captured a graph may launch it at any time. And who has a ticket may ask.
void HostShare::retire() {
  static auto* in_graphs = new std::vector<std::shared_ptr<Captured>>;
  static std::mutex mutex;
  const std::lock_guard lock(mutex);
  for (auto& captured : captured_) {
    if (!captured->used()) continue;
    retired_.push_back(captured.get());
    in_graphs->push_back(std::move(captured));
  }
  captured_.clear();
}

HostShare::Ticket HostShare::submit(const DeviceCall& call, Stream stream) {
  core_->check();
  const auto engine = live_engine(core_->engine);
  const std::lock_guard lock(submitting_);
  const bool capturing = driver_->capturing(stream);
  const int32_t hidden = engine->layout().hidden;
  const int64_t token_bytes = hidden * (sizeof(float) + scalar_bytes(call.x_type)) +
                              call.top_k * (sizeof(int64_t) + sizeof(float));
  const auto most =
      static_cast<int32_t>(std::clamp<int64_t>(block_bytes_ / token_bytes, 1, INT32_MAX));
  Ticket ticket = 0, first = -1;
  try {
    for (int32_t begin = 0; begin < call.tokens; begin += most) {
      DeviceCall part = call;
      part.tokens = capturing ? call.tokens : std::min(most, call.tokens - begin);
      part.x += int64_t{begin} * hidden * scalar_bytes(call.x_type);
      part.ids += int64_t{begin} * call.top_k * sizeof(int64_t);
      part.weights += int64_t{begin} * call.top_k * sizeof(float);
      part.out += int64_t{begin} * hidden * sizeof(float);
      ticket = free_ticket(part, *engine, capturing);
      if (first < 0) first = ticket;
      Call& next = called(ticket);
      next.call = part;
      next.hidden = hidden;
      next.timed = false;
      next.first = first;
      next.failure = nullptr;
      enqueue(next, *engine, stream, capturing);
      if (capturing) break;
    }
  } catch (...) {
    // Nobody may read or write the caller's tensors once it has given them up.
    drain(*driver_, capturing ? captured_side_ : side_);
    throw;
  }
  return ticket;
}

void HostShare::join(Ticket ticket, Stream stream) {
  const std::lock_guard lock(submitting_);
  Call& call = called(ticket);
  try {
    // Within a capture nobody could ask how long the device waited.
    const bool timed = ticket < kInFlight;
    if (timed) driver_->record(call.arrived, stream);
    driver_->wait(stream, call.done);
    call.timed = timed;
  } catch (...) {
    drain(*driver_, side_);  // nobody may write to the output once the caller has given it up
    throw;
  }
}

void HostShare::set_capture_sizes(std::span<const int32_t> tokens, int32_t top_k) {
  const auto engine = live_engine(core_->engine);
  std::vector<std::shared_ptr<Captured>> captured;
  for (const int32_t size : tokens) {
    if (size < 1) {
      throw Error(ErrorKind::kInvalid,
                  "a capture size is " + std::to_string(size) + " tokens; allowed: 1 or more");
    }
    captured.push_back(std::make_shared<Captured>(core_, *engine, size, top_k));
  }
  const std::lock_guard lock(submitting_);
  retire();
  captured_ = std::move(captured);
}

std::vector<int32_t> HostShare::capture_sizes() {
  const std::lock_guard lock(submitting_);
  std::vector<int32_t> sizes;
  for (const auto& captured : captured_) sizes.push_back(captured->block.tokens);
  return sizes;
}

void HostShare::wait(Ticket ticket) {
  const auto engine = live_engine(core_->engine);
  Call* last = nullptr;
  Ticket part = 0;
  {
    const std::lock_guard lock(submitting_);
    last = &called(ticket);
    part = last->first;
  }
  wait_until_idle(*last, *engine);
  const std::lock_guard lock(core_->mutex);
  for (;; part = (part + 1) % kInFlight) {
    Call& call = ticket >= kInFlight ? *last : *calls_[part];
    if (const auto failure = std::exchange(call.failure, nullptr)) {
      if (core_->failure == failure) core_->failure = nullptr;
      std::rethrow_exception(failure);
    }
    if (part == ticket || ticket >= kInFlight) return;
  }
}

void HostShare::follow_inputs(Stream stream) { driver_->wait(stream, inputs_); }

void HostShare::synchronize() {
  driver_->synchronize(side_);
  core_->check();
}

void HostShare::check() { core_->check(); }

HostShareStats HostShare::stats() {
  const std::lock_guard submitting(submitting_);
  HostShareStats stats;
  {  // a node that waits for this must not wait for the driver
    const std::lock_guard lock(core_->mutex);
    stats = core_->stats;
  }
  for (const auto& call : calls_) {
    if (!call->timed) continue;
    if (const auto waited = driver_->seconds_between(call->arrived, call->done)) {
      stats.waited_seconds += std::max(0.0, *waited);
      ++stats.waited_calls;
    }
  }
  return stats;
}

void HostShare::reset_stats() {
  const std::lock_guard submitting(submitting_);
  const std::lock_guard lock(core_->mutex);
  core_->stats = {};
  for (const auto& call : calls_) call->timed = false;
}

HostShare::Call& HostShare::called(Ticket ticket) {
  if (ticket >= 0 && ticket < kInFlight) return *calls_[ticket];
  std::vector<Captured*> all = retired_;
  for (const auto& captured : captured_) all.push_back(captured.get());
  for (const Captured* captured : all) {
    const Ticket layer = ticket - captured->first;
    if (!captured->used() || layer < 0 || layer >= std::ssize(captured->calls)) continue;
    return *captured->calls[layer];
  }
  throw Error(ErrorKind::kInvalid, "ticket " + std::to_string(ticket) + " names no call");
}

// A call that nobody uses, with a block that is large enough.
HostShare::Ticket HostShare::free_ticket(const DeviceCall& call, Engine& engine, bool capturing) {
  if (capturing) {
    for (const auto& each : captured_) {
      Captured& captured = *each;
      if (captured.block.tokens != call.tokens || captured.block.top_k < call.top_k) continue;
      Call& layer = *captured.calls[call.layer];
      if (layer.block != nullptr &&
          (layer.call.top_k != call.top_k || layer.call.x_type != call.x_type ||
           layer.call.sentinels != call.sentinels)) {
        throw Error(ErrorKind::kInvalid,
                    "a call of " + std::to_string(call.tokens) +
                        " tokens was captured before with another dtype or number of experts a "
                        "token; set the capture sizes again before");
      }
      if (!captured.used()) {
        captured.first = next_captured_;
        next_captured_ += static_cast<Ticket>(captured.calls.size());
      }
      layer.block = &captured.block;
      return captured.first + call.layer;
    }
    throw Error(ErrorKind::kInvalid,
                "a call of " + std::to_string(call.tokens) +
                    " tokens is being captured, for which there are no buffers: "
                    "call torch_mesh.set_capture_batch_sizes(model, [" +
                    std::to_string(call.tokens) + "]) before");
  }
  const Ticket ticket = std::exchange(next_, (next_ + 1) % kInFlight);
  Call& next = *calls_[ticket];
  wait_until_idle(next, engine);
  if (block_ == nullptr || block_->tokens < call.tokens || block_->top_k < call.top_k) {
    driver_->synchronize(side_);  // copies from and to the smaller one
    // Of a prompt's parts the first is the longest, so that this does not happen within it.
    const int32_t tokens = std::max(call.tokens, block_ ? block_->tokens : 0);
    const int32_t top_k = std::max(call.top_k, block_ ? block_->top_k : 0);
    block_.reset();  // first: there may not be room for both
    block_ = std::make_unique<Block>(*driver_, engine, tokens, top_k);
  }
  next.block = block_.get();
  return ticket;
}

void HostShare::wait_until_idle(const Call& call, Engine& engine) {
  auto look = Clock::now() + kLook;
  while (call.busy.load(std::memory_order_acquire)) {
    std::this_thread::sleep_for(kPoll);
    if (Clock::now() < look) continue;
    look = Clock::now() + kLook;
    static_cast<void>(driver_->done(call.done));  // throws where the device is lost
    const auto interrupted = engine.runtime().interrupted;
    if (interrupted != nullptr && interrupted()) {
      throw Error(ErrorKind::kInterrupted, "interrupted while waiting for the device");
    }
  }
}

void HostShare::enqueue(Call& call, Engine& engine, Stream stream, bool capturing) {
  const Stream side = capturing ? captured_side_ : side_;
  const DeviceCall& device = call.call;
  const Block& block = *call.block;
  const int64_t pairs = int64_t{device.tokens} * device.top_k;
  const int64_t values = int64_t{device.tokens} * call.hidden;
  const int64_t x_bytes = values * scalar_bytes(device.x_type);
  const int64_t out_bytes = values * static_cast<int64_t>(sizeof(float));
  const int64_t table_bytes = engine.pool().experts() * static_cast<int64_t>(sizeof(int32_t));
  const int64_t ids_bytes = pairs * static_cast<int64_t>(sizeof(int64_t));
  const int64_t weights_bytes = pairs * static_cast<int64_t>(sizeof(float));
  call.bytes_down = x_bytes + ids_bytes + weights_bytes + table_bytes;
  call.bytes_up = out_bytes;
  driver_->record(call.ready, stream);
  driver_->wait(side, call.ready);
  driver_->copy_down(block.x(), device.x, x_bytes, side);
  driver_->copy_down(block.ids(), device.ids, ids_bytes, side);
  driver_->copy_down(block.weights(), device.weights, weights_bytes, side);
  driver_->copy_down(block.table(), device.table, table_bytes, side);
  if (!capturing) driver_->record(inputs_, side);
  call.busy = true;
  try {
    driver_->launch_host(
        side,
        [](void* argument) {
          auto& call = *static_cast<Call*>(argument);
          call.core->run(call);
        },
        &call);
  } catch (...) {
    call.busy = false;
    throw;
  }
  driver_->copy_up(device.out, block.out(), out_bytes, side);
  driver_->record(call.done, side);
}

}  // namespace torch_mesh
