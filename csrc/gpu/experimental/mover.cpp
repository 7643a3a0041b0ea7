#include "gpu/experimental/mover.h"

#include <algorithm>
#include <cstring>
#include <functional>
#include <utility>

#include "base/at_end.h"
#include "base/error.h"
#include "base/interrupts.h"
#include "base/start_thread.h"
#include "gpu/live_engine.h"

namespace torch_mesh {
namespace {

const MoverOptions& checked(const MoverOptions& options, Engine& engine) {
  const Pool& pool = engine.pool();
  const auto live = live_engine(options.source);
  const Pool& source = live->pool();
  if (source.layers() != pool.layers() || source.experts() != pool.experts()) {
    throw_invalid("the records that go up are of ", source.layers(), " layers of ",
                  source.experts(), "; the pool has ", pool.layers(), " of ", pool.experts());
  }
  const auto experts = static_cast<size_t>(pool.experts());
  if (options.slots_of.size() != options.moving.size() * experts ||
      options.moving.size() > static_cast<size_t>(pool.layers())) {
    throw_invalid("slots_of has ", options.slots_of.size(), " entries and moving ",
                  options.moving.size(), "; the pool has ", pool.layers(), " layers of ", experts);
  }
  std::vector<bool> taken(std::max(options.slots, 0), false);
  for (const int32_t slot : options.slots_of) {
    if (slot < 0) continue;
    if (slot >= options.slots || taken[slot]) {
      throw_invalid("slot ", slot, " is taken twice or not there");
    }
    taken[slot] = true;
  }
  const auto spare = std::ranges::count(taken, false);
  if (options.batch < 1 || options.patience < 1 || spare < options.batch ||
      options.slots == options.batch) {
    throw_invalid("a batch of ", options.batch,
                  " experts needs as many spare slots and more than those in all; there are ",
                  spare, " spare ones of ", options.slots, ". Patience is ", options.patience,
                  "; allowed: 1 or more");
  }
  return options;
}

}  // namespace

Mover::Mover(std::shared_ptr<Driver> driver, std::weak_ptr<Engine> engine,
             const MoverOptions& options)
    : driver_(std::move(driver)),
      engine_(std::move(engine)),
      options_(checked(options, *live_engine(engine_))),
      experts_(live_engine(engine_)->pool().experts()),
      record_bytes_(live_engine(options.source)->layout().bytes),
      copy_(*driver_),
      copied_(*driver_),
      switched_(*driver_),
      arrived_(*driver_),
      staging_(*driver_, options.batch * record_bytes_),
      table_(*driver_, static_cast<int64_t>(options.slots_of.size() * sizeof(int32_t))),
      wanted_since_(options.slots_of.size(), -1),
      capacity_(options.slots - options.batch),
      forwards_(options.moving.size(), 0),
      seen_(static_cast<size_t>(experts_), false),
      slots_of_(options.slots_of) {
  std::vector<bool> taken(options.slots, false);
  const auto every = static_cast<ExpertId>(slots_of_.size());
  for (ExpertId id = 0; id < every; ++id) {
    if (slots_of_[id] < 0) continue;
    taken[slots_of_[id]] = true;
    if (!options.moving[id / experts_]) --capacity_;
  }
  for (int32_t slot = options.slots; slot-- > 0;) {
    if (!taken[slot]) spare_.push_back(slot);
  }
  capacity_ = std::max(capacity_, 1);
  wanted_ = make_policy(
      options.policy, {.layers = static_cast<int32_t>(options.moving.size()), .experts = experts_});
  for (ExpertId id = 0; id < every && wanted_count_ < capacity_; ++id) {
    if (slots_of_[id] >= 0 && options.moving[id / experts_]) want(id);
  }
  worker_ = start_thread("the thread that reads experts for the device", [this] { work(); });
}

Mover::~Mover() {
  {
    const std::lock_guard lock(mutex_);
    ending_ = true;
  }
  changed_.notify_all();
  worker_.join();
  drain(*driver_, copy_);  // staging is freed next
  try {                    // and so is table_
    while (!driver_->done(switched_)) std::this_thread::yield();
  } catch (const Error&) {  // the device is lost
  }
}

void Mover::used(int32_t layer, std::span<const int64_t> ids, int32_t top_k) {
  // Fewer layers may move than the pool has.
  if (layer < 0 || layer >= std::ssize(options_.moving) || !options_.moving[layer]) return;
  const std::lock_guard lock(wanted_mutex_);
  distinct_.clear();
  seen_.assign(seen_.size(), false);
  for (const int64_t id : ids) {
    if (id < 0 || id >= experts_ || seen_[id]) continue;
    seen_[id] = true;
    distinct_.push_back(static_cast<int32_t>(id));
  }
  ++forwards_[layer];
  if (phase_of(static_cast<int64_t>(ids.size()) / top_k) == Phase::kPrefill) {
    // A prompt uses nearly all experts: the policy counts its uses, but no expert becomes wanted.
    wanted_->tick_prompt(layer, distinct_, ids, top_k);
    return;
  }
  wanted_->tick(layer, distinct_);
  for (const int32_t expert : distinct_) want(layer * experts_ + expert);
}

// wanted_mutex_ is held, except in the constructor.
void Mover::want(ExpertId id) {
  if (wanted_->resident(id)) {
    wanted_->touch(id);
    return;
  }
  if (wanted_count_ == capacity_) {
    const ExpertId victim = wanted_->victim();
    if (victim == kNoExpert) return;
    forget(victim);
  }
  wanted_->admit(id);
  wanted_since_[id] = forwards_[id / experts_];
  ++wanted_count_;
}

// wanted_mutex_ is held.
void Mover::forget(ExpertId id) {
  if (!wanted_->resident(id)) return;
  wanted_->remove(id);
  wanted_since_[id] = -1;
  --wanted_count_;
}

int32_t Mover::step(Stream compute) {
  const std::unique_lock lock(mutex_, std::try_to_lock);
  if (!lock.owns_lock() || driver_->capturing(compute)) return 0;
  switch (state_) {
    case State::kIdle:
      choose();
      return 0;
    case State::kFetching:
    case State::kMoving:
      return 0;
    case State::kFetched:
      send(compute);
      state_ = State::kCopying;
      return 0;
    case State::kCopying:
      if (!driver_->done(copied_) || !driver_->done(switched_)) return 0;
      return enter(compute);
  }
  return 0;
}

// Chooses the next batch, if any expert has been wanted for long enough. Those wanted longest come
// first: otherwise layers whose experts change often would keep the others out. mutex_ is held.
void Mover::choose() {
  const std::lock_guard lock(wanted_mutex_);
  up_.clear(), down_.clear(), into_.clear();
  const auto every = static_cast<ExpertId>(slots_of_.size());
  const auto wanted_for = [&](ExpertId id) { return forwards_[id / experts_] - wanted_since_[id]; };
  for (ExpertId id = 0; id < every; ++id) {
    if (slots_of_[id] < 0 && wanted_->resident(id) && wanted_for(id) >= options_.patience) {
      up_.push_back(id);
    }
  }
  const size_t max_moves = std::min(spare_.size(), static_cast<size_t>(options_.batch));
  if (up_.empty() && max_moves == static_cast<size_t>(options_.batch)) return;
  std::ranges::stable_sort(up_, std::greater(), wanted_for);
  if (up_.size() > max_moves) up_.resize(max_moves);
  int64_t going = to_go();
  for (ExpertId id = 0; id < every && going > 0; ++id) {
    if (slots_of_[id] < 0 || !options_.moving[id / experts_] || wanted_->resident(id)) continue;
    down_.push_back(id);
    --going;
  }
  if (up_.empty() && down_.empty()) return;
  for (size_t i = 0; i < up_.size(); ++i) into_.push_back(spare_[spare_.size() - 1 - i]);
  state_ = State::kFetching;
  changed_.notify_all();
}

// How many experts leave with up_ so that a batch of slots is spare.
int64_t Mover::to_go() const {
  return std::max<int64_t>(
      0, options_.batch + static_cast<int64_t>(up_.size()) - static_cast<int64_t>(spare_.size()));
}

void Mover::work() {
  std::unique_lock lock(mutex_);
  while (true) {
    changed_.wait(lock, [this] { return ending_ || state_ == State::kFetching; });
    if (ending_) return;
    lock.unlock();
    std::exception_ptr failure;
    const size_t fetched = fetch(failure);
    lock.lock();
    if (failure != nullptr) {  // the records before it were read
      ++stats_.failed;
      stats_.last_failure = failure;
      const std::lock_guard wanted(wanted_mutex_);
      if (fetched < up_.size()) forget(up_[fetched]);  // it has to be wanted anew
      up_.resize(fetched), into_.resize(fetched);
      down_.resize(std::min(down_.size(), static_cast<size_t>(to_go())));
    }
    state_ = up_.empty() && down_.empty() ? State::kIdle : State::kFetched;
    changed_.notify_all();
  }
}

// Reads up_ into staging, up to the first error; returns how many were read. Without mutex_: no
// other thread touches either while records are fetched.
size_t Mover::fetch(std::exception_ptr& failure) {
  size_t fetched = 0;
  try {
    const auto source = live_engine(options_.source);
    for (; fetched < up_.size(); ++fetched) {
      const int32_t expert = up_[fetched] % experts_;
      std::byte* to = staging_.data() + static_cast<int64_t>(fetched) * record_bytes_;
      source->visit(up_[fetched] / experts_, {&expert, 1}, [&](int32_t, const std::byte* record) {
        std::memcpy(to, record, record_bytes_);
      });
    }
  } catch (...) {
    failure = std::current_exception();
  }
  return fetched;
}

// Copies up_ into its slots, which no forward reads. Called by step() and move().
void Mover::send(Stream compute) {
  try {
    // Earlier work of `compute` may still read the former records of these slots.
    driver_->record(arrived_, compute);
    driver_->wait(copy_, arrived_);
    for (size_t i = 0; i < up_.size(); ++i) {
      driver_->copy_up(options_.records + into_[i] * record_bytes_,
                       staging_.data() + static_cast<int64_t>(i) * record_bytes_, record_bytes_,
                       copy_);
    }
    driver_->record(copied_, copy_);
  } catch (...) {
    drain(*driver_, copy_);  // staging is free for the next batch
    throw;
  }
}

// Enters the batch in the table. mutex_ is held, the records have arrived, and no copy of the table
// is pending.
int32_t Mover::enter(Stream compute) {
  std::vector<int32_t> next = slots_of_;
  for (const ExpertId id : down_) next[id] = -1;
  for (size_t i = 0; i < up_.size(); ++i) next[up_[i]] = into_[i];
  std::memcpy(table_.data(), next.data(), next.size() * sizeof(int32_t));
  driver_->wait(compute, copied_);
  if (options_.before_switch) options_.before_switch(compute);
  driver_->copy_up(options_.table, table_.data(),
                   static_cast<int64_t>(next.size() * sizeof(int32_t)), compute);
  // From here on the batch counts as entered, whatever fails.
  if (state_ == State::kCopying) state_ = State::kIdle;
  spare_.resize(spare_.size() - up_.size());
  for (const ExpertId id : down_) spare_.push_back(slots_of_[id]);
  slots_of_ = std::move(next);
  const auto entered = static_cast<int32_t>(up_.size());
  stats_.moved_up += entered;
  stats_.bytes_up += entered * record_bytes_;
  ++stats_.batches;
  try {
    driver_->record(switched_, compute);
  } catch (...) {
    drain(*driver_, compute);  // no thread would know when the table may be written again
    throw;
  }
  const auto engine = engine_.lock();
  if (engine != nullptr && engine->pool().reader() != nullptr) {  // not kept in both
    for (const ExpertId id : up_) {
      const int32_t expert = id % experts_;
      engine->pool().evict(id / experts_, {&expert, 1});
    }
  }
  return entered;
}

// Waits until no records are fetched. Drops a pending batch, whose slots may be taken afterwards.
void Mover::begin_move(const Runtime& runtime) {
  const auto self = std::this_thread::get_id();
  std::unique_lock lock(mutex_);
  if (state_ == State::kMoving && moving_ == self) {
    throw_invalid(
        "experts are to move while this thread moves some: a signal handler has interrupted it; "
        "move them when the handler has returned");
  }
  wait_interruptibly(lock, changed_, runtime, "experts are read for the device",
                     [this] { return state_ != State::kFetching && state_ != State::kMoving; });
  state_ = State::kMoving;
  moving_ = self;
}

void Mover::end_move() {
  const std::lock_guard lock(mutex_);
  state_ = State::kIdle;
  changed_.notify_all();
}

void Mover::check_named(std::span<const ExpertId> up, std::span<const ExpertId> down) const {
  const auto every = static_cast<ExpertId>(slots_of_.size());
  std::vector<bool> named(slots_of_.size(), false);
  const auto check = [&](ExpertId id, bool there) {
    if (id < 0 || id >= every || named[id] || (slots_of_[id] >= 0) != there ||
        !options_.moving[id / experts_]) {
      throw_invalid("expert ", id, there ? " cannot leave" : " cannot move to",
                    " the device: it is not one of this model, is named twice, ",
                    there ? "is not there" : "is there already",
                    ", or its layer's experts do not move");
    }
    named[id] = true;
  };
  for (const ExpertId id : up) check(id, false);
  for (const ExpertId id : down) check(id, true);
  const size_t room = spare_.size() + down.size();
  if (up.size() > room) {
    throw_invalid(up.size(), " experts are to move to the device, which has room for ", room,
                  ": name more that leave it");
  }
}

// Waits and reads without the lock, since the interrupt hook may call slots_of().
void Mover::move(std::span<const ExpertId> up, std::span<const ExpertId> down, Stream compute) {
  if (driver_->capturing(compute)) {
    throw_invalid(
        "experts are to move while a graph is captured: move them before, or between replays");
  }
  const auto engine = live_engine(engine_);
  begin_move(engine->runtime());
  const AtEnd end([this] { end_move(); });
  const auto wait = [&](Event event) {
    wait_for(*driver_, event, engine->runtime(), "experts on their way to the device");
  };
  wait(copied_);
  check_named(up, down);

  // All of `down` leave with the first batch; `up` comes a batch at a time.
  std::span<const ExpertId> going = down;
  size_t begin = 0;
  while (begin < up.size() || !going.empty()) {
    const size_t coming =
        std::min({up.size() - begin, spare_.size(), static_cast<size_t>(options_.batch)});
    const std::span<const ExpertId> batch = up.subspan(begin, coming);
    up_.assign(batch.begin(), batch.end());
    down_.assign(going.begin(), going.end());
    into_.assign(spare_.rbegin(), spare_.rbegin() + static_cast<int64_t>(coming));
    std::exception_ptr failure;
    fetch(failure);
    if (failure != nullptr) std::rethrow_exception(failure);
    send(compute);
    wait(copied_);
    wait(switched_);
    {
      const std::lock_guard lock(mutex_);
      enter(compute);
    }
    // Otherwise the next step would undo it.
    const std::lock_guard wanted(wanted_mutex_);
    for (const ExpertId id : down_) forget(id);
    for (const ExpertId id : up_) want(id);
    begin += coming;
    going = {};
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
