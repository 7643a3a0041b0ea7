#include "residency/pool.h"

#include <algorithm>
#include <cstring>
#include <ranges>
#include <utility>

#include "residency/pool_impl.h"
#include "store/record.h"

namespace torch_mesh {
namespace {

using Clock = std::chrono::steady_clock;

// How long a waiting thread goes without asking the interrupt hook.
constexpr std::chrono::milliseconds kWaitSlice{100};

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
  if (source.raw && options.reader.backend == "mmap") {
    throw_invalid(
        "io=\"mmap\" uses records as they lie in a store, and this checkpoint's weights are packed "
        "when they are read; convert it (torch-mesh convert, or name a store=), or use "
        "io=\"auto\"");
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

}  // namespace

int64_t staging_bytes(const Source& source) {
  if (!source.raw) return 0;
  int64_t largest = 0;
  for (size_t first = 0; first < source.extents.size(); first += source.pieces) {
    int64_t bytes = 0;
    for (int32_t piece = 0; piece < source.pieces; ++piece) {
      bytes += round_up(source.extents[first + piece].bytes, kRecordAlignment) + kRecordAlignment;
    }
    largest = std::max(largest, bytes);
  }
  return largest;
}

Pool::Impl::Impl(const PoolOptions& given, const Runtime& given_runtime, Source given_source,
                 PackRecord given_pack, int32_t given_layers, int32_t given_experts)
    : options(checked(given, given_layers, given_experts)),
      runtime(given_runtime),
      source(std::move(given_source)),
      pack(std::move(given_pack)),
      layers(given_layers),
      experts(given_experts),
      mapping(maps() ? std::make_shared<MappedFiles>(source.files) : nullptr),
      arena(maps() ? 0 : options.slots, options.record_bytes, options.topology,
            options.segment_bytes),
      slots(layers * experts, options.slots,
            make_policy(options.policy, {layers, experts, options.slots, options.quotas})),
      loads(static_cast<size_t>(options.slots)),
      kept(options.kept, layers, experts, slots),
      use(options.kept.profile.tokens.empty() ? ModelUse(layers, experts) : options.kept.profile),
      warming(options.kept.elsewhere.empty()),
      last_phase(static_cast<size_t>(layers), Phase::kNone),
      expected(experts),
      segments(arena.segments().size(), SegmentState::kPresent),
      target(options.slots),
      stats(layers, experts),
      forwards(static_cast<size_t>(layers)),
      queue_links(options.slots),
      demand_queue(queue_links),
      prefetch_queue(queue_links) {
  awaited.reserve(static_cast<size_t>(layers) * experts);
}

Pool::Impl::Impl(const PoolOptions& given, const Runtime& given_runtime, int32_t given_layers,
                 int32_t given_experts)
    : Impl(given, given_runtime, Source{}, nullptr, given_layers, given_experts) {
  if (options.slots != layers * experts) {
    throw_invalid("a pool without a source holds every expert: slots must be " +
                  std::to_string(layers * experts) + ", got " + std::to_string(options.slots));
  }
}

Pool::Impl::Impl(const PoolOptions& given, const Runtime& given_runtime, Source given_source,
                 PackRecord given_pack)
    : Impl(given, given_runtime, checked(given_source, given_pack, given), given_pack,
           given_source.layers, given_source.experts) {
  open();
}

void Pool::Impl::open() {
  const auto all = static_cast<size_t>(layers) * experts;
  checksums = source.checksums;
  checksums.resize(all);
  checksum_known.assign(all, !source.checksums.empty());
  verified.assign(all, false);

  std::span<const MemoryRegion> buffers = arena.segments();
  if (source.raw) {
    staging_arena.emplace(options.staging, staging_bytes(source), options.topology);
    buffers = staging_arena->segments();
    for (int32_t buffer = 0; buffer < options.staging; ++buffer) free_staging.push_back(buffer);
  }
  const auto done = [this](const ReadResult& result) { on_read(result); };
  to_cool.reserve(mapping ? all : 0);
  reader = mapping ? open_mapped_reader(options.reader, mapping, done)
                   : open_reader(options.reader, source.files, buffers, done);

  const int64_t alignment = reader->alignment();
  if (alignment < 1 || kRecordAlignment % alignment != 0) {
    throw_invalid("this file system wants direct reads in multiples of " +
                  std::to_string(alignment) +
                  " bytes; records are aligned to 4096. Move the model to another disk");
  }
  for (const Extent& extent : source.extents) {
    if (source.raw || extent.offset % alignment == 0) continue;
    throw_invalid("a record of " + source.files[extent.file].path + " starts at offset " +
                  std::to_string(extent.offset) + ", no multiple of the " +
                  std::to_string(alignment) +
                  " bytes that direct reads need; convert the checkpoint again");
  }
  const Lock lock(mutex);
  read_ahead();
}

void Pool::Impl::check_process() const { owner.check("this pool"); }

void Pool::Impl::check_open() const {
  if (closed) throw Error(ErrorKind::kClosed, "this pool of experts is closed");
}

void Pool::Impl::check_experts(int32_t layer, std::span<const int32_t> indices) const {
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

std::string Pool::Impl::describe(ExpertId id) const {
  return "expert " + std::to_string(id % experts) + " of layer " + std::to_string(id / experts);
}

ErrorPlace Pool::Impl::place_of(ExpertId id) const {
  const int32_t layer = id / experts, expert = id % experts;
  if (source.extents.empty()) return {layer, expert, "", -1};
  const Extent& extent = source.expert(layer, expert)[0];
  return {layer, expert, source.files[extent.file].path, extent.offset};
}

int32_t Pool::Impl::reserve(ExpertId id, Phase phase) {
  if (!slots.has_empty()) {
    const ExpertId victim = choose_victim();
    if (victim == kNoExpert) return -1;
    evict(slots.find(victim), phase);
  }
  return slots.reserve(id);
}

void Pool::Impl::evict(int32_t slot, Phase phase) {
  const ExpertId id = slots[slot].expert;
  if (loads[slot].unused) count_wasted(slot);
  ++stats_of(id / experts, phase).evicted;
  ++stats.experts[id].evicted;
  slots.evict(slot);
  // Advice may be lost; memory for it is not asked for here.
  if (mapping && to_cool.size() < to_cool.capacity()) to_cool.push_back(id);
}

void Pool::Impl::count_wasted(int32_t slot) {
  LayerStats& layer = stats_of(slot);
  ++layer.prefetches_wasted;
  layer.wasted_bytes += loads[slot].bytes;
  loads[slot].unused = false;
}

void Pool::Impl::read_ahead() {
  // As many chunks as the reader lets prefetches have, and a record to follow; a slot that is taken
  // sooner is an eviction that may prove needless.
  const ReaderOptions& io = options.reader;
  const int64_t chunks = (options.record_bytes + io.chunk_bytes - 1) / io.chunk_bytes;
  const int64_t most =
      std::min(1 + (io.depth / 4 + chunks - 1) / chunks, int64_t{slots.unkept() / 2});
  // Those that queue for slots come first.
  while (!closed && prefetching < most && first_ticket == nullptr) {
    const auto reserve_one = [this](ExpertId id) { return reserve(id, expected_phase); };
    int32_t slot = expected.reserve_next(slots, reserve_one);
    const Phase phase = slot < 0 ? Phase::kNone : expected_phase;
    if (slot < 0 && warming) slot = kept.reserve_warm();
    if (slot < 0) return;
    start_load(slot, Urgency::kPrefetch, phase);
  }
}

void Pool::Impl::wake_slot_waiters() {
  if (first_ticket != nullptr) freed.notify_all();
}

Pool::Impl::Patience Pool::Impl::patience() const {
  const auto now = Clock::now();
  return {now + options.timeout, now + kWaitSlice};
}

bool Pool::Impl::wait(Lock& lock, std::condition_variable& condition, Patience& patience) const {
  if (Clock::now() >= patience.deadline) return false;
  condition.wait_until(lock, std::min(patience.deadline, patience.ask));
  // Not only after a slice without news: those who wait on a busy pool are woken all the time.
  const auto now = Clock::now();
  if (now < patience.ask) return true;
  patience.ask = now + kWaitSlice;
  if (runtime.interrupted == nullptr) return true;
  lock.unlock();  // the hook may take a lock of its own, such as Python's
  const bool interrupted = runtime.interrupted();
  lock.lock();
  if (interrupted) throw Error(ErrorKind::kInterrupted, "interrupted while waiting for experts");
  return true;
}

Pool::Pool(const PoolOptions& options, const Runtime& runtime, Source source, PackRecord pack)
    : impl_(std::make_unique<Impl>(options, runtime, std::move(source), std::move(pack))) {}

Pool::Pool(const PoolOptions& options, const Runtime& runtime, int32_t layers, int32_t experts)
    : impl_(std::make_unique<Impl>(options, runtime, layers, experts)) {}

Pool::~Pool() {
  if (impl_->owner.forked()) {
    // The I/O thread and those that wait exist in the parent alone: joining it, or destroying what
    // they wait on, would hang.
    static_cast<void>(impl_.release());
    return;
  }
  close();
  if (impl_->reader != nullptr) impl_->reader->close();
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
  const ExpertId id = impl.id_of(layer, expert);
  Impl::Lock lock(impl.mutex);
  impl.check_open();
  if (const int32_t present = impl.slots.find(id); present >= 0) {
    if (!impl.slots.reusable(present)) {
      throw_invalid(impl.describe(id) + " is in use; fill() it when no forward runs");
    }
    impl.slots.evict(present);
  }
  const int32_t slot = impl.slots.reserve(id);
  lock.unlock();
  std::memcpy(impl.arena.piece(slot), record.data(), record.size());
  lock.lock();
  impl.slots.land(slot);
  impl.landed.notify_all();
  if (impl.slots.loading() == 0) impl.idle.notify_all();
}

void Pool::promote(int32_t layer, std::span<const int32_t> experts) {
  std::vector<Claim::Entry> entries(experts.size());
  Claim claim(*this, layer, experts, entries);
  ReadyExpert ready;
  while (claim.next({&ready, 1}) > 0) claim.release(ready.index);
}

void Pool::prefetch(int32_t layer, std::span<const int32_t> experts, Phase phase) {
  Impl& impl = *impl_;
  impl.check_process();
  impl.check_experts(layer, experts);
  const Impl::Lock lock(impl.mutex);
  impl.check_open();
  // Those that queue for slots come first.
  if (impl.memory_only() || impl.first_ticket != nullptr) return;
  const Stopwatch decision(impl.stats_of(layer, phase).decision_nanoseconds);
  const auto ids =
      experts | std::views::transform([&](int32_t expert) { return impl.id_of(layer, expert); });
  while_kept(impl.slots, ids, [&] {
    for (ExpertId id : ids) {
      if (impl.prefetching >= impl.slots.unkept() / 2) break;
      if (impl.slots.find(id) >= 0) continue;
      const int32_t slot = impl.reserve(id, phase);
      if (slot < 0) break;
      impl.start_load(slot, Urgency::kPrefetch, phase);
    }
  });
}

void Pool::expect(int32_t layer, std::span<const int32_t> experts, Phase phase) {
  Impl& impl = *impl_;
  impl.check_process();
  impl.check_experts(layer, experts);
  const Impl::Lock lock(impl.mutex);
  impl.check_open();
  if (impl.memory_only()) return;
  const Stopwatch decision(impl.stats_of(layer, phase).decision_nanoseconds);
  impl.expected.set(layer, experts);
  impl.expected_phase = phase;
  impl.read_ahead();
}

int32_t Pool::evict(int32_t layer, std::span<const int32_t> experts) {
  Impl& impl = *impl_;
  impl.check_process();
  impl.check_experts(layer, experts);
  if (impl.memory_only()) {
    throw_invalid("a pool without a source cannot evict: its records exist nowhere else");
  }
  Impl::Lock lock(impl.mutex);
  impl.check_open();
  int32_t evicted = 0;
  for (int32_t expert : experts) {
    const int32_t slot = impl.slots.find(impl.id_of(layer, expert));
    if (slot < 0 || !impl.slots.reusable(slot)) continue;
    impl.evict(slot, Phase::kNone);
    ++evicted;
  }
  if (evicted > 0) impl.wake_slot_waiters();
  lock.unlock();
  impl.cool_evicted();
  return evicted;
}

void Pool::observe(int32_t layer, std::span<const float> scores) {
  impl_->check_process();
  impl_->check_experts(layer, {});
  if (static_cast<int64_t>(scores.size()) != impl_->experts) {
    throw_invalid("observe() takes one score per expert, " + std::to_string(impl_->experts) +
                  "; got " + std::to_string(scores.size()));
  }
  const Impl::Lock lock(impl_->mutex);
  impl_->check_open();
  if (!impl_->covers_all()) impl_->slots.policy().observe(layer, scores);
}

ModelUse Pool::model_use() const {
  impl_->check_process();
  const Impl::Lock lock(impl_->mutex);
  return impl_->use;
}

void Pool::warm_up() {
  impl_->check_process();
  const Impl::Lock lock(impl_->mutex);
  impl_->check_open();
  if (std::exchange(impl_->warming, true) || impl_->memory_only()) return;
  impl_->read_ahead();
}

void Pool::count_elsewhere(int32_t layer, std::span<const int64_t> ids, int32_t top_k,
                           std::span<const int32_t> elsewhere, bool alone) {
  impl_->check_process();
  impl_->check_experts(layer, {});
  const bool prompt = phase_of(static_cast<int64_t>(ids.size()) / top_k) == Phase::kPrefill;
  const Impl::Lock lock(impl_->mutex);
  impl_->use.count_elsewhere(layer, ids, top_k, elsewhere, prompt, alone);
}

void Pool::check_process() const { impl_->check_process(); }

SlotState Pool::state(int32_t layer, int32_t expert) const {
  impl_->check_process();
  impl_->check_experts(layer, {&expert, 1});
  const Impl::Lock lock(impl_->mutex);
  const int32_t slot = impl_->slots.find(impl_->id_of(layer, expert));
  return slot < 0 ? SlotState::kEmpty : impl_->slots[slot].state;
}

void Pool::states(int32_t layer, std::span<SlotState> states) const {
  impl_->check_process();
  impl_->check_experts(layer, {});
  const Impl::Lock lock(impl_->mutex);
  for (int32_t expert = 0; expert < impl_->experts; ++expert) {
    const int32_t slot = impl_->slots.find(impl_->id_of(layer, expert));
    states[expert] = slot < 0 ? SlotState::kEmpty : impl_->slots[slot].state;
  }
}

std::vector<LayerStats> Pool::stats() const {
  impl_->check_process();
  std::vector<LayerStats> sum(static_cast<size_t>(layers()));
  const Impl::Lock lock(impl_->mutex);
  for (const std::vector<LayerStats>& phase : impl_->stats.layers) {
    for (size_t layer = 0; layer < sum.size(); ++layer) sum[layer] += phase[layer];
  }
  return sum;
}

PoolStats Pool::detailed_stats() const {
  impl_->check_process();
  PoolStats copy(impl_->layers, impl_->experts);  // its memory, before the lock is taken
  const Impl::Lock lock(impl_->mutex);
  copy = impl_->stats;
  copy.slots = impl_->slots.limit();
  copy.kept = copy.slots - impl_->slots.unkept();
  return copy;
}

void Pool::count_rerouted(int32_t layer, int64_t choices, Phase phase) {
  impl_->check_process();
  const Impl::Lock lock(impl_->mutex);
  impl_->stats_of(layer, phase).rerouted += choices;
}

void Pool::reset_stats() {
  impl_->check_process();
  const Impl::Lock lock(impl_->mutex);
  // In place: a forward that waits holds on to its counter.
  PoolStats& stats = impl_->stats;
  for (std::vector<LayerStats>& phase : stats.layers) {
    std::fill(phase.begin(), phase.end(), LayerStats{});
  }
  std::fill(stats.experts.begin(), stats.experts.end(), ExpertStats{});
  stats.prefetch_error.reset();
  stats.shrinks = stats.grows = 0;
  for (Load& load : impl_->loads) load.unused = false;
}

bool Pool::wait_for_forwards(int32_t layer, int64_t forwards,
                             std::chrono::milliseconds patience) const {
  impl_->check_process();
  impl_->check_experts(layer, {});
  Impl::Lock lock(impl_->mutex);
  ++impl_->forward_waiters;
  const bool woken = impl_->forward_ended.wait_for(
      lock, patience, [&] { return impl_->closed || impl_->forwards[layer] >= forwards; });
  --impl_->forward_waiters;
  return woken && !impl_->closed;
}

int64_t Pool::forwards(int32_t layer) const {
  impl_->check_process();
  impl_->check_experts(layer, {});
  const Impl::Lock lock(impl_->mutex);
  return impl_->forwards[layer];
}

void Pool::drain() {
  impl_->check_process();
  Impl::Lock lock(impl_->mutex);
  auto patience = impl_->patience();
  while (impl_->slots.loading() > 0) {
    if (impl_->wait(lock, impl_->idle, patience)) continue;
    throw Error(ErrorKind::kTimeout, std::to_string(impl_->slots.loading()) +
                                         " reads have not ended within the time-out of " +
                                         std::to_string(impl_->options.timeout.count()) + " ms");
  }
}

void Pool::close() {
  impl_->check_process();
  const Impl::Lock lock(impl_->mutex);
  impl_->closed = true;
  impl_->forward_ended.notify_all();
  impl_->resized.notify_all();
}

void Pool::validate() const {
  impl_->check_process();
  const Impl::Lock lock(impl_->mutex);
  impl_->slots.validate();
  impl_->validate_claims();
  impl_->validate_loads();
  impl_->validate_segments();
}

int32_t Pool::layers() const { return impl_->layers; }
int32_t Pool::experts() const { return impl_->experts; }
int32_t Pool::least_slots() const { return impl_->options.least_slots; }
int32_t Pool::segment_slots() const {
  return impl_->mapping ? 1 : static_cast<int32_t>(impl_->arena.first_of(1));
}
int32_t Pool::most_slots() const { return impl_->options.slots; }

int32_t Pool::slots() const {
  impl_->check_process();
  const Impl::Lock lock(impl_->mutex);
  return impl_->slots.limit();
}

int32_t Pool::pinned() const {
  impl_->check_process();
  const Impl::Lock lock(impl_->mutex);
  return impl_->slots.pinned();
}

int64_t Pool::memory_bytes() const {
  impl_->check_process();
  const Impl::Lock lock(impl_->mutex);
  return impl_->present_bytes() + (impl_->staging_arena ? impl_->staging_arena->bytes() : 0);
}

int64_t Pool::slot_bytes() const {
  impl_->check_process();
  const Impl::Lock lock(impl_->mutex);
  return impl_->mapping ? impl_->slots.limit() * impl_->options.record_bytes
                        : impl_->present_bytes();
}

int64_t Pool::mapped_bytes() const { return impl_->mapping ? impl_->mapping->bytes() : 0; }

std::chrono::milliseconds Pool::timeout() const { return impl_->options.timeout; }
const Topology& Pool::topology() const { return impl_->options.topology; }
const char* Pool::policy() const { return impl_->slots.policy().name(); }
const Reader* Pool::reader() const { return impl_->reader.get(); }

}  // namespace torch_mesh
