#include "residency/pool.h"

#include <algorithm>
#include <cstring>
#include <new>
#include <optional>
#include <utility>

#include "base/interrupts.h"
#include "residency/lending/loan.h"
#include "residency/pool_impl.h"
#include "store/record.h"

namespace torch_mesh {
namespace {

using Clock = std::chrono::steady_clock;

[[noreturn]] void throw_invalid(const std::string& message) {
  throw Error(ErrorKind::kInvalid, message);
}

PoolOptions checked(const PoolOptions& options, int32_t layers, int32_t experts) {
  const int64_t all = int64_t{layers} * experts;
  if (layers < 1 || experts < 1 || all > INT32_MAX) {
    throw_invalid(
        "a pool serves at least one layer of one expert and fewer than 2^31 experts; got " +
        std::to_string(layers) + " layers of " + std::to_string(experts));
  }
  if (options.slots < 1 || options.slots > all) {
    throw_invalid("slots must be in [1, " + std::to_string(all) +
                  "], as many as there are experts; got " + std::to_string(options.slots));
  }
  if (options.least_slots < 1 || options.least_slots > options.slots) {
    throw_invalid("least_slots must be in [1, slots=" + std::to_string(options.slots) + "]; got " +
                  std::to_string(options.least_slots));
  }
  if (options.record_bytes < kRecordAlignment || options.record_bytes % kRecordAlignment != 0) {
    throw_invalid("record_bytes must be a positive multiple of 4096; got " +
                  std::to_string(options.record_bytes));
  }
  constexpr auto longest = static_cast<int64_t>(kLongestTimeout * 1e3);
  if (options.timeout.count() <= 0 || options.timeout.count() > longest) {
    throw_invalid("the time-out must be 1 to " + std::to_string(longest) + " ms; got " +
                  std::to_string(options.timeout.count()) + " ms");
  }
  check(options.kept, layers, experts);
  return options;
}

const Source& checked(const Source& source, const PackRecord& pack, const PoolOptions& options) {
  validate(source);
  if (source.raw != static_cast<bool>(pack)) {
    throw_invalid(source.raw ? "a raw source needs a function that packs its records"
                             : "the records of a store are packed already; pass no pack function");
  }
  if (source.raw && options.staging < 1) {
    throw_invalid("a raw source needs at least one staging buffer; got " +
                  std::to_string(options.staging));
  }
  if (!source.raw && source.pieces != 1) {
    throw_invalid("a store has one extent per record; got " + std::to_string(source.pieces));
  }
  const auto misfit =
      std::find_if(source.extents.begin(), source.extents.end(), [&](const Extent& e) {
        return !source.raw && (e.bytes != options.record_bytes || e.offset % kRecordAlignment != 0);
      });
  if (misfit != source.extents.end()) {
    throw_invalid("a record of " + source.files[misfit->file].path + " at offset " +
                  std::to_string(misfit->offset) + " has " + std::to_string(misfit->bytes) +
                  " bytes; this model's layout has " + std::to_string(options.record_bytes) +
                  " at multiples of " + std::to_string(kRecordAlignment));
  }
  return source;
}

// As many chunks as the reader lets prefetches have, and a record to follow; a slot that is taken
// sooner is an eviction that may prove needless.
int64_t reads_ahead(const PoolOptions& options) {
  const int64_t chunks =
      (options.record_bytes + options.reader.chunk_bytes - 1) / options.reader.chunk_bytes;
  return 1 + (options.reader.depth / 4 + chunks - 1) / chunks;
}

// Its experts have names, as those of any source.
Source nothing_to_read(int32_t layers, int32_t experts) {
  Source source;
  source.layers = layers;
  source.experts = experts;
  return source;
}

std::unique_ptr<SlotMemory> make_memory(const PoolOptions& options, const Source& source) {
  if (options.loan != nullptr) return make_lent_memory(options.loan, source);
  return make_arena_memory({.slots = options.slots,
                            .record_bytes = options.record_bytes,
                            .topology = options.topology,
                            .segment_bytes = options.segment_bytes,
                            .sharing = options.sharing},
                           source);
}

}  // namespace

Pool::Impl::Impl(const PoolOptions& given, const Runtime& given_runtime, Source given_source,
                 PackRecord pack, int32_t layers, int32_t experts)
    : options(checked(given, layers, experts)),
      runtime(given_runtime),
      source(std::move(given_source)),
      memory(make_memory(options, source)),
      core({.layers = layers,
            .experts = experts,
            .slots = options.slots,
            .kept = options.kept,
            .prefill = options.prefill,
            .reads_ahead = reads_ahead(options),
            .slots_per_segment = memory->slots_per_segment(),
            .reads = !source.files.empty()},
           make_policy(options.policy, {layers, experts, options.slots})) {
  if (source.files.empty()) return;
  const auto slots = static_cast<size_t>(options.slots);
  refused.reserve(slots);
  leaving.reserve(memory->segments().size());
  loader = std::make_unique<Loader>(
      LoaderOptions{.slots = options.slots,
                    .record_bytes = options.record_bytes,
                    .staging = options.staging,
                    .verify = options.loan == nullptr ? options.verify : Verify::kNever,
                    .reader = options.reader},
      source, std::move(pack), *memory, options.topology,
      [this](Loader::Ended ended) { on_ended(std::move(ended)); });
  const Turn begin(*this);
}

Pool::Impl::Impl(const PoolOptions& given, const Runtime& given_runtime, int32_t layers,
                 int32_t experts)
    : Impl(given, given_runtime, nothing_to_read(layers, experts), nullptr, layers, experts) {
  if (options.slots != layers * experts) {
    throw_invalid("a pool without a source holds every expert: slots must be " +
                  std::to_string(layers * experts) + ", got " + std::to_string(options.slots));
  }
}

Pool::Impl::Impl(const PoolOptions& given, const Runtime& given_runtime, Source given_source,
                 PackRecord pack)
    : Impl(given, given_runtime, checked(given_source, pack, given), pack, given_source.layers,
           given_source.experts) {}

void Pool::Impl::check_open() const {
  if (core.closed()) throw Error(ErrorKind::kClosed, "this pool of experts is closed");
}

void Pool::Impl::check_experts(int32_t layer, std::span<const int32_t> indices) const {
  const auto [layers, experts] = std::pair(core.options().layers, core.options().experts);
  if (layer < 0 || layer >= layers) {
    throw_invalid("layer " + std::to_string(layer) + " is not in [0, " + std::to_string(layers) +
                  ")");
  }
  for (int32_t index : indices) {
    if (index >= 0 && index < experts) continue;
    throw_invalid("expert " + std::to_string(index) + " of layer " + std::to_string(layer) +
                  " is not in [0, " + std::to_string(experts) + ")");
  }
}

// A read that is refused and a segment that cannot leave are events again.
void Pool::Impl::carry_out() {
  for (Effects* effects = &core.effects(); effects->any(); effects = &core.effects()) {
    queued |= !effects->reads.empty() || !effects->raised.empty();
    if (!effects->reads.empty()) loader->begin(core.slots(), effects->reads, refused);
    for (int32_t slot : effects->raised) loader->raise_priority(slot);
    if (loader != nullptr) queued |= loader->will_need(effects->predicted);
    if (effects->landed) landed.notify_all();
    if (effects->freed && core.claims().queued()) freed.notify_all();
    if (effects->idle) idle.notify_all();
    if (effects->resized) resized.notify_all();
    if (effects->forward_ended && forward_waiters > 0) forward_ended.notify_all();
    if ((effects->landed || effects->freed || effects->idle) && progress) progress();
    leaving.assign(effects->vacant.begin(), effects->vacant.end());
    effects->clear();

    for (Loader::Ended& ended : refused) {
      core.failed(ended.slot, ended.bytes, std::move(*ended.error));
    }
    refused.clear();
    for (int64_t segment : leaving) {
      if (!let_go(segment)) core.sizing().stays(segment);
    }
  }
}

void Pool::Impl::flush(Lock& lock) {
  const bool begin = std::exchange(queued, false);
  lock.unlock();
  if (begin) loader->flush();
}

void Pool::Impl::on_ended(Loader::Ended ended) {
  const Turn turn(*this);
  if (ended.error) {
    core.failed(ended.slot, ended.bytes, std::move(*ended.error));
  } else {
    core.landed(ended.slot, ended.bytes);
  }
}

// The I/O thread takes the segment from the ring, then drops its pages.
bool Pool::Impl::let_go(int64_t segment) {
  try {
    loader->reader().unregister_buffer(memory->segments()[segment],
                                       [this, segment] { on_dropped(segment); });
    return true;
  } catch (const Error&) {
    return false;  // the reader is closed: all goes with the pool
  } catch (const std::bad_alloc&) {
    return false;
  }
}

void Pool::Impl::on_dropped(int64_t segment) {
  memory->drop(segment);
  const Turn turn(*this);
  core.sizing().gone(segment);
}

void Pool::Impl::on_registered(int64_t segment) {
  const Turn turn(*this);
  core.sizing().came(segment);
}

bool Pool::Impl::grow(Lock& lock) {
  const int64_t segment = core.sizing().next_to_come();
  if (segment < 0) return false;
  lock.unlock();
  std::optional<Error> error;
  try {
    memory->fault_in(segment);
    loader->reader().register_buffer(memory->segments()[segment],
                                     [this, segment] { on_registered(segment); });
  } catch (const Error& thrown) {
    error = thrown;
  } catch (const std::bad_alloc&) {
    error = Error(ErrorKind::kMemory, "no memory to make this pool of experts larger");
  }
  if (error) memory->drop(segment);
  lock.lock();
  if (!error) return true;
  core.sizing().failed(segment);
  carry_out();
  throw *error;
}

int64_t Pool::Impl::present_bytes() const {
  int64_t bytes = 0;
  for (size_t segment = 0; segment < memory->segments().size(); ++segment) {
    if (!core.sizing().held(static_cast<int64_t>(segment))) continue;
    bytes += static_cast<int64_t>(memory->segments()[segment].bytes);
  }
  return bytes;
}

Pool::Impl::Patience Pool::Impl::patience() const {
  const auto now = Clock::now();
  return {now + options.timeout, now + kInterruptSlice};
}

bool Pool::Impl::wait(Lock& lock, std::condition_variable& condition, Patience& patience,
                      ClaimState* queued) const {
  if (Clock::now() >= patience.deadline) return false;
  condition.wait_until(lock, std::min(patience.deadline, patience.ask));
  // Not only after a slice without news: those who wait on a busy pool are woken all the time.
  const auto now = Clock::now();
  if (now < patience.ask) return true;
  patience.ask = now + kInterruptSlice;
  struct PassedOver {
    ClaimState* claim;
    explicit PassedOver(ClaimState* queued) : claim(queued) {
      if (claim != nullptr) claim->passed_over = true;
    }
    ~PassedOver() {
      if (claim != nullptr) claim->passed_over = false;
    }
  } const passed_over(queued);
  check_interrupted(runtime, "waiting for experts", lock);
  return true;
}

Pool::Pool(const PoolOptions& options, const Runtime& runtime, Source source, PackRecord pack)
    : impl_(std::make_unique<Impl>(options, runtime, std::move(source), std::move(pack))) {}

Pool::Pool(const PoolOptions& options, const Runtime& runtime, int32_t layers, int32_t experts)
    : impl_(std::make_unique<Impl>(options, runtime, layers, experts)) {}

Pool::~Pool() {
  if (impl_->owner.forked()) {
    // The threads that read and those that wait exist in the parent alone: joining them, or
    // destroying what they wait on, would hang.
    static_cast<void>(impl_.release());
    return;
  }
  close();
  if (impl_->loader != nullptr) impl_->loader->close();
}

void Pool::fill(int32_t layer, int32_t expert, std::span<const std::byte> record) {
  Impl& impl = *impl_;
  impl.check_process();
  impl.check_experts(layer, {&expert, 1});
  if (!impl.memory_only())
    throw_invalid("fill() is for pools without a source; this one reads its records");
  if (static_cast<int64_t>(record.size()) != impl.options.record_bytes) {
    throw_invalid("a record has " + std::to_string(impl.options.record_bytes) + " bytes; got " +
                  std::to_string(record.size()));
  }
  const ExpertId id = impl.core.id_of(layer, expert);
  Impl::Lock lock(impl.mutex);
  impl.check_open();
  const int32_t slot = impl.core.fill(id);
  if (slot < 0) {
    throw_invalid(describe(impl.source, id) + " is in use; fill() it when no forward runs");
  }
  lock.unlock();
  std::memcpy(impl.memory->record(slot), record.data(), record.size());
  const Impl::Turn turn(impl);
  impl.core.filled(slot);
}

void Pool::promote(int32_t layer, std::span<const int32_t> experts) {
  std::vector<Claim::Entry> entries(experts.size());
  Claim claim(*this, layer, experts, entries);
  ReadyExpert ready;
  while (claim.next({&ready, 1}) > 0) claim.release({&ready, 1});
}

void Pool::prefetch(int32_t layer, std::span<const int32_t> experts, Phase phase) {
  impl_->check_process();
  impl_->check_experts(layer, experts);
  const Impl::Turn turn(*impl_);
  impl_->check_open();
  const Stopwatch decision(impl_->stats_of(layer, phase).decision_nanoseconds);
  impl_->core.prefetch(layer, experts, phase);
  impl_->carry_out();
}

void Pool::expect(int32_t layer, std::span<const int32_t> experts, Phase phase) {
  impl_->check_process();
  impl_->check_experts(layer, experts);
  const Impl::Turn turn(*impl_);
  impl_->check_open();
  const Stopwatch decision(impl_->stats_of(layer, phase).decision_nanoseconds);
  impl_->core.expect(layer, experts, phase);
  impl_->carry_out();
}

int32_t Pool::evict(int32_t layer, std::span<const int32_t> experts) {
  impl_->check_process();
  impl_->check_experts(layer, experts);
  if (impl_->memory_only()) {
    throw_invalid("a pool without a source cannot evict: its records exist nowhere else");
  }
  const Impl::Turn turn(*impl_);
  impl_->check_open();
  return impl_->core.evict(layer, experts);
}

int32_t Pool::resize(int32_t slots) {
  Impl& impl = *impl_;
  impl.check_process();
  if (impl.memory_only()) {
    throw_invalid("a pool without a source cannot be resized: its records exist nowhere else");
  }
  if (impl.options.sharing == Sharing::kShared || impl.options.loan != nullptr) {
    throw_invalid("a pool that processes share keeps its size");
  }
  if (slots < impl.options.least_slots || slots > impl.options.slots) {
    throw_invalid("this pool takes " + std::to_string(impl.options.least_slots) + " to " +
                  std::to_string(impl.options.slots) + " slots; got " + std::to_string(slots));
  }
  Impl::Lock lock(impl.mutex);
  impl.check_open();
  impl.core.sizing().resize(slots);
  impl.carry_out();
  auto patience = impl.patience();
  while (!impl.core.sizing().settled()) {
    // Memory that comes takes the time that the kernel takes to clear it.
    if (impl.grow(lock)) patience.deadline = impl.patience().deadline;
    impl.check_open();
    if (impl.core.sizing().settled()) break;
    if (impl.wait(lock, impl.resized, patience)) continue;
    throw Error(ErrorKind::kTimeout,
                "the pool did not come to " + std::to_string(slots) + " slots in " +
                    std::to_string(impl.options.timeout.count()) +
                    " ms: the I/O thread does not come to it; the rest is done when it does");
  }
  return impl.core.slots().limit();
}

void Pool::observe(int32_t layer, std::span<const float> scores) {
  impl_->check_process();
  impl_->check_experts(layer, {});
  if (static_cast<int64_t>(scores.size()) != experts()) {
    throw_invalid("observe() takes one score per expert, " + std::to_string(experts()) + "; got " +
                  std::to_string(scores.size()));
  }
  const Impl::Lock lock(impl_->mutex);
  impl_->check_open();
  impl_->core.observe(layer, scores);
}

ModelUse Pool::model_use() const {
  impl_->check_process();
  const Impl::Lock lock(impl_->mutex);
  return impl_->core.use();
}

void Pool::warm_up() {
  impl_->check_process();
  const Impl::Turn turn(*impl_);
  impl_->check_open();
  impl_->core.warm_up();
}

void Pool::count_elsewhere(int32_t layer, std::span<const int64_t> ids, int32_t top_k,
                           std::span<const int32_t> elsewhere, bool alone) {
  impl_->check_process();
  impl_->check_experts(layer, {});
  const bool prompt = phase_of(static_cast<int64_t>(ids.size()) / top_k) == Phase::kPrefill;
  const Impl::Lock lock(impl_->mutex);
  impl_->core.use().count_elsewhere(layer, ids, top_k, elsewhere, prompt, alone);
}

void Pool::split_cold(int32_t layer, std::span<const float> weights, int32_t top_k, int64_t most,
                      SplitChoices& choices) {
  impl_->check_process();
  const Impl::Lock lock(impl_->mutex);
  impl_->core.split_cold(layer, weights, top_k, most, choices);
}

void Pool::split_by_pool(int32_t layer, const Pool& fallback, SplitChoices& choices) {
  impl_->check_process();
  std::vector<SlotState> there(static_cast<size_t>(experts()));
  fallback.states(layer, there);
  const Impl::Lock lock(impl_->mutex);
  impl_->core.split_by_pool(layer, there, choices);
}

void Pool::reroute(int32_t layer, std::span<const float> scores, float bias, int64_t kept,
                   std::span<int64_t> chosen, int32_t top_k) {
  impl_->check_process();
  const Impl::Lock lock(impl_->mutex);
  impl_->core.reroute(layer, scores, bias, kept, chosen, top_k);
}

void Pool::check_process() const { impl_->check_process(); }

SlotState Pool::state(int32_t layer, int32_t expert) const {
  impl_->check_process();
  impl_->check_experts(layer, {&expert, 1});
  const Impl::Lock lock(impl_->mutex);
  return impl_->core.state(impl_->core.id_of(layer, expert));
}

void Pool::states(int32_t layer, std::span<SlotState> states) const {
  impl_->check_process();
  impl_->check_experts(layer, {});
  const Impl::Lock lock(impl_->mutex);
  impl_->core.states(layer, states);
}

std::vector<LayerStats> Pool::stats() const {
  impl_->check_process();
  const Impl::Lock lock(impl_->mutex);
  return impl_->core.statistics().by_layer();
}

PoolTotals Pool::totals() const {
  impl_->check_process();
  const Impl::Lock lock(impl_->mutex);
  return impl_->core.statistics().totals();
}

PoolStats Pool::detailed_stats() const {
  impl_->check_process();
  PoolStats copy(layers(), experts());  // its memory, before the lock is taken
  const Impl::Lock lock(impl_->mutex);
  copy = impl_->core.statistics().counts();
  copy.slots = impl_->core.slots().limit();
  copy.kept = copy.slots - impl_->core.slots().unkept();
  return copy;
}

void Pool::reset_stats() {
  impl_->check_process();
  const Impl::Lock lock(impl_->mutex);
  impl_->core.reset_statistics();
}

bool Pool::wait_for_forwards(int32_t layer, int64_t forwards,
                             std::chrono::milliseconds patience) const {
  Impl& impl = *impl_;
  impl.check_process();
  impl.check_experts(layer, {});
  Impl::Lock lock(impl.mutex);
  ++impl.forward_waiters;
  const bool woken = impl.forward_ended.wait_for(lock, patience, [&] {
    return impl.core.closed() || impl.core.statistics().forwards(layer) >= forwards;
  });
  --impl.forward_waiters;
  return woken && !impl.core.closed();
}

int64_t Pool::forwards(int32_t layer) const {
  impl_->check_process();
  impl_->check_experts(layer, {});
  const Impl::Lock lock(impl_->mutex);
  return impl_->core.statistics().forwards(layer);
}

void Pool::drain() {
  impl_->check_process();
  Impl::Lock lock(impl_->mutex);
  auto patience = impl_->patience();
  while (impl_->core.slots().loading() > 0) {
    if (impl_->wait(lock, impl_->idle, patience)) continue;
    throw Error(ErrorKind::kTimeout, std::to_string(impl_->core.slots().loading()) +
                                         " reads have not ended within the time-out of " +
                                         std::to_string(impl_->options.timeout.count()) + " ms");
  }
}

void Pool::close() {
  impl_->check_process();
  const Impl::Lock lock(impl_->mutex);
  impl_->core.close();
  impl_->forward_ended.notify_all();
  impl_->resized.notify_all();
}

void Pool::on_progress(std::function<void()> call) {
  impl_->check_process();
  const Impl::Lock lock(impl_->mutex);
  impl_->progress = std::move(call);
}

int Pool::shared_descriptor() const {
  const int descriptor = impl_->memory->descriptor();
  if (descriptor < 0) throw_invalid("this pool's memory is not shared: it lies in no memfd");
  return descriptor;
}

int64_t Pool::shared_bytes() const { return impl_->options.slots * impl_->options.record_bytes; }

int64_t Pool::shared_offset(const std::byte* record) const {
  return record - impl_->memory->segments().front().data;
}

const Source& Pool::source() const { return impl_->source; }

void Pool::validate() const {
  impl_->check_process();
  const Impl::Lock lock(impl_->mutex);
  impl_->core.validate();
  if (impl_->loader != nullptr) impl_->loader->validate();
}

int32_t Pool::layers() const { return impl_->core.options().layers; }
int32_t Pool::experts() const { return impl_->core.options().experts; }
int32_t Pool::first_expert() const { return impl_->source.first_expert; }
int32_t Pool::routed_experts() const { return std::max(experts(), impl_->source.routed_experts); }
int32_t Pool::least_slots() const { return impl_->options.least_slots; }
int32_t Pool::segment_slots() const { return std::max(1, impl_->memory->slots_per_segment()); }
int32_t Pool::most_slots() const { return impl_->options.slots; }

int32_t Pool::slots() const {
  impl_->check_process();
  const Impl::Lock lock(impl_->mutex);
  return impl_->core.slots().limit();
}

int32_t Pool::pinned() const {
  impl_->check_process();
  const Impl::Lock lock(impl_->mutex);
  return impl_->core.slots().pinned();
}

int64_t Pool::memory_bytes() const {
  impl_->check_process();
  const Impl::Lock lock(impl_->mutex);
  return impl_->present_bytes() + (impl_->loader ? impl_->loader->staging_bytes() : 0);
}

int64_t Pool::slot_bytes() const {
  impl_->check_process();
  const Impl::Lock lock(impl_->mutex);
  return impl_->present_bytes();
}

std::chrono::milliseconds Pool::timeout() const { return impl_->options.timeout; }
const Topology& Pool::topology() const { return impl_->options.topology; }
const char* Pool::policy() const { return impl_->core.slots().policy().name(); }
const Reader* Pool::reader() const {
  return impl_->loader == nullptr ? nullptr : &impl_->loader->reader();
}

}  // namespace torch_mesh
