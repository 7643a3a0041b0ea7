#include "gpu/ticket_ring.h"

#include <algorithm>
#include <chrono>
#include <thread>
#include <utility>

namespace torch_mesh {
namespace {

using Clock = std::chrono::steady_clock;

constexpr auto kPoll = std::chrono::microseconds(50);
constexpr auto kLastWait = std::chrono::seconds(5);  // for nodes that a lost device never runs

}  // namespace

TicketRing::TicketRing(std::shared_ptr<HostWork> work, Stream stream)
    : work_(std::move(work)), stream_(stream) {
  for (Ticket i = 0; i < kInFlight; ++i) calls_.push_back(std::make_unique<HostCall>(work_));
}

TicketRing::~TicketRing() {
  drain(work_->driver(), stream_);
  const auto deadline = Clock::now() + kLastWait;
  const auto any_busy = [this] {
    return std::ranges::any_of(calls_, [](const auto& call) { return call->busy.load(); });
  };
  while (any_busy() && Clock::now() < deadline) std::this_thread::sleep_for(kPoll);
  if (!any_busy()) return;
  // The device is lost. Its driver may still run these calls, so they and their buffers are leaked.
  for (auto& call : calls_) static_cast<void>(call.release());
  static_cast<void>(buffers_.release());
}

Ticket TicketRing::take(const DeviceCall& call, Engine& engine) {
  const Ticket ticket = std::exchange(next_, after(next_));
  if (buffers_ == nullptr || buffers_->tokens < call.tokens || buffers_->top_k < call.top_k) {
    work_->driver().synchronize(stream_);  // waits for copies from and to the smaller ones
    const int32_t tokens = std::max(call.tokens, buffers_ ? buffers_->tokens : 0);
    const int32_t top_k = std::max(call.top_k, buffers_ ? buffers_->top_k : 0);
    buffers_.reset();  // first: there may not be room for both
    buffers_ = std::make_unique<CallBuffers>(work_->driver(), engine, tokens, top_k);
  }
  calls_[ticket]->buffers = buffers_.get();
  return ticket;
}

void TicketRing::add_waits(HostShareStats& stats) const {
  for (const auto& call : calls_) {
    if (!call->timed) continue;
    if (const auto waited = work_->driver().seconds_between(call->arrived, call->done)) {
      stats.waited_seconds += std::max(0.0, *waited);
      ++stats.waited_calls;
    }
  }
}

void TicketRing::forget_waits() {
  for (const auto& call : calls_) call->timed = false;
}

}  // namespace torch_mesh
