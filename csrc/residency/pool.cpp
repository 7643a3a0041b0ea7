#include "residency/pool.h"

#include <algorithm>
#include <cstring>
#include <utility>

#include "base/at_end.h"
#include "base/interrupts.h"
#include "residency/lending/loan.h"
#include "store/record.h"

namespace torch_mesh {
namespace {

void check(const Source& source, const PackRecord& pack, const PoolOptions& options) {
  validate(source);
  if (source.raw != static_cast<bool>(pack)) {
    throw_invalid(source.raw ? "a raw source needs a function that packs its records"
                             : "the records of a store are packed already; pass no pack function");
  }
  if (source.raw && options.staging < 1) {
    throw_invalid("a raw source needs at least one staging buffer; got ", options.staging);
  }
  const auto misfit =
      std::find_if(source.extents.begin(), source.extents.end(),
                   [&](const Extent& e) { return !source.raw && e.bytes != options.record_bytes; });
  if (misfit != source.extents.end()) {
    throw_invalid("a record of ", source.files[misfit->file].path, " at offset ", misfit->offset,
                  " has ", misfit->bytes, " bytes; this model's layout has ", options.record_bytes);
  }
}

PoolOptions checked(const PoolOptions& options, const Source& source, const PackRecord& pack) {
  const bool memory_only = source.files.empty() && source.extents.empty() && !pack;
  if (!memory_only) check(source, pack, options);
  const int64_t all = int64_t{source.layers} * source.experts;
  if (source.layers < 1 || source.experts < 1 || all > INT32_MAX) {
    throw_invalid(
        "a pool serves at least one layer of one expert and fewer than 2^31 experts; got ",
        source.layers, " layers of ", source.experts);
  }
  if (memory_only && options.slots != all) {
    throw_invalid("a pool without a source holds every expert: slots must be ", all, ", got ",
                  options.slots);
  }
  if (options.slots < 1 || options.slots > all) {
    throw_invalid("slots must be in [1, ", all, "], as many as there are experts; got ",
                  options.slots);
  }
  if (options.min_slots < 1 || options.min_slots > options.slots) {
    throw_invalid("min_slots must be in [1, slots=", options.slots, "]; got ", options.min_slots);
  }
  if (options.record_bytes < kRecordAlignment || options.record_bytes % kRecordAlignment != 0) {
    throw_invalid("record_bytes must be a positive multiple of 4096; got ", options.record_bytes);
  }
  constexpr auto longest = static_cast<int64_t>(kMaxTimeout * 1e3);
  if (options.timeout.count() <= 0 || options.timeout.count() > longest) {
    throw_invalid("the time-out must be 1 to ", longest, " ms; got ", options.timeout.count(),
                  " ms");
  }
  check(options.warm_up, source.layers, source.experts);
  check(options.soft_pins);
  return options;
}

// As many records as the reader prefetches at a time, and one to follow. A slot that is taken
// sooner is an eviction that may prove needless. With a depth below four it is one record.
int64_t reads_ahead(const PoolOptions& options, const Source& source) {
  const int64_t chunk = std::min(options.reader.chunk_bytes, options.record_bytes);
  const int64_t at_a_time = source.drives() * std::min<int64_t>(options.reader.depth / 4 * chunk,
                                                                kMaxBytesBesidePrefetch);
  return 1 + (at_a_time + options.record_bytes - 1) / options.record_bytes;
}

std::shared_ptr<SlotMemory> make_memory(const PoolOptions& options, const Runtime& runtime) {
  if (options.loan != nullptr) return options.loan;
  return std::make_shared<Arena>(options.slots, options.record_bytes, options.topology,
                                 options.segment_bytes, options.sharing, runtime);
}

}  // namespace

Pool::Pool(const PoolOptions& options, const Runtime& runtime, Source source, PackRecord pack)
    : options_(checked(options, source, pack)),
      runtime_(runtime),
      source_(std::move(source)),
      memory_(make_memory(options, runtime)),
      core_({.layers = layers(),
             .experts = experts(),
             .slots = options.slots,
             .warm_up = options.warm_up,
             .soft_pins = options.soft_pins,
             .prefill = options.prefill,
             .reads_ahead = reads_ahead(options, source_),
             .slots_per_segment = static_cast<int32_t>(memory_->first_of(1)),
             .reads = !source_.files.empty()},
            make_policy(options.policy, {layers(), experts()})) {
  if (source_.files.empty()) return;
  loader_ = std::make_unique<Loader>(
      LoaderOptions{.slots = options.slots,
                    .record_bytes = options.record_bytes,
                    .staging = options.staging,
                    .verify = options.loan == nullptr ? options.verify : Verify::kNever,
                    .reader = options.reader},
      source_, std::move(pack), *memory_, options_.topology,
      [this](Loader::Ended ended) { on_ended(std::move(ended)); });
  const Event begin(*this);
}

Pool::~Pool() {
  close();
  if (!memory_only()) loader_->close();
}

void Pool::throw_closed() { throw Error(ErrorKind::kClosed, "this pool of experts is closed"); }

void Pool::check_experts(int32_t layer, std::span<const int32_t> indices) const {
  if (layer < 0 || layer >= layers()) {
    throw_invalid("layer ", layer, " is not in [0, ", layers(), ")");
  }
  for (int32_t index : indices) {
    if (index >= 0 && index < experts()) continue;
    throw_invalid("expert ", index, " of layer ", layer, " is not in [0, ", experts(), ")");
  }
}

bool Pool::hint(HintOfCore hint, int32_t layer, std::span<const int32_t> experts, Phase phase) {
  check_experts(layer, experts);
  const Event event(*this);
  if (core_.closed()) return false;
  const Stopwatch decision(stats_of(layer, phase).decision_nanoseconds);
  (core_.*hint)(layer, experts, phase);
  carry_out();
  return true;
}

// Refused reads are events again.
void Pool::carry_out() {
  for (Effects* effects = &core_.end_event(); effects->any(); effects = &core_.end_event()) {
    const bool reads = !effects->reads.empty() || !effects->raised.empty();
    queued_ |= reads;
    if (!effects->reads.empty()) loader_->begin(core_.slots(), effects->reads);
    for (int32_t slot : effects->raised) loader_->raise_priority(slot);
    if (loader_ != nullptr) queued_ |= loader_->will_need(effects->predicted);
    if (effects->landed) landed_.notify_all();
    if (effects->freed) freed_.notify_all();
    if (effects->idle) idle_.notify_all();
    if (effects->resized) resized_.notify_all();
    if (effects->forward_ended) forward_ended_.notify_all();
    if ((effects->landed || effects->freed || effects->idle) && progress_) progress_();
    for (int64_t segment : effects->vacant) {
      if (!detach(segment)) core_.detach_failed(segment);
    }
    effects->clear();

    while (auto refused = reads ? loader_->take_refused() : std::nullopt) {
      core_.failed(refused->slot, refused->bytes, std::move(*refused->error));
    }
  }
}

void Pool::flush(Lock& lock) {
  const bool begin = std::exchange(queued_, false);
  lock.unlock();
  if (begin) loader_->flush();
}

bool Pool::flushed(Lock& lock) {
  if (!queued_) return false;
  flush(lock);
  lock.lock();
  return true;
}

void Pool::on_ended(Loader::Ended ended) {
  const Event event(*this);
  if (ended.again) core_.read_again(ended.slot);
  if (ended.wrong_copy) keep_wrong_copy(std::move(*ended.wrong_copy));
  if (ended.error) {
    core_.failed(ended.slot, ended.bytes, std::move(*ended.error));
  } else {
    timeline_.landed(ended.slot, ended.read);
    core_.landed(ended.slot, ended.bytes);
  }
}

// If there is no memory for it, the next wrong record of the copy is reported.
void Pool::keep_wrong_copy(Error error) {
  const auto is_same = [&](const Error& other) { return other.place().file == error.place().file; };
  if (std::ranges::any_of(wrong_copies_, is_same)) return;
  const auto lost = caught([&] { wrong_copies_.push_back(std::move(error)); });
  if (!lost) ++unreported_copies_;
}

std::optional<Error> Pool::take_wrong_copy() {
  if (unreported_copies_ == 0) return std::nullopt;
  const Lock lock(mutex_);
  if (unreported_copies_ == 0) return std::nullopt;
  return wrong_copies_[wrong_copies_.size() - static_cast<size_t>(unreported_copies_--)];
}

// The I/O thread takes the segment from the ring, then drops its pages.
bool Pool::detach(int64_t segment) {
  const auto error = caught([&] {
    loader_->reader().change_buffer(memory_->segments()[segment], false, [this, segment] {
      memory_->drop(segment);
      const Event event(*this);
      core_.detached(segment);
    });
  });
  return !error;  // if the reader is closed, the memory is freed with the pool
}

bool Pool::grow(Lock& lock) {
  const int64_t segment = core_.next_to_attach();
  if (segment < 0) return false;
  lock.unlock();
  const auto error = caught([&] {
    memory_->fault_in(segment);
    loader_->reader().change_buffer(memory_->segments()[segment], true, [this, segment] {
      const Event event(*this);
      core_.attached(segment);
    });
  });
  if (error) memory_->drop(segment);
  lock.lock();
  if (!error) return true;
  core_.attach_failed(segment);
  carry_out();
  throw *error;
}

Pool::Patience Pool::patience() const {
  const auto now = Clock::now();
  return {now + options_.timeout, now + kInterruptSlice};
}

bool Pool::wait(Lock& lock, std::condition_variable& condition, Patience& patience,
                ClaimState* queued) const {
  if (Clock::now() >= patience.deadline) return false;
  condition.wait_until(lock, std::min(patience.deadline, patience.ask));
  // Also after wake-ups: threads that wait on a busy pool are woken all the time.
  const auto now = Clock::now();
  if (now < patience.ask) return true;
  patience.ask = now + kInterruptSlice;
  if (queued != nullptr) queued->passed_over = true;
  const AtEnd asked([queued] {
    if (queued != nullptr) queued->passed_over = false;
  });
  check_interrupted(runtime_, "waiting for experts", lock);
  return true;
}

void Pool::fill(int32_t layer, int32_t expert, std::span<const std::byte> record) {
  check_process();
  check_experts(layer, {&expert, 1});
  if (!memory_only())
    throw_invalid("fill() is for pools without a source; this one reads its records");
  if (static_cast<int64_t>(record.size()) != options_.record_bytes) {
    throw_invalid("a record has ", options_.record_bytes, " bytes; got ", record.size());
  }
  const ExpertId id = core_.id_of(layer, expert);
  Lock lock(mutex_);
  check_open();
  const int32_t slot = core_.fill(id);
  if (slot < 0) {
    throw_invalid(describe(source_, id), " is in use; fill() it when no forward runs");
  }
  lock.unlock();
  std::memcpy(memory_->piece(slot), record.data(), record.size());
  const Event event(*this);
  core_.filled(slot);
}

void Pool::promote(int32_t layer, std::span<const int32_t> experts) {
  std::vector<Claim::Entry> entries(experts.size());
  Claim claim(*this, layer, experts, entries);
  ReadyExpert ready;
  while (claim.next({&ready, 1}) > 0) claim.release({&ready, 1});
}

void Pool::prefetch(int32_t layer, std::span<const int32_t> experts, Phase phase) {
  if (!hint(&Core::prefetch, layer, experts, phase)) throw_closed();
}

void Pool::expect(int32_t layer, std::span<const int32_t> experts, Phase phase) {
  hint(&Core::expect, layer, experts, phase);
}

int32_t Pool::evict(int32_t layer, std::span<const int32_t> experts) {
  check_process();
  check_experts(layer, experts);
  if (memory_only()) {
    throw_invalid("a pool without a source cannot evict: its records exist nowhere else");
  }
  const Event event(*this);
  check_open();
  return core_.evict(layer, experts);
}

int32_t Pool::resize(int32_t slots) {
  check_process();
  if (memory_only()) {
    throw_invalid("a pool without a source cannot be resized: its records exist nowhere else");
  }
  if (options_.sharing == Sharing::kShared || options_.loan != nullptr) {
    throw_invalid("a pool that processes share keeps its size");
  }
  if (slots < options_.min_slots || slots > options_.slots) {
    throw_invalid("this pool takes ", options_.min_slots, " to ", options_.slots, " slots; got ",
                  slots);
  }
  Lock lock(mutex_);
  check_open();
  core_.resize(slots);
  carry_out();
  flushed(lock);  // there may be reads into slots that are back already
  Patience left = patience();
  while (!core_.sizing().settled()) {
    // The time that the kernel takes to clear new memory does not count.
    if (grow(lock)) left.deadline = patience().deadline;
    check_open();
    if (core_.sizing().settled()) break;
    if (wait(lock, resized_, left)) continue;
    throw Error(
        ErrorKind::kTimeout,
        concat("resizing the pool to ", slots, " slots has not ended in ", options_.timeout.count(),
               " ms, since the I/O thread is busy. It goes on in the background"));
  }
  return core_.slots().limit();
}

void Pool::warm_up() {
  const Event event(*this);
  check_open();
  core_.warm_up();
}

void Pool::count_on_gpu(int32_t layer, std::span<const int64_t> ids, int32_t top_k,
                        std::span<const int32_t> on_gpu, bool alone) {
  check_process();
  check_experts(layer, {});
  const bool prompt = phase_of(static_cast<int64_t>(ids.size()) / top_k) == Phase::kPrefill;
  const Lock lock(mutex_);
  core_.use().count_on_gpu(layer, ids, top_k, on_gpu, prompt, alone);
}

void Pool::count_rerouted(int32_t layer, int64_t replaced) {
  const Lock lock = locked();
  stats_of(layer, Phase::kDecode).rerouted += replaced;
}

void Pool::states(int32_t layer, std::span<SlotState> states) const {
  check_experts(layer, {});
  locked_core()->states(layer, states);
}

PoolStats Pool::detailed_stats() const {
  check_process();
  PoolStats copy(layers(), experts());  // allocated before the lock is taken
  const Lock lock(mutex_);
  copy = core_.statistics().counts();
  copy.slots = core_.slots().limit();
  copy.early = copy.slots - core_.slots().slots_without_early();
  return copy;
}

void Pool::reset_stats() {
  const Lock lock = locked();
  core_.reset_statistics();
  last_forward_ = {};
}

void Pool::record_misses(int32_t count) {
  if (count < 0 || count > kMaxMisses) {
    throw_invalid("a pool records 0 to ", kMaxMisses, " misses; got ", count);
  }
  const Lock lock = locked();
  timeline_.start(count, options_.slots);
}

std::vector<Miss> Pool::misses() const {
  const Lock lock = locked();
  return timeline_.misses();
}

bool Pool::wait_for_forwards(int32_t layer, int64_t forwards,
                             std::chrono::milliseconds patience) const {
  check_process();
  check_experts(layer, {});
  Lock lock(mutex_);
  const bool woken = forward_ended_.wait_for(lock, patience, [&] {
    return core_.closed() || core_.statistics().forwards(layer) >= forwards;
  });
  return woken && !core_.closed();
}

int64_t Pool::forwards(int32_t layer) const {
  check_experts(layer, {});
  return locked_core()->statistics().forwards(layer);
}

void Pool::drain() {
  Lock lock = locked();
  Patience left = patience();
  while (core_.slots().loading() > 0) {
    if (wait(lock, idle_, left)) continue;
    throw Error(ErrorKind::kTimeout,
                concat(core_.slots().loading(), " reads have not ended within the time-out of ",
                       options_.timeout.count(), " ms"));
  }
}

void Pool::close() {
  const Lock lock = locked();
  core_.close();
  forward_ended_.notify_all();
  resized_.notify_all();
}

void Pool::on_progress(std::function<void()> call) {
  const Lock lock = locked();
  if (call && progress_) {
    throw_invalid("this pool is lent already; close its lender, or lend a pool of its own");
  }
  progress_ = std::move(call);
}

bool Pool::lent() const {
  const Lock lock = locked();
  return progress_ != nullptr;
}

int Pool::shared_descriptor() const {
  const int descriptor = memory_->descriptor();
  if (descriptor < 0) {
    throw_invalid(
        "this pool's memory is private; to lend its slots, open its engine with lendable=True");
  }
  return descriptor;
}

int64_t Pool::shared_offset(const std::byte* record) const {
  return record - memory_->segments().front().data;
}

void Pool::validate() const {
  const Lock lock = locked();
  core_.validate();
  if (loader_ != nullptr) loader_->validate();
}

int64_t Pool::slot_bytes() const {
  const Lock lock = locked();
  int64_t bytes = 0;
  for (size_t segment = 0; segment < memory_->segments().size(); ++segment) {
    if (!core_.sizing().has_memory(static_cast<int64_t>(segment))) continue;
    bytes += static_cast<int64_t>(memory_->segments()[segment].bytes);
  }
  return bytes;
}

int64_t Pool::memory_bytes() const {
  return slot_bytes() + (loader_ ? loader_->staging_bytes() : 0);
}

}  // namespace torch_mesh
