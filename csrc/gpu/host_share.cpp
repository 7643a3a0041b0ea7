#include "gpu/host_share.h"

#include <algorithm>
#include <ranges>
#include <utility>

#include "base/error.h"
#include "gpu/live_engine.h"

namespace torch_mesh {

HostShare::HostShare(std::shared_ptr<Driver> driver, std::weak_ptr<Engine> engine, UsedExperts used,
                     int64_t block_bytes)
    : driver_(std::move(driver)),
      work_(std::make_shared<HostWork>(driver_, std::move(engine), std::move(used))),
      block_bytes_(block_bytes),
      side_(*driver_),
      inputs_(*driver_),
      captured_side_(*driver_),
      ring_(work_, side_),
      captured_(work_, /*first=*/kInFlight) {}

HostShare::~HostShare() { work_->forget_used(); }

Ticket HostShare::submit(const DeviceCall& call, Stream stream) {
  work_->check();
  const auto engine = live_engine(work_->engine());
  const bool capturing = driver_->capturing(stream);
  const int32_t hidden = engine->layout().hidden;
  const int64_t token_bytes = hidden * (sizeof(float) + scalar_bytes(call.x_type)) +
                              call.top_k * (sizeof(int64_t) + sizeof(float));
  const auto max_tokens =
      static_cast<int32_t>(std::clamp<int64_t>(block_bytes_ / token_bytes, 1, INT32_MAX));
  Ticket ticket = -1;
  try {
    for (int32_t begin = 0; begin < call.tokens; begin += max_tokens) {
      DeviceCall part = call;
      part.tokens = capturing ? call.tokens : std::min(max_tokens, call.tokens - begin);
      part.x += int64_t{begin} * hidden * scalar_bytes(call.x_type);
      part.ids += int64_t{begin} * call.top_k * sizeof(int64_t);
      part.weights += int64_t{begin} * call.top_k * sizeof(float);
      part.out += int64_t{begin} * hidden * sizeof(float);
      ticket = submit_part(part, ticket, *engine, stream, capturing);
      if (capturing) break;
    }
  } catch (...) {
    // After the error the caller may free its tensors, so no earlier part may still use them.
    if (ticket >= 0) drain(*driver_, side_);
    throw;
  }
  return ticket;
}

// Waits for a ticket without the lock, since the interrupt hook may join other calls. Calls that it
// or other threads submit meanwhile come between a prompt's parts.
Ticket HostShare::submit_part(const DeviceCall& call, Ticket part_before, Engine& engine,
                              Stream stream, bool capturing) {
  std::unique_lock lock(submitting_);
  while (!capturing && ring_.next().busy) {
    const HostCall& next = ring_.next();
    lock.unlock();
    next.wait_until_idle(engine.runtime());
    lock.lock();
  }
  const Ticket ticket = capturing ? captured_.take(call) : ring_.take(call, engine);
  HostCall& taken = called(ticket);
  taken.call = call;
  taken.hidden = engine.layout().hidden;
  taken.timed = false;
  taken.part_before = part_before;
  taken.failure = nullptr;
  try {
    enqueue(taken, engine, stream, capturing);
  } catch (...) {
    drain(*driver_, capturing ? captured_side_ : side_);
    throw;
  }
  return ticket;
}

void HostShare::enqueue(HostCall& call, Engine& engine, Stream stream, bool capturing) {
  const Stream side = capturing ? captured_side_ : side_;
  const DeviceCall& device = call.call;
  const CallBuffers& buffers = *call.buffers;
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
  driver_->copy_down(buffers.x(), device.x, x_bytes, side);
  driver_->copy_down(buffers.ids(), device.ids, ids_bytes, side);
  driver_->copy_down(buffers.weights(), device.weights, weights_bytes, side);
  driver_->copy_down(buffers.table(), device.table, table_bytes, side);
  if (!capturing) driver_->record(inputs_, side);
  call.busy = !capturing;  // launches of a captured call are not known
  try {
    driver_->launch_host(
        side,
        [](void* argument) {
          auto& call = *static_cast<HostCall*>(argument);
          call.work->run(call);
        },
        &call);
  } catch (...) {
    call.busy = false;
    throw;
  }
  driver_->copy_up(device.out, buffers.out(), out_bytes, side);
  driver_->record(call.done, side);
}

void HostShare::join(Ticket ticket, Stream stream) {
  const std::lock_guard lock(submitting_);
  HostCall& call = called(ticket);
  try {
    // In a capture no thread could query how long the device waited.
    const bool timed = TicketRing::names(ticket);
    if (timed) driver_->record(call.arrived, stream);
    driver_->wait(stream, call.done);
    call.timed = timed;
  } catch (...) {
    drain(*driver_, side_);  // the caller may free the output after the error
    throw;
  }
}

void HostShare::wait(Ticket ticket) {
  if (!TicketRing::names(ticket)) {
    throw_invalid("ticket ", ticket,
                  " is of a captured call, or of none: nothing here knows when its graph is "
                  "launched. Wait for the stream of the launch, then call check()");
  }
  const auto engine = live_engine(work_->engine());
  std::vector<HostCall*> parts;  // the last one first
  {
    const std::lock_guard lock(submitting_);
    for (Ticket part = ticket; part >= 0 && std::ssize(parts) < kInFlight;) {
      parts.push_back(&ring_[part]);
      part = parts.back()->part_before;
    }
  }
  parts.front()->wait_until_idle(engine->runtime());
  for (HostCall* part : parts | std::views::reverse) work_->check(*part);
}

void HostShare::follow_inputs(Stream stream) { driver_->wait(stream, inputs_); }

void HostShare::set_capture_sizes(std::span<const int32_t> tokens, int32_t top_k) {
  auto sizes = captured_.make(tokens, top_k, *live_engine(work_->engine()));
  const std::lock_guard lock(submitting_);
  captured_.set(std::move(sizes));
}

std::vector<int32_t> HostShare::capture_sizes() {
  const std::lock_guard lock(submitting_);
  return captured_.tokens();
}

void HostShare::synchronize() {
  driver_->synchronize(side_);
  work_->check();
}

void HostShare::check() { work_->check(); }

HostShareStats HostShare::stats() {
  const std::lock_guard lock(submitting_);
  HostShareStats stats = work_->stats();
  ring_.add_waits(stats);
  return stats;
}

void HostShare::reset_stats() {
  const std::lock_guard lock(submitting_);
  work_->reset_stats();
  ring_.forget_waits();
}

HostCall& HostShare::called(Ticket ticket) {
  return TicketRing::names(ticket) ? ring_[ticket] : captured_.at(ticket);
}

}  // namespace torch_mesh
