#include "gpu/experimental/uplift.h"

#include <algorithm>
#include <cstring>
#include <utility>

#include "base/error.h"
#include "base/interrupts.h"
#include "gpu/live_engine.h"

namespace torch_mesh {
namespace {

constexpr int64_t kCopyBytes = int64_t{256} << 10;  // that one task copies

// One thread alone does not fill a card's bus.
void copy_record(const Engine& engine, std::byte* to, const std::byte* from, int64_t bytes) {
  const int64_t tasks = (bytes + kCopyBytes - 1) / kCopyBytes;
  parallel_for(engine.runtime(), tasks, engine.options().threads, [&](int64_t begin, int64_t end) {
    const int64_t first = begin * kCopyBytes;
    std::memcpy(to + first, from + first, std::min(end * kCopyBytes, bytes) - first);
  });
}

int32_t checked(int32_t batch) {
  if (batch >= 1) return batch;
  throw_invalid("a batch is ", batch, " records; allowed: 1 or more");
}

}  // namespace

Uplift::Uplift(std::shared_ptr<Driver> driver, std::weak_ptr<Engine> engine,
               std::array<DeviceAddress, 2> buffers, int32_t batch, Stream stream)
    : driver_(std::move(driver)),
      engine_(std::move(engine)),
      runtime_(live_engine(engine_)->runtime()),
      batch_(batch),
      record_bytes_(live_engine(engine_)->layout().bytes),
      copy_(*driver_),
      sides_{Side(*driver_, buffers[0]), Side(*driver_, buffers[1])},
      staging_(*driver_, 2 * int64_t{checked(batch)} * record_bytes_) {
  for (const Side& side : sides_) driver_->record(side.used, stream);
}

Uplift::~Uplift() { drain(*driver_, copy_); }  // staging is freed next

void Uplift::begin_turn() {
  const auto self = std::this_thread::get_id();
  std::unique_lock lock(mutex_);
  wait_interruptibly(lock, turn_ended_, runtime_, "waiting for another prompt's way to the device",
                     [&] { return turns_ == 0 || owner_ == self; });
  owner_ = self;
  ++turns_;
}

void Uplift::end_turn() {
  const std::lock_guard lock(mutex_);
  --turns_;
  turn_ended_.notify_all();
}

int32_t Uplift::take_side() {
  const std::lock_guard lock(mutex_);
  const int32_t side = sides_[next_].taken ? 1 - next_ : next_;
  if (sides_[side].taken) {
    throw_invalid(
        "both buffers of the way to the device are in use by prompts that signal handlers have "
        "interrupted; run no prompt in a handler that interrupts another one");
  }
  sides_[side].taken = true;
  next_ = 1 - side;
  return side;
}

void Uplift::give_back(int32_t side) {
  const std::lock_guard lock(mutex_);
  sides_[side].taken = false;
}

Uplift::Turn::Turn(Uplift& uplift, Stream compute) : uplift_(uplift), compute_(compute) {
  uplift.begin_turn();
}

Uplift::Turn::~Turn() {
  if (last_ >= 0) {
    try {  // the next turn, on whatever stream, waits for these products
      uplift_.driver_->record(uplift_.sides_[last_].used, compute_);
    } catch (const Error&) {
      drain(*uplift_.driver_, compute_);
    }
    uplift_.give_back(last_);
  }
  uplift_.end_turn();
}

int32_t Uplift::Turn::bring(int32_t layer, std::span<const int32_t> experts) {
  Driver& driver = *uplift_.driver_;
  const auto engine = live_engine(uplift_.engine_);
  const int64_t bytes = uplift_.record_bytes_;
  if (experts.empty() || static_cast<int64_t>(experts.size()) > uplift_.batch_) {
    throw_invalid(experts.size(), " experts are to come up; allowed: 1 to ", uplift_.batch_);
  }
  if (last_ >= 0) {
    driver.record(uplift_.sides_[last_].used, compute_);
    uplift_.give_back(std::exchange(last_, -1));
  }
  struct Taken {
    Uplift& uplift;
    const int32_t buffer = uplift.take_side();
    bool filled = false;
    ~Taken() {
      if (!filled) uplift.give_back(buffer);
    }
  } taken{uplift_};
  Side& side = uplift_.sides_[taken.buffer];
  wait_for(driver, side.copied, uplift_.runtime_, "a copy to the device");
  driver.wait(uplift_.copy_, side.used);
  std::byte* staging = uplift_.staging_.data() + taken.buffer * uplift_.batch_ * bytes;
  try {
    engine->visit(layer, experts, [&](int32_t expert, const std::byte* record) {
      const int64_t at = (std::ranges::find(experts, expert) - experts.begin()) * bytes;
      copy_record(*engine, staging + at, record, bytes);
      driver.copy_up(side.records + at, staging + at, bytes, uplift_.copy_);
    });
    driver.record(side.copied, uplift_.copy_);
  } catch (...) {
    drain(driver, uplift_.copy_);  // staging is free for the next call
    throw;
  }
  driver.wait(compute_, side.copied);
  taken.filled = true;
  last_ = taken.buffer;
  uplift_.bytes_up_.fetch_add(static_cast<int64_t>(experts.size()) * bytes,
                              std::memory_order_relaxed);
  return last_;
}

}  // namespace torch_mesh
