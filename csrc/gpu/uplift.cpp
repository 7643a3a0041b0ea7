#include "gpu/uplift.h"

#include <algorithm>
#include <chrono>
#include <cstring>
#include <string>
#include <thread>
#include <utility>

#include "base/error.h"

namespace torch_mesh {
namespace {

constexpr auto kPoll = std::chrono::microseconds(20);
constexpr int64_t kCopyBytes = int64_t{256} << 10;  // that one task copies

std::shared_ptr<Engine> live(const std::weak_ptr<Engine>& engine) {
  auto it = engine.lock();
  if (it == nullptr)
    throw Error(ErrorKind::kClosed, "the pool is closed: the model was unpatched or deleted");
  return it;
}

// One thread alone does not fill a card's bus.
void copy_record(const Engine& engine, std::byte* to, const std::byte* from, int64_t bytes) {
  const int64_t tasks = (bytes + kCopyBytes - 1) / kCopyBytes;
  parallel_for(engine.runtime(), tasks, engine.options().threads, [&](int64_t begin, int64_t end) {
    const int64_t first = begin * kCopyBytes;
    std::memcpy(to + first, from + first, std::min(end * kCopyBytes, bytes) - first);
  });
}

}  // namespace

Uplift::Uplift(std::shared_ptr<Driver> driver, std::weak_ptr<Engine> engine,
               std::array<DeviceAddress, 2> buffers, int32_t batch)
    : driver_(std::move(driver)),
      engine_(std::move(engine)),
      buffers_(buffers),
      batch_(batch),
      record_bytes_(live(engine_)->layout().bytes),
      copy_(*driver_),
      copied_{std::make_unique<OwnedEvent>(*driver_), std::make_unique<OwnedEvent>(*driver_)},
      used_(*driver_),
      staging_(*driver_, 2 * std::max(batch, 1) * record_bytes_) {
  if (batch < 1)
    throw Error(ErrorKind::kInvalid,
                "a batch is " + std::to_string(batch) + " records; allowed: 1 or more");
}

Uplift::~Uplift() {
  try {
    driver_->synchronize(copy_);  // staging goes
  } catch (const Error&) {        // the device is lost
  }
}

int32_t Uplift::bring(int32_t layer, std::span<const int32_t> experts, Stream compute) {
  const auto engine = live(engine_);
  if (experts.empty() || static_cast<int64_t>(experts.size()) > batch_) {
    throw Error(ErrorKind::kInvalid, std::to_string(experts.size()) +
                                         " experts are to come up; allowed: 1 to " +
                                         std::to_string(batch_));
  }
  const int32_t buffer = std::exchange(next_, 1 - next_);
  wait_for(*copied_[buffer], *engine);  // out of its staging
  // All that `compute` was given so far, and so the products of two calls ago.
  driver_->record(used_, compute);
  driver_->wait(copy_, used_);
  std::byte* staging = staging_.data() + buffer * batch_ * record_bytes_;
  engine->visit(layer, experts, [&](int32_t expert, const std::byte* record) {
    const int64_t at = (std::ranges::find(experts, expert) - experts.begin()) * record_bytes_;
    copy_record(*engine, staging + at, record, record_bytes_);
    driver_->copy_up(buffers_[buffer] + at, staging + at, record_bytes_, copy_);
  });
  driver_->record(*copied_[buffer], copy_);
  driver_->wait(compute, *copied_[buffer]);
  bytes_up_.fetch_add(static_cast<int64_t>(experts.size()) * record_bytes_,
                      std::memory_order_relaxed);
  return buffer;
}

void Uplift::wait_for(Event event, const Engine& engine) const {
  while (!driver_->done(event)) {
    std::this_thread::sleep_for(kPoll);
    const auto interrupted = engine.runtime().interrupted;
    if (interrupted != nullptr && interrupted()) {
      throw Error(ErrorKind::kInterrupted, "interrupted while experts come up to the device");
    }
  }
}

}  // namespace torch_mesh
