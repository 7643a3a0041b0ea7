// The core without threads, clock or disk. Events are drawn from a seed, in any order that the
// states allow; each is followed by a check of all invariants. The threaded pool then runs the same
// events.
#include "residency/core/core.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <array>
#include <deque>
#include <memory>
#include <numeric>
#include <optional>
#include <random>
#include <string>
#include <vector>

#include "residency/pool.h"
#include "seed.h"
#include "store_fixture.h"

namespace torch_mesh {
namespace {

using Ids = std::vector<int32_t>;

// The transitions of slots, waiting claims and segments. A run counts them, by comparing the core
// before and after each event.
enum class Seen : uint8_t {
  kReservedEmpty,
  kReservedByEviction,
  kLandedPinned,
  kLandedUnpinned,
  kLandedRetired,  // the slot is retired, and so empty at once
  kFailedPinned,   // the error is kept for the claims that joined
  kFailedUnpinned,
  kBegunAnew,  // a failed prefetch that a claim had joined
  kErrorSeenByLast,
  kEvicted,
  kRetiredInUse,  // its last user empties it
  kRaised,
  kPredicted,
  kQueuedFirst,
  kQueuedBehind,
  kLeftQueueWithSlot,
  kLeftQueueFromFront,  // without a slot, as after a time-out
  kLeftQueueFromWithin,
  kSegmentLeaves,
  kSegmentGone,
  kSegmentStays,
  kSegmentComes,
  kSegmentThere,
  kSegmentThereTooLate,
  kSegmentNotToBeHad,
  kCount,
};
constexpr std::array kSeenNames{
    "a slot is reserved that was empty",
    "a slot is reserved that another expert gave up",
    "a read lands for somebody",
    "a read lands for nobody",
    "a read lands in a retired slot",
    "a read fails for somebody",
    "a read fails for nobody",
    "a read that failed is begun anew",
    "the last one sees an error",
    "a record is evicted",
    "a slot is retired in use",
    "a read is raised",
    "a predicted expert has no slot yet",
    "a claim queues first",
    "a claim queues behind another",
    "a claim leaves the queue with a slot",
    "a claim leaves the front of the queue without one",
    "a claim leaves the queue from within",
    "a segment leaves",
    "a segment has gone",
    "a segment stays",
    "a segment comes",
    "a segment is there",
    "a segment is there too late",
    "a segment cannot be had",
};
static_assert(kSeenNames.size() == static_cast<size_t>(Seen::kCount));

struct Counts {
  std::array<int64_t, static_cast<size_t>(Seen::kCount)> of{};
  int64_t events = 0;

  void operator()(Seen what) { ++of[static_cast<size_t>(what)]; }
};

struct Shape {
  int32_t layers, experts, slots, slots_per_segment;
  std::string policy;
  WarmUpOptions warm_up = {};
  SoftPinOptions soft_pins = {};
  PrefillWindow prefill = PrefillWindow::kAuto;
};

class Driver {
 public:
  Driver(const Shape& shape, uint64_t seed, Counts& counts)
      : shape_(shape),
        random_(seed),
        seen_(counts),
        core_({.layers = shape.layers,
               .experts = shape.experts,
               .slots = shape.slots,
               .warm_up = shape.warm_up,
               .soft_pins = shape.soft_pins,
               .prefill = shape.prefill,
               .reads_ahead = 2,
               .slots_per_segment = shape.slots_per_segment},
              make_policy(shape.policy, {shape.layers, shape.experts})),
        target_(shape.slots) {
    after("the start");
  }

  void run(int64_t events) {
    for (int64_t event = 0; event < events && !::testing::Test::HasFailure(); ++event) step();
    finish();
  }

  // A hash of all effects so far: equal events must give equal effects.
  uint64_t hash() const { return hash_; }

 private:
  struct Live {
    ClaimState state;
    Ids experts;
    std::vector<ClaimEntry> entries;
    Ids held;
    size_t handed_out = 0;
    bool queued = false;
  };
  struct Pending {
    int32_t slot;
    bool demand;
  };

  int32_t below(int32_t count) { return static_cast<int32_t>(random_() % count); }
  bool one_in(int32_t count) { return below(count) == 0; }
  Ids some_experts(int32_t max_count) {
    Ids all(shape_.experts);
    std::iota(all.begin(), all.end(), 0);
    std::shuffle(all.begin(), all.end(), random_);
    all.resize(1 + below(std::min(max_count, shape_.experts)));
    return all;
  }

  void step() {
    before();
    switch (below(16)) {
      case 0:
      case 1:
        return begin();
      case 2:
      case 3:
      case 4:
        return use_claim();
      case 5:
        return one_in(3) ? drop_claim() : use_claim();
      case 6:
      case 7:
      case 8:
        return one_in(12) ? fail_read() : land();
      case 9:
        return one_in(3) ? fail_read() : land();
      case 10:
      case 11:
        return hint();
      case 12:
        core_.evict(below(shape_.layers), some_experts(3));
        return after("evict()");
      case 13:
        return resize();
      default:
        return move_segment();
    }
  }

  void begin() {
    if (live_.size() > 5) return;
    auto live = std::make_unique<Live>();
    live->experts = some_experts(one_in(3) ? shape_.experts : 3);
    ForwardPart part{.phase = static_cast<Phase>(below(3)), .last = !one_in(3)};
    if (one_in(5)) part.kind = ClaimKind::kVisit;
    part.rows = below(3) * 64;
    part.streams = one_in(2);
    size_t left_out = 0;
    if (part.phase == Phase::kDecode && part.kind == ClaimKind::kForward) {
      if (one_in(4)) part.kind = ClaimKind::kDeferred;
      part.deferral.fallback = one_in(3);
      if (part.kind == ClaimKind::kForward && one_in(2))
        left_out = below(static_cast<int32_t>(live->experts.size()));
      part.deferral.experts = std::span(live->experts).last(left_out);
    }
    live->entries.resize(live->experts.size() - left_out);
    live->state.layer = below(shape_.layers);
    live->state.part = part;
    live->state.experts = live->experts;
    live->state.entries = live->entries;
    core_.begin(live->state);
    live_.push_back(std::move(live));
    after("begin()");
  }

  Live* any_claim() {
    return live_.empty() ? nullptr : live_[below(static_cast<int32_t>(live_.size()))].get();
  }

  // One step of the forward that owns a claim.
  void use_claim() {
    if (Live* live = any_claim()) use(*live);
  }

  void use(Live& live) {
    ClaimState& claim = live.state;
    if (live.queued) {
      core_.advance(claim);
      after("advance()");
      if (claim.joined > 0) leave_queue(live);
      return;
    }
    if (!live.held.empty() && one_in(2)) return release(live);
    core_.advance(claim);
    std::array<HandedOut, 3> ready;
    std::optional<Error> error;
    const int32_t count =
        core_.claims().hand_out(claim, std::span(ready).first(1 + below(ready.size())), error);
    ASSERT_TRUE(!error || count == 0);
    live.handed_out += count + error.has_value();
    for (int32_t i = 0; i < count; ++i) {
      const auto [index, slot] = ready[i];
      ASSERT_EQ(core_.slots()[slot].expert, core_.id_of(claim.layer, live.experts[index]));
      live.held.push_back(index);
    }
    after("hand_out()");
    if (count > 0 || error) return;
    if (claim.waiting == 0 && claim.joined == 0) {
      ASSERT_EQ(live.handed_out, live.entries.size()) << "each expert is handed out once";
      if (live.held.empty()) end(live);
    } else if (claim.joined == 0 && claim.held == 0) {
      seen_(core_.claims().queued() ? Seen::kQueuedBehind : Seen::kQueuedFirst);
      core_.claims().enter_queue(claim);
      live.queued = true;
      queue_.push_back(&live);
      after("enter_queue()");
    }
  }

  void release(Live& live) {
    std::shuffle(live.held.begin(), live.held.end(), random_);
    const int32_t count = 1 + below(static_cast<int32_t>(live.held.size()));
    const std::span<const int32_t> some = std::span<const int32_t>(live.held).first(count);
    ASSERT_EQ(core_.release(live.state, some), some.size());
    ASSERT_EQ(core_.release(live.state, some.first(1)), 0u) << "it holds that no more";
    live.held.erase(live.held.begin(), live.held.begin() + count);
    after("release()");
  }

  void leave_queue(Live& live) {
    before();
    if (live.state.joined > 0) {
      seen_(Seen::kLeftQueueWithSlot);
    } else {
      seen_(queue_.front() == &live ? Seen::kLeftQueueFromFront : Seen::kLeftQueueFromWithin);
    }
    core_.claims().leave_queue(live.state);
    live.queued = false;
    std::erase(queue_, &live);
    after("leave_queue()");
  }

  void drop_claim() {
    Live* live = any_claim();
    if (live == nullptr) return;
    if (live->queued) leave_queue(*live);
    before();
    end(*live);
  }

  void end(Live& live) {
    const ForwardPart part = live.state.part;
    core_.end(live.state);
    std::erase_if(live_, [&](const auto& each) { return each.get() == &live; });
    after(part.phase != Phase::kNone && part.last ? "the end of a forward" : "end()");
  }

  int32_t take_pending() {
    const int32_t at = below(static_cast<int32_t>(pending_.size()));
    const int32_t slot = pending_[at].slot;
    pending_.erase(pending_.begin() + at);
    return slot;
  }

  void land() {
    if (pending_.empty()) return;
    const int32_t slot = take_pending();
    const bool pinned = core_.slots()[slot].pins > 0, retired = core_.slots().retired(slot);
    core_.landed(slot, 10);
    seen_(retired && !pinned ? Seen::kLandedRetired
          : pinned           ? Seen::kLandedPinned
                             : Seen::kLandedUnpinned);
    after("landed()");
  }

  void fail_read() {
    if (pending_.empty()) return;
    const int32_t slot = take_pending();
    const bool pinned = core_.slots()[slot].pins > 0;
    const ErrorKind kind = one_in(4) ? ErrorKind::kClosed : ErrorKind::kRead;
    core_.failed(slot, 10, Error(kind, "no such luck"));
    const bool anew = core_.slots()[slot].state == SlotState::kLoading && pinned;
    seen_(anew ? Seen::kBegunAnew : pinned ? Seen::kFailedPinned : Seen::kFailedUnpinned);
    after("failed()");
  }

  void hint() {
    const int32_t layer = below(shape_.layers);
    const auto phase = static_cast<Phase>(below(3));
    switch (below(3)) {
      case 0:
        core_.prefetch(layer, some_experts(4), phase);
        break;
      case 1:
        core_.expect(layer, some_experts(4), phase);
        break;
      default:
        core_.expect(layer, some_experts(4), phase);
        if (one_in(10)) core_.warm_up();
    }
    after("a hint");
  }

  void resize() {
    if (!one_in(3)) return;
    target_ = 1 + below(shape_.slots);
    core_.resize(target_);
    after("resize()");
  }

  void move_segment() {
    if (!leaving_.empty() && one_in(2)) {
      const int64_t segment = leaving_.front();
      leaving_.pop_front();
      if (one_in(8)) {
        core_.detach_failed(segment);
        core_.resize(target_);  // the next resize() reuses the segment
        seen_(Seen::kSegmentStays);
        return after("detach_failed()");
      }
      core_.detached(segment);
      seen_(Seen::kSegmentGone);
      return after("detached()");
    }
    if (coming_ >= 0) {
      const int64_t segment = std::exchange(coming_, -1);
      if (one_in(6)) {
        core_.attach_failed(segment);
        seen_(Seen::kSegmentNotToBeHad);
        return after("no memory");
      }
      core_.attached(segment);
      const bool late = !core_.end_event().vacant.empty();
      seen_(late ? Seen::kSegmentThereTooLate : Seen::kSegmentThere);
      return after("attached()");
    }
    coming_ = core_.next_to_attach();
    if (coming_ >= 0) seen_(Seen::kSegmentComes);
    after("next_to_attach()");
  }

  void before() {
    was_.clear();
    head_was_ = queue_.empty() ? nullptr : queue_.front();
    for (int32_t slot = 0; slot < shape_.slots; ++slot) {
      const Slot& at = core_.slots()[slot];
      was_.push_back({at.state, at.pins, at.error.has_value(), core_.slots().retired(slot)});
    }
  }

  void mix(uint64_t value) { hash_ = (hash_ ^ value) * 0x100000001b3; }

  // Applies the effects that this test simulates, then checks all invariants.
  void after(const char* event) {
    ++seen_.events;
    Effects& effects = core_.end_event();
    for (int32_t slot : effects.reads) {
      const ExpertId expert = core_.slots()[slot].expert;
      mix(uint64_t{1} << 60 | static_cast<uint64_t>(slot) << 32 | static_cast<uint64_t>(expert));
      const auto same = [&](const Pending& each) { return each.slot == slot; };
      ASSERT_TRUE(std::ranges::none_of(pending_, same)) << event << ": two reads into one slot";
      ASSERT_EQ(core_.slots()[slot].state, SlotState::kLoading) << event;
      ASSERT_GE(expert, 0) << event;
      const bool raised = std::ranges::find(effects.raised, slot) != effects.raised.end();
      pending_.push_back({slot, core_.slots()[slot].urgency == Urgency::kDemand && !raised});
    }
    for (int32_t slot : effects.raised) {
      mix(uint64_t{2} << 60 | static_cast<uint64_t>(slot));
      const auto read =
          std::ranges::find_if(pending_, [&](const Pending& each) { return each.slot == slot; });
      ASSERT_NE(read, pending_.end()) << event << ": raises no read";
      ASSERT_FALSE(read->demand) << event << ": raises a demand read";
      read->demand = true;
      seen_(Seen::kRaised);
    }
    for (int64_t segment : effects.vacant) {
      mix(uint64_t{3} << 60 | static_cast<uint64_t>(segment));
      leaving_.push_back(segment);
      seen_(Seen::kSegmentLeaves);
    }
    for (ExpertId id : effects.predicted) {
      mix(uint64_t{4} << 60 | static_cast<uint64_t>(id));
      ASSERT_LT(core_.slots().find(id), 0) << event << ": is there already";
      seen_(Seen::kPredicted);
    }
    look_who_is_woken(event, effects);
    effects.clear();
    for (size_t slot = 0; slot < was_.size(); ++slot) look_at(static_cast<int32_t>(slot));
    was_.clear();
    ASSERT_EQ(static_cast<int32_t>(pending_.size()), core_.slots().loading()) << event;
    ASSERT_NO_THROW(core_.validate()) << event;
  }

  // A missing wake-up only delays a pool by 0.1 s, so tests of the pool do not notice it.
  void look_who_is_woken(const std::string& event, const Effects& effects) {
    mix(uint64_t{5} << 60 | uint64_t{effects.landed} << 4 | uint64_t{effects.freed} << 3 |
        uint64_t{effects.idle} << 2 | uint64_t{effects.resized} << 1 |
        uint64_t{effects.forward_ended});
    int32_t loading = 0;
    bool landed = false, freed = false;
    for (size_t slot = 0; slot < was_.size(); ++slot) {
      const Was& was = was_[slot];
      const Slot& is = core_.slots()[static_cast<int32_t>(slot)];
      const bool ended = was.state == SlotState::kLoading && is.state != SlotState::kLoading;
      loading += was.state == SlotState::kLoading;
      landed |= ended && was.pins > 0;
      freed |= (was.state == SlotState::kLoading || was.pins > 0) &&
               is.state != SlotState::kLoading && is.pins == 0;
    }
    const Live* head = queue_.empty() ? nullptr : queue_.front();
    freed |= !was_.empty() && head != head_was_ && head_was_ != nullptr;
    EXPECT_TRUE(!landed || effects.landed) << event << " wakes nobody who waits for a read";
    EXPECT_TRUE(!freed || queue_.empty() || effects.freed) << event << " wakes nobody who queues";
    EXPECT_TRUE(loading == 0 || core_.slots().loading() > 0 || effects.idle)
        << event << " wakes nobody who waits for quiet";
    const bool sized = event == "detached()" || event == "attached()" || event == "resize()" ||
                       event == "no memory" || event == "detach_failed()";
    EXPECT_TRUE(!sized || effects.resized) << event << " wakes nobody who resizes";
    EXPECT_TRUE(event != "the end of a forward" || effects.forward_ended);
  }

  void look_at(int32_t slot) {
    const auto [state, pins, error, retired] = was_[slot];
    const Slot& is = core_.slots()[slot];
    if (state == SlotState::kEmpty && is.state == SlotState::kLoading) seen_(Seen::kReservedEmpty);
    if (state == SlotState::kReady && is.state == SlotState::kLoading)
      seen_(Seen::kReservedByEviction);
    if (state == SlotState::kReady && is.state == SlotState::kEmpty) seen_(Seen::kEvicted);
    if (error && !is.error) seen_(Seen::kErrorSeenByLast);
    if (retired && state == SlotState::kReady && pins > 0 && is.pins == 0) {
      ASSERT_EQ(is.state, SlotState::kEmpty);
      seen_(Seen::kRetiredInUse);
    }
  }

  // Completes all reads and claims. None may be stuck, whatever happened before.
  void finish() {
    for (int32_t round = 0; !live_.empty() || !pending_.empty(); ++round) {
      ASSERT_LT(round, 10000) << "somebody waits for ever";
      if (::testing::Test::HasFailure()) return;
      for (size_t i = 0; i < live_.size(); ++i) {
        before();
        use(*live_[i]);
      }
      before();
      land();
    }
    core_.close();
    EXPECT_EQ(core_.slots().pinned(), 0);
  }

  struct Was {
    SlotState state;
    int32_t pins;
    bool error, retired;
  };

  const Shape& shape_;
  std::mt19937_64 random_;
  Counts& seen_;
  Core core_;
  std::vector<std::unique_ptr<Live>> live_;
  std::vector<Live*> queue_;
  std::vector<Pending> pending_;
  std::deque<int64_t> leaving_;
  int64_t coming_ = -1;
  int32_t target_;
  std::vector<Was> was_;
  const Live* head_was_ = nullptr;
  uint64_t hash_ = 0xcbf29ce484222325;
};

Shape random_shape(std::mt19937_64& random) {
  const auto between = [&](int32_t low, int32_t high) {
    return low + static_cast<int32_t>(random() % (high - low + 1));
  };
  Shape shape{.layers = between(1, 4),
              .experts = between(1, 9),
              .slots = 1,
              .slots_per_segment = 0,
              .policy = ""};
  const int32_t all = shape.layers * shape.experts;
  shape.slots = between(1, all);
  shape.slots_per_segment = random() % 3 == 0 ? 0 : between(1, shape.slots);
  const auto names = policy_names();
  shape.policy = std::string(names[random() % names.size()]);
  if (random() % 2 == 0) {
    ModelUse& profile = shape.warm_up.profile = ModelUse(shape.layers, shape.experts);
    std::ranges::fill(profile.tokens, 100);
    for (int64_t& uses : profile.uses) uses = between(0, 100);
    shape.soft_pins.early_layers = between(0, shape.layers);
    shape.soft_pins.early_experts = between(0, 3);
  }
  shape.warm_up.fill = random() % 2 == 0;
  shape.prefill = static_cast<PrefillWindow>(between(0, 2));
  return shape;
}

TEST(Core, KeepsItsInvariantsUnderAMillionEvents) {
  const uint64_t seed = testing::fresh_seed();
  SCOPED_TRACE("TORCH_MESH_TEST_SEED=" + std::to_string(seed));
  std::mt19937_64 random(seed);
  Counts seen;
  while (seen.events < 1'000'000 && !HasFailure()) {
    const Shape shape = random_shape(random);
    SCOPED_TRACE(shape.policy + ", " + std::to_string(shape.slots) + " slots for " +
                 std::to_string(shape.layers) + " x " + std::to_string(shape.experts));
    Driver(shape, random(), seen).run(3000);
  }
  for (size_t what = 0; what < kSeenNames.size(); ++what) {
    EXPECT_GT(seen.of[what], 0) << "never: " << kSeenNames[what];
  }
}

TEST(Core, IsAFunctionOfItsEvents) {
  const uint64_t seed = testing::fresh_seed();
  SCOPED_TRACE("TORCH_MESH_TEST_SEED=" + std::to_string(seed));
  std::mt19937_64 random(seed);
  for (int round = 0; round < 20; ++round) {
    const Shape shape = random_shape(random);
    const uint64_t events = random();
    std::array<uint64_t, 2> hashes{};
    for (uint64_t& hash : hashes) {
      Counts seen;
      Driver driver(shape, events, seen);
      driver.run(1000);
      hash = driver.hash();
    }
    EXPECT_EQ(hashes[0], hashes[1]);
  }
}

TEST(Core, AGrowthThatFindsNoMemoryForItsLastSegmentIsTakenBack) {
  constexpr int32_t kSlots = 16, kFew = 4;
  Core core({.layers = 1, .experts = kSlots, .slots = kSlots, .slots_per_segment = kFew},
            make_policy("lru", {1, kSlots}));
  const auto detach = [&] {
    Effects& effects = core.end_event();
    const std::vector<int64_t> vacant = effects.vacant;
    effects.clear();
    for (const int64_t segment : vacant) core.detached(segment);
    return vacant;
  };
  core.resize(kFew);
  EXPECT_EQ(detach(), (std::vector<int64_t>{1, 2, 3}));
  core.resize(kSlots);
  ASSERT_EQ(core.next_to_attach(), 1);
  core.attached(1);
  EXPECT_EQ(core.slots().limit(), 2 * kFew);
  ASSERT_EQ(core.next_to_attach(), 2);
  core.attach_failed(2);
  EXPECT_EQ(core.slots().limit(), kFew);
  EXPECT_EQ(detach(), (std::vector<int64_t>{1}));
  EXPECT_TRUE(core.sizing().settled());
  EXPECT_EQ(core.next_to_attach(), -1);
  core.validate();

  // The last resize() decides, also if it came while the segment was being attached.
  core.resize(kSlots);
  ASSERT_EQ(core.next_to_attach(), 1);
  core.resize(kFew - 1);
  core.attach_failed(1);
  EXPECT_EQ(core.slots().limit(), kFew - 1);
  EXPECT_TRUE(core.sizing().settled());
  core.validate();
}

// -- the threaded pool ----------------------------------------------------------------------------

constexpr int64_t kRecord = 4096;

// The states of all experts of a pool or core.
template <typename Target>
std::vector<SlotState> states_of(const Target& target, const Shape& shape) {
  std::vector<SlotState> states(static_cast<size_t>(shape.layers) * shape.experts);
  for (int32_t layer = 0; layer < shape.layers; ++layer) {
    target.states(layer, std::span(states).subspan(static_cast<size_t>(layer) * shape.experts));
  }
  return states;
}

// Runs the events of a script (forwards, hints, sizes) one after the other on the threaded pool,
// with one read at a time, in order of urgency. All reads end before the next event.
class OnPool {
 public:
  OnPool(const Shape& shape, const Source& source)
      : shape_(shape), pool_(options(shape), {}, source, nullptr) {
    pool_.drain();
  }

  void forward(int32_t layer, const Ids& experts, const ForwardPart& part) {
    std::vector<ClaimEntry> entries(experts.size());
    Claim claim(pool_, layer, experts, entries, part);
    std::array<ReadyExpert, 2> ready;
    for (;;) {
      pool_.drain();
      const int32_t count = claim.next(ready);
      if (count == 0) break;
      claim.release(std::span(ready).first(count));
    }
    pool_.drain();
  }
  void prefetch(int32_t layer, const Ids& experts) {
    pool_.prefetch(layer, experts, Phase::kDecode);
    pool_.drain();
  }
  void expect(int32_t layer, const Ids& experts) {
    pool_.expect(layer, experts, Phase::kDecode);
    pool_.drain();
  }
  void evict(int32_t layer, const Ids& experts) {
    pool_.evict(layer, experts);
    pool_.drain();
  }
  void resize(int32_t slots) {
    pool_.resize(slots);
    pool_.drain();
  }

  std::vector<SlotState> states() const { return states_of(pool_, shape_); }
  PoolStats stats() const {
    pool_.validate();
    return pool_.detailed_stats();
  }

 private:
  static PoolOptions options(const Shape& shape) {
    PoolOptions options;
    options.slots = shape.slots;
    options.record_bytes = kRecord;
    options.policy = shape.policy;
    options.warm_up = shape.warm_up;
    options.soft_pins = shape.soft_pins;
    options.prefill = shape.prefill;
    options.verify = Verify::kNever;  // hashing in parallel could reorder completions
    options.reader.backend = "threads";
    options.reader.threads = 1;
    options.reader.depth = 1;
    options.segment_bytes = shape.slots_per_segment * kRecord;
    return options;
  }

  const Shape& shape_;
  Pool pool_;
};

// Runs the same events on the core.
class OnCore {
 public:
  explicit OnCore(const Shape& shape)
      : shape_(shape),
        core_({.layers = shape.layers,
               .experts = shape.experts,
               .slots = shape.slots,
               .warm_up = shape.warm_up,
               .soft_pins = shape.soft_pins,
               .prefill = shape.prefill,
               .reads_ahead = 1,
               .slots_per_segment = shape.slots_per_segment},
              make_policy(shape.policy, {shape.layers, shape.experts})) {
    drain();
  }

  void forward(int32_t layer, const Ids& experts, const ForwardPart& part) {
    std::vector<ClaimEntry> entries(experts.size() - part.deferral.experts.size());
    ClaimState claim{.layer = layer, .part = part, .experts = experts, .entries = entries};
    core_.begin(claim);
    std::array<HandedOut, 2> ready;
    std::optional<Error> error;
    for (;;) {
      drain();
      core_.advance(claim);
      const int32_t count = core_.claims().hand_out(claim, ready, error);
      if (count == 0 && claim.waiting + claim.joined == 0) break;
      ASSERT_TRUE(count > 0 || claim.joined > 0);
      Ids indices;
      for (int32_t i = 0; i < count; ++i) indices.push_back(ready[i].index);
      carry_out();
      core_.release(claim, indices);
    }
    carry_out();
    core_.end(claim);
    drain();
  }
  void prefetch(int32_t layer, const Ids& experts) {
    core_.prefetch(layer, experts, Phase::kDecode);
    drain();
  }
  void expect(int32_t layer, const Ids& experts) {
    core_.expect(layer, experts, Phase::kDecode);
    drain();
  }
  void evict(int32_t layer, const Ids& experts) {
    core_.evict(layer, experts);
    drain();
  }
  void resize(int32_t slots) {
    core_.resize(slots);
    drain();
    while (!core_.sizing().settled()) {
      const int64_t segment = core_.next_to_attach();
      ASSERT_GE(segment, 0);
      core_.attached(segment);
      drain();
    }
  }

  std::vector<SlotState> states() const { return states_of(core_, shape_); }
  PoolStats stats() const {
    core_.validate();
    PoolStats stats = core_.statistics().counts();
    stats.slots = core_.slots().limit();
    stats.early = stats.slots - core_.slots().slots_without_early();
    return stats;
  }

 private:
  void carry_out() {
    for (Effects* effects = &core_.end_event(); effects->any(); effects = &core_.end_event()) {
      for (int32_t slot : effects->reads) {
        queues_[static_cast<size_t>(core_.slots()[slot].urgency)].push_back(slot);
      }
      for (int32_t slot : effects->raised) {
        for (auto& queue : queues_) {
          if (std::erase(queue, slot) > 0) queues_[0].push_back(slot);
        }
      }
      const std::vector<int64_t> leaving = effects->vacant;
      effects->clear();
      for (int64_t segment : leaving) core_.detached(segment);
    }
  }

  void drain() {
    for (;;) {
      carry_out();
      const auto queue =
          std::ranges::find_if(queues_, [](const auto& each) { return !each.empty(); });
      if (queue == queues_.end()) return;
      const int32_t slot = queue->front();
      queue->pop_front();
      core_.landed(slot, kRecord);
    }
  }

  const Shape& shape_;
  Core core_;
  std::array<std::deque<int32_t>, kUrgencies.size()> queues_;
};

// Whether a statistic depends on a clock.
bool is_time(std::string_view count) { return count.ends_with("nanoseconds"); }

TEST(Core, TheThreadedPoolGivesTheSameStatesAndCounts) {
  const uint64_t seed = testing::fresh_seed();
  SCOPED_TRACE("TORCH_MESH_TEST_SEED=" + std::to_string(seed));
  std::mt19937_64 random(seed);
  const auto below = [&](int32_t count) { return static_cast<int32_t>(random() % count); };
  for (int round = 0; round < 12 && !HasFailure(); ++round) {
    Shape shape = random_shape(random);
    // An arena has at least one slot per segment.
    shape.slots_per_segment = std::max(1, shape.slots_per_segment);
    SCOPED_TRACE(shape.policy + ", " + std::to_string(shape.slots) + " slots for " +
                 std::to_string(shape.layers) + " x " + std::to_string(shape.experts));
    const testing::RecordFile file(shape.layers, shape.experts, [](int32_t layer, int32_t expert) {
      return std::vector<std::byte>(kRecord, static_cast<std::byte>(16 * layer + expert));
    });
    OnPool pool(shape, file.source());
    OnCore core(shape);
    const auto on_both = [&](auto&& act) {
      act(pool);
      act(core);
    };
    for (int32_t event = 0; event < 150 && !HasFailure(); ++event) {
      const int32_t layer = below(shape.layers), other = below(shape.layers);
      Ids experts(shape.experts);
      std::iota(experts.begin(), experts.end(), 0);
      std::ranges::shuffle(experts, random);
      experts.resize(1 + below(shape.experts));
      ForwardPart part{.phase = static_cast<Phase>(below(3))};
      part.rows = below(3) * 64;
      part.streams = below(2) == 0;
      if (part.phase == Phase::kDecode && experts.size() > 1 && below(3) == 0) {
        part.deferral.experts = std::span(experts).last(1);
        part.deferral.fallback = below(2) == 0;
      }
      const int32_t choice = below(8), slots = 1 + below(shape.slots);
      on_both([&](auto& target) {
        switch (choice) {
          case 0:
            return target.prefetch(other, experts);
          case 1:
            return target.expect(other, experts);
          case 2:
            return target.evict(other, experts);
          case 3:
            return target.resize(slots);
          default:
            return target.forward(layer, experts, part);
        }
      });
      ASSERT_EQ(pool.states(), core.states()) << "after event " << event;
      const PoolStats there = pool.stats(), here = core.stats();
      EXPECT_EQ(std::tuple(there.slots, there.early, there.shrinks, there.grows),
                std::tuple(here.slots, here.early, here.shrinks, here.grows));
      for (size_t phase = 0; phase < kPhases; ++phase) {
        for (int32_t at = 0; at < shape.layers; ++at) {
          for (const auto& [name, count] : kLayerCounts) {
            if (is_time(name)) continue;
            EXPECT_EQ(there.layers[phase][at].*count, here.layers[phase][at].*count)
                << name << " of layer " << at << " after event " << event;
          }
        }
      }
    }
  }
}

// One layer whose predictions are right every other time, with one prefetch before each forward.
class Guesses {
 public:
  // How many predicted reads begin in `forwards` forwards. `in_time`: they end before the forward.
  int32_t reads_in(int32_t forwards, bool in_time) {
    int32_t begun = 0;
    for (int32_t round = 0; round < forwards; ++round) {
      next_ = (next_ + 3) % kExperts;  // cold again by then
      core_.expect(0, Ids{next_}, Phase::kDecode);
      begun += take();
      if (in_time) land();
      const Ids used{round % 2 == 0 ? next_ : next_ + 1};
      std::array<ClaimEntry, 1> entries;
      ClaimState claim{
          .layer = 0, .part = {.phase = Phase::kDecode}, .experts = used, .entries = entries};
      core_.begin(claim);
      take();
      land();
      std::array<HandedOut, 1> ready;
      std::optional<Error> error;
      EXPECT_EQ(core_.claims().hand_out(claim, ready, error), 1);
      core_.release(claim, Ids{0});
      core_.end(claim);
      take();
    }
    return begun;
  }

 private:
  static constexpr int32_t kExperts = 63, kSlots = 8;

  int32_t take() {
    Effects& effects = core_.end_event();
    const auto begun = static_cast<int32_t>(effects.reads.size());
    under_way_.insert(under_way_.end(), effects.reads.begin(), effects.reads.end());
    effects.clear();
    return begun;
  }
  void land() {
    while (!under_way_.empty()) {
      core_.landed(under_way_.front(), kRecord);
      under_way_.pop_front();
      take();
    }
  }

  Core core_{{.layers = 1, .experts = kExperts, .slots = kSlots, .reads_ahead = 2},
             make_policy("lru", {1, kExperts})};
  std::deque<int32_t> under_way_;
  int32_t next_ = 0;
};

TEST(Core, APredictionMustBeRightMoreOftenWhenItsReadEndsTooLate) {
  Guesses guesses;
  EXPECT_EQ(guesses.reads_in(300, true), 300);
  EXPECT_GT(guesses.reads_in(300, false), 0);  // until the late reads have been noticed
  EXPECT_EQ(guesses.reads_in(300, false), 0);
}

}  // namespace
}  // namespace torch_mesh
