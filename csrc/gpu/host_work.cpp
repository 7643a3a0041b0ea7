#include "gpu/host_work.h"

#include <algorithm>
#include <chrono>
#include <limits>
#include <thread>
#include <utility>

#include "base/error.h"
#include "base/interrupts.h"
#include "engine/grouping.h"
#include "gpu/live_engine.h"

namespace torch_mesh {
namespace {

using Clock = std::chrono::steady_clock;

constexpr auto kPoll = std::chrono::microseconds(50);
constexpr int64_t kAlignment = 64;

// The aligned offset after `count` values of T at `begin`.
template <typename T>
constexpr int64_t after(int64_t begin, int64_t count) {
  return begin + round_up(count * static_cast<int64_t>(sizeof(T)), kAlignment);
}

}  // namespace

CallBuffers::CallBuffers(Driver& driver, Engine& engine, int32_t tokens, int32_t top_k)
    : tokens(tokens),
      top_k(top_k),
      host_ids(static_cast<size_t>(tokens) * top_k),
      out_(after<float>(0, int64_t{tokens} * engine.layout().hidden)),
      ids_(after<float>(out_, int64_t{tokens} * engine.layout().hidden)),
      weights_(after<int64_t>(ids_, int64_t{tokens} * top_k)),
      table_(after<float>(weights_, int64_t{tokens} * top_k)),
      memory_(driver, after<int32_t>(table_, engine.pool().experts())) {}

HostCall::HostCall(std::shared_ptr<HostWork> work)
    : work(std::move(work)),
      ready(this->work->driver()),
      done(this->work->driver(), /*timed=*/true),
      arrived(this->work->driver(), /*timed=*/true) {}

void HostCall::wait_until_idle(const Runtime& runtime) const {
  auto look = Clock::now() + kInterruptSlice;
  while (busy.load(std::memory_order_acquire)) {
    std::this_thread::sleep_for(kPoll);
    if (Clock::now() < look) continue;
    look = Clock::now() + kInterruptSlice;
    static_cast<void>(work->driver().done(done));  // throws if the device is lost
    check_interrupted(runtime, "waiting for the device");
  }
}

void HostWork::run(HostCall& call) noexcept {
  const auto begin = Clock::now();
  std::exception_ptr problem;
  bool computed = true;
  try {
    computed = compute(call);
  } catch (...) {
    problem = std::current_exception();
    std::fill_n(call.buffers->out(), int64_t{call.call.tokens} * call.hidden,
                std::numeric_limits<float>::quiet_NaN());
  }
  {
    const std::lock_guard lock(mutex_);
    ++stats_.calls;
    if (!computed) ++stats_.all_on_device;
    if (problem != nullptr) ++stats_.failed;
    stats_.bytes_down += call.bytes_down;
    stats_.bytes_up += call.bytes_up;
    stats_.node_seconds += std::chrono::duration<double>(Clock::now() - begin).count();
    call.failure = problem;
    if (failure_ == nullptr) failure_ = std::move(problem);
  }
  call.busy.store(false, std::memory_order_release);
}

// Returns whether the host had anything to compute.
bool HostWork::compute(const HostCall& call) {
  const auto live = live_engine(engine_);
  const DeviceCall& device = call.call;
  CallBuffers& buffers = *call.buffers;
  const std::span<const int64_t> ids(buffers.ids(),
                                     static_cast<size_t>(device.tokens) * device.top_k);
  const int32_t experts = live->pool().experts();
  check_expert_ids(ids.data(), device.tokens, device.top_k, experts, device.sentinels);
  {
    const std::lock_guard lock(mutex_);
    if (used_) used_(device.layer, ids, device.top_k);
  }

  bool any = false;
  for (size_t i = 0; i < ids.size(); ++i) {
    const bool here = ids[i] < experts && buffers.table()[ids[i]] < 0;
    buffers.host_ids[i] = here ? ids[i] : experts;
    any |= here;
  }
  // Profiles count the experts that the device computes, too.
  live->pool().count_on_gpu(device.layer, ids, device.top_k,
                            {buffers.table(), static_cast<size_t>(experts)}, !any);
  if (!any) {
    std::fill_n(buffers.out(), int64_t{device.tokens} * call.hidden, 0.0f);
    return false;
  }
  live->experts(ExpertsCall{.layer = device.layer,
                            .tokens = device.tokens,
                            .top_k = device.top_k,
                            .x = {buffers.x(), device.x_type, call.hidden},
                            .ids = buffers.host_ids.data(),
                            .weights = buffers.weights(),
                            .sentinels = true,
                            .out = {buffers.out(), ScalarType::kFloat32, call.hidden}});
  return true;
}

void HostWork::check() {
  const std::lock_guard lock(mutex_);
  if (failure_ != nullptr) std::rethrow_exception(std::exchange(failure_, nullptr));
}

void HostWork::check(HostCall& call) {
  const std::lock_guard lock(mutex_);
  if (call.failure == nullptr) return;
  if (failure_ == call.failure) failure_ = nullptr;
  std::rethrow_exception(std::exchange(call.failure, nullptr));
}

void HostWork::forget_used() {
  const std::lock_guard lock(mutex_);
  used_ = nullptr;
}

HostShareStats HostWork::stats() const {
  const std::lock_guard lock(mutex_);
  return stats_;
}

void HostWork::reset_stats() {
  const std::lock_guard lock(mutex_);
  stats_ = {};
}

}  // namespace torch_mesh
