#include "gpu/mover.h"

#include <algorithm>
#include <cstring>
#include <string>
#include <utility>

#include "base/error.h"

namespace torch_mesh {
namespace {

constexpr auto kPoll = std::chrono::microseconds(50);

[[noreturn]] void invalid(const std::string& message) { throw Error(ErrorKind::kInvalid, message); }

std::shared_ptr<Engine> live(const std::weak_ptr<Engine>& engine) {
  auto it = engine.lock();
  if (it == nullptr)
    throw Error(ErrorKind::kClosed, "the pool is closed: the model was unpatched or deleted");
  return it;
}

}  // namespace

Mover::Mover(std::shared_ptr<Driver> driver, std::weak_ptr<Engine> engine,
             const MoverOptions& options)
    : driver_(std::move(driver)),
      engine_(std::move(engine)),
      options_(options),
      experts_(live(engine_)->pool().experts()),
      record_bytes_(live(engine_)->layout().bytes),
      copy_(*driver_),
      copied_(*driver_),
      switched_(*driver_),
      arrived_(*driver_),
      staging_(*driver_, options.batch * record_bytes_),
      table_(*driver_, static_cast<int64_t>(options.slots_of.size() * sizeof(int32_t))),
      wanted_since_(options.slots_of.size(), -1),
      forwards_(options.moving.size(), 0),
      slots_of_(options.slots_of) {
  std::vector<bool> taken(options.slots, false);
  int32_t fixed = 0;
  for (size_t id = 0; id < slots_of_.size(); ++id) {
    const int32_t slot = slots_of_[id];
    if (slot < 0) continue;
    if (slot >= options.slots || taken[slot])
      invalid("slot " + std::to_string(slot) + " is taken twice or not there");
    taken[slot] = true;
    if (!options.moving[id / experts_]) ++fixed;
  }
  for (int32_t slot = options.slots; slot-- > 0;) {
    if (!taken[slot]) spare_.push_back(slot);
  }
  if (options.batch < 1 || static_cast<int32_t>(spare_.size()) < options.batch) {
    invalid("a batch of " + std::to_string(options.batch) +
            " experts needs as many spare slots; there are " + std::to_string(spare_.size()));
  }
  wanted_ = make_policy(options.policy, {.layers = static_cast<int32_t>(options.moving.size()),
                                         .experts = experts_,
                                         .slots = options.slots - fixed - options.batch});
  for (ExpertId id = 0; id < static_cast<ExpertId>(slots_of_.size()); ++id) {
    if (slots_of_[id] < 0 || !options.moving[id / experts_]) continue;
    wanted_->admit(id);
    wanted_since_[id] = 0;
  }
  worker_ = std::thread([this] { work(); });
}

Mover::~Mover() {
  {
    const std::lock_guard lock(mutex_);
    ending_ = true;
  }
  changed_.notify_all();
  worker_.join();
  drain();  // staging goes
}

void Mover::drain() noexcept {
  try {
    driver_->synchronize(copy_);
  } catch (const Error&) {  // the device is lost
  }
}

void Mover::used(int32_t layer, std::span<const int64_t> ids) {
  if (!options_.moving[layer]) return;
  const std::lock_guard lock(wanted_mutex_);
  distinct_.clear();
  for (const int64_t id : ids) {
    if (id < experts_ && std::ranges::find(distinct_, id) == distinct_.end()) {
      distinct_.push_back(static_cast<int32_t>(id));
    }
  }
  ++forwards_[layer];
  wanted_->tick(layer, distinct_);
  for (const int32_t expert : distinct_) want(layer * experts_ + expert);
}

// wanted_mutex_ is held.
void Mover::want(ExpertId id) {
  if (wanted_->resident(id)) {
    wanted_->touch(id);
    return;
  }
  const ExpertId victim = wanted_->victim();
  if (victim == kNoExpert) return;
  wanted_->remove(victim);
  wanted_since_[victim] = -1;
  wanted_->admit(id);
  wanted_since_[id] = forwards_[id / experts_];
}

int32_t Mover::step(Stream compute) {
  const std::lock_guard lock(mutex_);
  switch (state_) {
    case State::kIdle:
      choose();
      return 0;
    case State::kFetching:
      return 0;
    case State::kFetched:
      send(compute);
      return 0;
    case State::kCopying:
      if (!driver_->done(copied_) || !driver_->done(switched_)) return 0;
      return enter(compute);
  }
  return 0;
}

// The batch that is to come, if any expert has been wanted for long enough. mutex_ is held.
void Mover::choose() {
  const std::lock_guard lock(wanted_mutex_);
  up_.clear(), down_.clear(), into_.clear();
  const auto most = std::min<int64_t>(options_.batch, static_cast<int64_t>(spare_.size()));
  const auto every = static_cast<ExpertId>(slots_of_.size());
  for (ExpertId id = 0; id < every && static_cast<int64_t>(up_.size()) < most; ++id) {
    const int64_t since = wanted_since_[id];
    const bool there = slots_of_[id] >= 0;
    if (!there && since >= 0 && forwards_[id / experts_] - since >= options_.patience) {
      up_.push_back(id);
    }
  }
  if (up_.empty() && most == options_.batch) return;
  // As many go as keeps a batch of slots spare.
  int32_t going = options_.batch - static_cast<int32_t>(spare_.size() - up_.size());
  for (ExpertId id = 0; id < every && going > 0; ++id) {
    if (slots_of_[id] < 0 || !options_.moving[id / experts_] || wanted_->resident(id)) continue;
    down_.push_back(id);
    --going;
  }
  for (size_t i = 0; i < up_.size(); ++i) into_.push_back(spare_[spare_.size() - 1 - i]);
  state_ = State::kFetching;
  changed_.notify_all();
}

void Mover::work() {
  std::unique_lock lock(mutex_);
  while (true) {
    changed_.wait(lock, [this] { return ending_ || state_ == State::kFetching; });
    if (ending_) return;
    lock.unlock();
    std::exception_ptr failure;
    try {
      fetch();
    } catch (...) {
      failure = std::current_exception();
    }
    lock.lock();
    if (failure != nullptr) {
      ++stats_.failed;
      stats_.last_failure = failure;
      // Not again at once: it has to be wanted for as long once more.
      const std::lock_guard wanted(wanted_mutex_);
      for (const ExpertId id : up_) {
        if (wanted_since_[id] >= 0) wanted_since_[id] = forwards_[id / experts_];
      }
    }
    state_ = failure == nullptr ? State::kFetched : State::kIdle;
    changed_.notify_all();
  }
}

// up_ into staging. Without mutex_: nobody else touches either while records are fetched.
void Mover::fetch() {
  const auto engine = live(engine_);
  for (size_t i = 0; i < up_.size(); ++i) {
    const int32_t expert = up_[i] % experts_;
    std::byte* to = staging_.data() + static_cast<int64_t>(i) * record_bytes_;
    engine->visit(up_[i] / experts_, {&expert, 1}, [&](int32_t, const std::byte* record) {
      std::memcpy(to, record, record_bytes_);
    });
  }
}

// mutex_ is held, and the slots that are written to are nobody's.
void Mover::send(Stream compute) {
  try {
    // What `compute` was given before may still read what lay in them.
    driver_->record(arrived_, compute);
    driver_->wait(copy_, arrived_);
    for (size_t i = 0; i < up_.size(); ++i) {
      driver_->copy_up(options_.records + into_[i] * record_bytes_,
                       staging_.data() + static_cast<int64_t>(i) * record_bytes_, record_bytes_,
                       copy_);
    }
    driver_->record(copied_, copy_);
  } catch (...) {
    drain();  // staging is free for the next batch
    throw;
  }
  state_ = State::kCopying;
}

// mutex_ is held, the records have arrived, and no copy of the table is under way.
int32_t Mover::enter(Stream compute) {
  std::vector<int32_t> next = slots_of_;
  for (const ExpertId id : down_) next[id] = -1;
  for (size_t i = 0; i < up_.size(); ++i) next[up_[i]] = into_[i];
  std::memcpy(table_.data(), next.data(), next.size() * sizeof(int32_t));
  driver_->wait(compute, copied_);
  driver_->copy_up(options_.table, table_.data(),
                   static_cast<int64_t>(next.size() * sizeof(int32_t)), compute);
  // From here on it has happened, whatever fails.
  state_ = State::kIdle;
  spare_.resize(spare_.size() - up_.size());
  for (const ExpertId id : down_) spare_.push_back(slots_of_[id]);
  slots_of_ = std::move(next);
  const auto entered = static_cast<int32_t>(up_.size());
  stats_.moved_up += entered;
  stats_.bytes_up += entered * record_bytes_;
  ++stats_.batches;
  driver_->record(switched_, compute);
  const auto engine = engine_.lock();
  if (engine != nullptr && engine->pool().reader() != nullptr) {  // none is kept twice
    for (const ExpertId id : up_) {
      const int32_t expert = id % experts_;
      engine->pool().evict(id / experts_, {&expert, 1});
    }
  }
  return entered;
}

void Mover::move(std::span<const ExpertId> up, std::span<const ExpertId> down, Stream compute) {
  std::unique_lock lock(mutex_);
  const auto every = static_cast<ExpertId>(slots_of_.size());
  std::vector<bool> named(slots_of_.size(), false);
  const auto check = [&](ExpertId id, bool there) {
    if (id < 0 || id >= every || named[id] || (slots_of_[id] >= 0) != there ||
        !options_.moving[id / experts_]) {
      invalid("expert " + std::to_string(id) + (there ? " cannot leave" : " cannot move to") +
              " the device: it is not one of this model, is named twice, " +
              (there ? "is not there" : "is there already") +
              ", or its layer's experts do not move");
    }
    named[id] = true;
  };
  for (const ExpertId id : up) check(id, false);
  for (const ExpertId id : down) check(id, true);
  // A batch that was on its way would find other slots taken.
  changed_.wait(lock, [this] { return state_ != State::kFetching; });
  state_ = State::kIdle;
  wait_for(copied_);
  const int64_t room = static_cast<int64_t>(spare_.size() + down.size());
  if (static_cast<int64_t>(up.size()) > room) {
    invalid(std::to_string(up.size()) + " experts are to move to the device, which has room for " +
            std::to_string(room) + ": name more that leave it");
  }
  // First those that go, so that their slots are free; then the others, a batch at a time. Between
  // the two, both are computed by the host.
  const auto enter_batch = [&](std::span<const ExpertId> coming, std::span<const ExpertId> going) {
    up_.assign(coming.begin(), coming.end());
    down_.assign(going.begin(), going.end());
    into_.clear();
    for (size_t i = 0; i < up_.size(); ++i) into_.push_back(spare_[spare_.size() - 1 - i]);
    fetch();
    send(compute);
    wait_for(copied_);
    wait_for(switched_);
    enter(compute);
  };
  try {
    size_t begin = 0;
    size_t gone = 0;
    while (begin < up.size() || gone < down.size()) {
      const size_t coming =
          std::min({up.size() - begin, spare_.size(), static_cast<size_t>(options_.batch)});
      const size_t going = down.size() - gone;
      enter_batch(up.subspan(begin, coming), down.subspan(gone, going));
      begin += coming;
      gone += going;
    }
  } catch (...) {
    state_ = State::kIdle;
    throw;
  }
  const std::lock_guard wanted(wanted_mutex_);
  for (const ExpertId id : up) want(id);
}

// For what a host node must not be kept from: whoever waits holds mutex_, and no node takes that.
void Mover::wait_for(Event event) const {
  while (!driver_->done(event)) {
    std::this_thread::sleep_for(kPoll);
    const auto interrupted = live(engine_)->runtime().interrupted;
    if (interrupted != nullptr && interrupted()) {
      throw Error(ErrorKind::kInterrupted, "interrupted while experts move to the device");
    }
  }
}

std::vector<int32_t> Mover::slots_of() const {
  const std::lock_guard lock(mutex_);
  return slots_of_;
}

MoverStats Mover::stats() const {
  const std::lock_guard lock(mutex_);
  return stats_;
}

}  // namespace torch_mesh
