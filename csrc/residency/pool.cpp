#include "residency/pool.h"

#include <algorithm>
#include <cstring>
#include <utility>

#include "base/at_end.h"
#include "base/interrupts.h"
#include "residency/lending/loan.h"
#include "residency/pool_impl.h"
#include "store/record.h"

namespace torch_mesh {
namespace {

using Clock = std::chrono::steady_clock;

PoolOptions checked(const PoolOptions& options, int32_t layers, int32_t experts) {
  const int64_t all = int64_t{layers} * experts;
  if (layers < 1 || experts < 1 || all > INT32_MAX) {
    throw_invalid(
        "a pool serves at least one layer of one expert and fewer than 2^31 experts; got ", layers,
        " layers of ", experts);
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
  check(options.soft_pins, layers, experts);
  return options;
}

void check(const Source& source, const PackRecord& pack, const PoolOptions& options) {
  validate(source);
  if (source.raw != static_cast<bool>(pack)) {
    throw_invalid(source.raw ? "a raw source needs a function that packs its records"
                             : "the records of a store are packed already; pass no pack function");
  }
  if (source.raw && options.staging < 1) {
    throw_invalid("a raw source needs at least one staging buffer; got ", options.staging);
  }
  if (!source.raw && source.pieces != 1) {
    throw_invalid("a store has one extent per record; got ", source.pieces);
  }
  const auto misfit =
      std::find_if(source.extents.begin(), source.extents.end(), [&](const Extent& e) {
        return !source.raw && (e.bytes != options.record_bytes || e.offset % kRecordAlignment != 0);
      });
  if (misfit != source.extents.end()) {
    throw_invalid("a record of ", source.files[misfit->file].path, " at offset ", misfit->offset,
                  " has ", misfit->bytes, " bytes; this model's layout has ", options.record_bytes,
                  " at multiples of ", kRecordAlignment);
  }
}

// As many records as the reader prefetches at a time, and one to follow. A slot that is taken
// sooner is an eviction that may prove needless. With a depth below four it is one record.
int64_t reads_ahead(const PoolOptions& options) {
  const int64_t chunk = std::min(options.reader.chunk_bytes, options.record_bytes);
  const int64_t at_a_time =
      std::min<int64_t>(options.reader.depth / 4 * chunk, kMaxBytesBesidePrefetch);
  return 1 + (at_a_time + options.record_bytes - 1) / options.record_bytes;
}

std::shared_ptr<SlotMemory> make_memory(const PoolOptions& options) {
  if (options.loan != nullptr) return options.loan;
  return std::make_shared<Arena>(options.slots, options.record_bytes, options.topology,
                                 options.segment_bytes, options.sharing);
}

}  // namespace

Pool::Impl::Impl(const PoolOptions& given, const Runtime& given_runtime, Source given_source,
                 PackRecord pack)
    : options(checked(given, given_source.layers, given_source.experts)),
      runtime(given_runtime),
      source(std::move(given_source)),
      memory(make_memory(options)),
      core({.layers = source.layers,
            .experts = source.experts,
            .slots = options.slots,
            .soft_pins = options.soft_pins,
            .prefill = options.prefill,
            .reads_ahead = reads_ahead(options),
            .slots_per_segment = static_cast<int32_t>(memory->first_of(1)),
            .reads = !source.files.empty()},
           make_policy(options.policy, {source.layers, source.experts, options.slots})) {
  if (source.files.empty()) return;
  leaving.reserve(memory->segments().size());
  loader = std::make_unique<Loader>(
      LoaderOptions{.slots = options.slots,
                    .record_bytes = options.record_bytes,
                    .staging = options.staging,
                    .verify = options.loan == nullptr ? options.verify : Verify::kNever,
                    .reader = options.reader},
      source, std::move(pack), *memory, options.topology,
      [this](Loader::Ended ended) { on_ended(std::move(ended)); });
  const Event begin(*this);
}

void Pool::Impl::throw_closed() {
  throw Error(ErrorKind::kClosed, "this pool of experts is closed");
}

void Pool::Impl::check_experts(int32_t layer, std::span<const int32_t> indices) const {
  const auto [layers, experts] = std::pair(core.options().layers, core.options().experts);
  if (layer < 0 || layer >= layers) {
    throw_invalid("layer ", layer, " is not in [0, ", layers, ")");
  }
  for (int32_t index : indices) {
    if (index >= 0 && index < experts) continue;
    throw_invalid("expert ", index, " of layer ", layer, " is not in [0, ", experts, ")");
  }
}

bool Pool::Impl::hint(HintOfCore hint, int32_t layer, std::span<const int32_t> experts,
                      Phase phase) {
  check_experts(layer, experts);
  const Event event(*this);
  if (core.closed()) return false;
  const Stopwatch decision(stats_of(layer, phase).decision_nanoseconds);
  (core.*hint)(layer, experts, phase);
  carry_out();
  return true;
}

// Refused reads, and segments that cannot be detached, are events again.
void Pool::Impl::carry_out() {
  for (Effects* effects = &core.effects(); effects->any(); effects = &core.effects()) {
    const bool reads = !effects->reads.empty();
    queued |= reads || !effects->raised.empty();
    if (reads) loader->begin(core.slots(), effects->reads);
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

    while (auto refused = reads ? loader->take_refused() : std::nullopt) {
      core.failed(refused->slot, refused->bytes, std::move(*refused->error));
    }
    for (int64_t segment : leaving) {
      if (!detach(segment)) core.sizing().detach_failed(segment);
    }
  }
}

void Pool::Impl::flush(Lock& lock) {
  const bool begin = std::exchange(queued, false);
  lock.unlock();
  if (begin) loader->flush();
}

void Pool::Impl::on_ended(Loader::Ended ended) {
  const Event event(*this);
  if (ended.error) {
    core.failed(ended.slot, ended.bytes, std::move(*ended.error));
  } else {
    timeline.landed(ended.slot, ended.read);
    core.landed(ended.slot, ended.bytes);
  }
}

// The I/O thread takes the segment from the ring, then drops its pages.
bool Pool::Impl::detach(int64_t segment) {
  const auto error = caught([&] {
    loader->reader().change_buffer(memory->segments()[segment], false, [this, segment] {
      memory->drop(segment);
      const Event event(*this);
      core.sizing().detached(segment);
    });
  });
  return !error;  // if the reader is closed, the memory is freed with the pool
}

bool Pool::Impl::grow(Lock& lock) {
  const int64_t segment = core.sizing().next_to_attach();
  if (segment < 0) return false;
  lock.unlock();
  const auto error = caught([&] {
    memory->fault_in(segment);
    loader->reader().change_buffer(memory->segments()[segment], true, [this, segment] {
      const Event event(*this);
      core.sizing().attached(segment);
    });
  });
  if (error) memory->drop(segment);
  lock.lock();
  if (!error) return true;
  core.sizing().attach_failed(segment);
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
  // Also after wake-ups: threads that wait on a busy pool are woken all the time.
  const auto now = Clock::now();
  if (now < patience.ask) return true;
  patience.ask = now + kInterruptSlice;
  if (queued != nullptr) queued->passed_over = true;
  const AtEnd asked([queued] {
    if (queued != nullptr) queued->passed_over = false;
  });
  check_interrupted(runtime, "waiting for experts", lock);
  return true;
}

Pool::Pool(const PoolOptions& options, const Runtime& runtime, Source source, PackRecord pack) {
  check(source, pack, options);
  impl_ = std::make_unique<Impl>(options, runtime, std::move(source), std::move(pack));
}

Pool::Pool(const PoolOptions& options, const Runtime& runtime, int32_t layers, int32_t experts)
    : impl_(std::make_unique<Impl>(options, runtime, Source{.layers = layers, .experts = experts},
                                   nullptr)) {
  if (options.slots == layers * experts) return;
  throw_invalid("a pool without a source holds every expert: slots must be ", layers * experts,
                ", got ", options.slots);
}

Pool::~Pool() {
  if (impl_->owner.forked()) {
    // The threads that read and those that wait exist in the parent alone: joining them, or
    // destroying the conditions that they wait on, would hang.
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
    throw_invalid("a record has ", impl.options.record_bytes, " bytes; got ", record.size());
  }
  const ExpertId id = impl.core.id_of(layer, expert);
  Impl::Lock lock(impl.mutex);
  impl.check_open();
  const int32_t slot = impl.core.fill(id);
  if (slot < 0) {
    throw_invalid(describe(impl.source, id), " is in use; fill() it when no forward runs");
  }
  lock.unlock();
  std::memcpy(impl.memory->piece(slot), record.data(), record.size());
  const Impl::Event event(impl);
  impl.core.filled(slot);
}

void Pool::promote(int32_t layer, std::span<const int32_t> experts) {
  std::vector<Claim::Entry> entries(experts.size());
  Claim claim(*this, layer, experts, entries);
  ReadyExpert ready;
  while (claim.next({&ready, 1}) > 0) claim.release({&ready, 1});
}

void Pool::prefetch(int32_t layer, std::span<const int32_t> experts, Phase phase) {
  if (!impl_->hint(&Core::prefetch, layer, experts, phase)) Impl::throw_closed();
}

void Pool::expect(int32_t layer, std::span<const int32_t> experts, Phase phase) {
  impl_->hint(&Core::expect, layer, experts, phase);
}

int32_t Pool::evict(int32_t layer, std::span<const int32_t> experts) {
  impl_->check_process();
  impl_->check_experts(layer, experts);
  if (impl_->memory_only()) {
    throw_invalid("a pool without a source cannot evict: its records exist nowhere else");
  }
  const Impl::Event event(*impl_);
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
  if (slots < impl.options.min_slots || slots > impl.options.slots) {
    throw_invalid("this pool takes ", impl.options.min_slots, " to ", impl.options.slots,
                  " slots; got ", slots);
  }
  Impl::Lock lock(impl.mutex);
  impl.check_open();
  impl.core.sizing().resize(slots);
  impl.carry_out();
  auto patience = impl.patience();
  while (!impl.core.sizing().settled()) {
    // The time that the kernel takes to clear new memory does not count.
    if (impl.grow(lock)) patience.deadline = impl.patience().deadline;
    impl.check_open();
    if (impl.core.sizing().settled()) break;
    if (impl.wait(lock, impl.resized, patience)) continue;
    throw Error(
        ErrorKind::kTimeout,
        concat("the pool did not come to ", slots, " slots in ", impl.options.timeout.count(),
               " ms: the I/O thread does not come to it; the rest is done when it does"));
  }
  return impl.core.slots().limit();
}

void Pool::observe(int32_t layer, std::span<const float> scores) {
  impl_->check_process();
  impl_->check_experts(layer, {});
  if (static_cast<int64_t>(scores.size()) != experts()) {
    throw_invalid("observe() takes one score per expert, ", experts(), "; got ", scores.size());
  }
  const Impl::Lock lock(impl_->mutex);
  impl_->check_open();
  impl_->core.observe(layer, scores);
}

ModelUse Pool::model_use() const { return impl_->locked_core()->use(); }

void Pool::warm_up() {
  const Impl::Event event(*impl_);
  impl_->check_open();
  impl_->core.warm_up();
}

void Pool::count_on_gpu(int32_t layer, std::span<const int64_t> ids, int32_t top_k,
                        std::span<const int32_t> on_gpu, bool alone) {
  impl_->check_process();
  impl_->check_experts(layer, {});
  const bool prompt = phase_of(static_cast<int64_t>(ids.size()) / top_k) == Phase::kPrefill;
  const Impl::Lock lock(impl_->mutex);
  impl_->core.use().count_on_gpu(layer, ids, top_k, on_gpu, prompt, alone);
}

void Pool::count_rerouted(int32_t layer, int64_t replaced) {
  const Impl::Lock lock = impl_->locked();
  impl_->stats_of(layer, Phase::kDecode).rerouted += replaced;
}

void Pool::check_process() const { impl_->check_process(); }

SlotState Pool::state(int32_t layer, int32_t expert) const {
  impl_->check_experts(layer, {&expert, 1});
  return impl_->locked_core()->state(impl_->core.id_of(layer, expert));
}

void Pool::states(int32_t layer, std::span<SlotState> states) const {
  impl_->check_experts(layer, {});
  impl_->locked_core()->states(layer, states);
}

std::vector<LayerStats> Pool::stats() const {
  return impl_->locked_core()->statistics().by_layer();
}
PoolTotals Pool::totals() const { return impl_->locked_core()->statistics().totals(); }

PoolStats Pool::detailed_stats() const {
  impl_->check_process();
  PoolStats copy(layers(), experts());  // allocated before the lock is taken
  const Impl::Lock lock(impl_->mutex);
  copy = impl_->core.statistics().counts();
  copy.slots = impl_->core.slots().limit();
  copy.kept = copy.slots - impl_->core.slots().slots_for_others();
  return copy;
}

void Pool::reset_stats() {
  const Impl::Lock lock = impl_->locked();
  impl_->core.reset_statistics();
  impl_->last_forward = {};
}

void Pool::record_misses(int32_t count) {
  if (count < 0 || count > kMaxMisses) {
    throw_invalid("a pool records 0 to ", kMaxMisses, " misses; got ", count);
  }
  const Impl::Lock lock = impl_->locked();
  impl_->timeline.start(count, impl_->options.slots);
}

std::vector<Miss> Pool::misses() const {
  const Impl::Lock lock = impl_->locked();
  return impl_->timeline.misses();
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
  impl_->check_experts(layer, {});
  return impl_->locked_core()->statistics().forwards(layer);
}

void Pool::drain() {
  Impl::Lock lock = impl_->locked();
  auto patience = impl_->patience();
  while (impl_->core.slots().loading() > 0) {
    if (impl_->wait(lock, impl_->idle, patience)) continue;
    throw Error(ErrorKind::kTimeout, concat(impl_->core.slots().loading(),
                                            " reads have not ended within the time-out of ",
                                            impl_->options.timeout.count(), " ms"));
  }
}

void Pool::close() {
  const Impl::Lock lock = impl_->locked();
  impl_->core.close();
  impl_->forward_ended.notify_all();
  impl_->resized.notify_all();
}

void Pool::on_progress(std::function<void()> call) {
  const Impl::Lock lock = impl_->locked();
  if (call && impl_->progress) {
    throw_invalid("this pool is lent already; close its lender, or lend a pool of its own");
  }
  impl_->progress = std::move(call);
}

bool Pool::lent() const {
  const Impl::Lock lock = impl_->locked();
  return impl_->progress != nullptr;
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
  const Impl::Lock lock = impl_->locked();
  impl_->core.validate();
  if (impl_->loader != nullptr) impl_->loader->validate();
}

int32_t Pool::layers() const { return impl_->core.options().layers; }
int32_t Pool::experts() const { return impl_->core.options().experts; }
int32_t Pool::first_expert() const { return impl_->source.first_expert; }
int32_t Pool::routed_experts() const { return std::max(experts(), impl_->source.routed_experts); }
int32_t Pool::min_slots() const { return impl_->options.min_slots; }
int32_t Pool::segment_slots() const {
  return std::max(1, static_cast<int32_t>(impl_->memory->first_of(1)));
}
int32_t Pool::max_slots() const { return impl_->options.slots; }
int32_t Pool::slots() const { return impl_->locked_core()->slots().limit(); }
int32_t Pool::pinned() const { return impl_->locked_core()->slots().pinned(); }

int64_t Pool::memory_bytes() const {
  const Impl::Lock lock = impl_->locked();
  return impl_->present_bytes() + (impl_->loader ? impl_->loader->staging_bytes() : 0);
}

int64_t Pool::slot_bytes() const {
  const Impl::Lock lock = impl_->locked();
  return impl_->present_bytes();
}

std::chrono::milliseconds Pool::timeout() const { return impl_->options.timeout; }
const Topology& Pool::topology() const { return impl_->options.topology; }
std::string_view Pool::policy() const { return resolve_policy(impl_->options.policy); }
const Reader* Pool::reader() const {
  return impl_->loader == nullptr ? nullptr : &impl_->loader->reader();
}

}  // namespace torch_mesh
