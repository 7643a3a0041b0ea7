// The engine as a whole, without torch: pool, reader and kernels behind a team of plain threads.
// Outputs are bit-identical for any residency, any way of reading and any concurrent work.
#include "engine/engine.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <bit>
#include <cmath>
#include <cstring>
#include <limits>
#include <map>
#include <memory>
#include <numeric>
#include <optional>
#include <random>
#include <span>
#include <string>
#include <string_view>
#include <thread>
#include <vector>

#include "allocations.h"
#include "base/error.h"
#include "claim_fixture.h"
#include "engine/grouping.h"
#include "engine/task_queue.h"
#include "engine_fixture.h"
#include "kernels/convert.h"
#include "residency/policies/policy.h"
#include "topology_fixture.h"

namespace torch_mesh {
namespace {

using namespace std::chrono_literals;
using namespace testing;

// Faults that every read survives.
Faults harmless_faults(uint64_t seed) {
  Faults faults;
  faults.seed = seed;
  faults.short_read = .1, faults.eintr = .1, faults.eagain = .1, faults.eio_once = .1;
  faults.delay = .3, faults.reorder = .2, faults.max_delay = 300us;
  return faults;
}

void expect_at_rest(Engine& engine) {
  engine.pool().drain();
  EXPECT_EQ(engine.pool().pinned(), 0);
  engine.pool().validate();
}

LayerStats total(Engine& engine) {
  LayerStats sum;
  for (const LayerStats& layer : engine.pool().stats()) {
    sum.cold_misses += layer.cold_misses, sum.evicted += layer.evicted;
    sum.failed += layer.failed;
  }
  return sum;
}

// -- policies -------------------------------------------------------------------------------------

// Forwards call policies under the pool's lock.
TEST(Policies, LearnWithoutAllocatingMemory) {
  constexpr int32_t kLayersOfModel = 4, kExpertsOfLayer = 64, kChosen = 6;
  for (const std::string_view name : policy_names()) {
    const auto policy = make_policy(name, {.layers = kLayersOfModel, .experts = kExpertsOfLayer});
    Random random;
    std::vector<int32_t> chosen;
    const auto forward = [&](int32_t layer) {
      chosen.clear();
      while (chosen.size() < kChosen) {
        // Low numbers are more frequent.
        const int32_t expert =
            std::min(random.below(kExpertsOfLayer), random.below(kExpertsOfLayer));
        if (std::ranges::find(chosen, expert) == chosen.end()) chosen.push_back(expert);
      }
      policy->tick(layer, chosen);
    };
    const auto run = [&](int32_t forwards) {
      const int64_t before = allocations;
      for (int32_t i = 0; i < forwards; ++i) {
        for (int32_t layer = 0; layer < kLayersOfModel; ++layer) forward(layer);
      }
      return allocations - before;
    };
    run(300);  // warm-up: some memory is allocated once
    EXPECT_EQ(run(600), 0) << name;
  }
}

// -- grouping -------------------------------------------------------------------------------------

TEST(Grouping, IsAStableSortThatLosesNothing) {
  Random random;
  Grouping grouping;
  for (int32_t round = 0; round < 200; ++round) {
    const int32_t tokens = random.below(20), top_k = 1 + random.below(6);
    const int32_t experts = 1 + random.below(40);
    const bool sentinels = random.below(2) == 1;
    std::vector<int64_t> ids;
    std::vector<float> weights;
    for (int32_t i = 0; i < tokens * top_k; ++i) {
      ids.push_back(random.below(experts + (sentinels ? 3 : 0)));
      weights.push_back(random.normal());
    }
    group_by_expert(ids.data(), weights.data(), tokens, top_k, experts, sentinels, grouping);

    std::map<int64_t, std::vector<int32_t>> expected;
    for (int32_t i = 0; i < tokens * top_k; ++i) {
      if (ids[i] < experts) expected[ids[i]].push_back(i);
    }
    ASSERT_EQ(grouping.experts.size(), expected.size());
    for (int32_t index = 0; index < std::ssize(grouping.experts); ++index) {
      const int32_t expert = grouping.experts[index];
      const std::vector<int32_t>& pairs = expected[expert];
      ASSERT_EQ(grouping.rows(index), std::ssize(pairs));
      if (index > 0) {  // most rows first, then by number
        ASSERT_GE(grouping.rows(index - 1), grouping.rows(index));
        ASSERT_TRUE(grouping.rows(index - 1) > grouping.rows(index) ||
                    grouping.experts[index - 1] < expert);
      }
      for (int32_t row = 0; row < grouping.rows(index); ++row) {
        const int32_t at = grouping.first[index] + row;
        ASSERT_EQ(grouping.out_rows[at], pairs[row]);
        ASSERT_EQ(grouping.tokens[at], pairs[row] / top_k);
        ASSERT_EQ(grouping.weights[at], weights[pairs[row]]);
      }
    }
  }
}

TEST(Grouping, ErrorNamesTheIdThatIsOutOfRange) {
  Grouping grouping;
  const std::vector<float> weights(6, 1.0f);
  const auto group = [&](std::vector<int64_t> ids, bool sentinels) {
    group_by_expert(ids.data(), weights.data(), 3, 2, 8, sentinels, grouping);
  };
  const Error high = error_of([&] { group({0, 1, 2, 8, 3, 4}, false); });
  EXPECT_EQ(high.kind(), ErrorKind::kInvalid);
  EXPECT_NE(std::string(high.what()).find("expert id 8 of token 1, choice 1"), std::string::npos)
      << high.what();
  const Error negative = error_of([&] { group({0, 1, 2, 3, 4, -1}, true); });
  EXPECT_NE(std::string(negative.what()).find("expert id -1 of token 2"), std::string::npos);
  const Error wraps = error_of([&] { group({0, 1, int64_t{1} << 32, 3, 4, 5}, false); });
  EXPECT_NE(std::string(wraps.what()).find("4294967296"), std::string::npos) << wraps.what();
}

// -- what a forward computes ----------------------------------------------------------------------

TEST(Engine, SumsTheWeightedExpertsOfEachToken) {
  for (const Format format : {Format::kBf16, Format::kInt8, Format::kInt4, Format::kLut4}) {
    const Model model(small_shape(format));
    const auto engine = model.open_resident({.threads = 2});
    const Batch batch(9, 3, model.shape().hidden, testing::seed());
    const std::vector<float> out = batch.run(*engine, 1);

    Random random;
    testing::Rows row(model.shape().layout(), 1, random);
    row.tokens = {0}, row.out_rows[0] = 0;
    double difference = 0, norm = 0;
    for (int32_t token = 0; token < batch.tokens; ++token) {
      std::copy_n(&batch.x[token * batch.stride], batch.hidden, row.row(0));
      std::vector<double> sum(static_cast<size_t>(batch.hidden), 0.0);
      for (int32_t pair = token * batch.top_k; pair < (token + 1) * batch.top_k; ++pair) {
        const testing::Unpacked weights(model.shape().layout(),
                                        model.record(1, static_cast<int32_t>(batch.ids[pair])));
        row.weights = {batch.weights[pair]};
        const std::vector<double> product = testing::ffn_reference(model.shape(), weights, row);
        for (int32_t i = 0; i < batch.hidden; ++i) sum[i] += product[i];
      }
      for (int32_t i = 0; i < batch.hidden; ++i) {
        const double error = out[token * batch.hidden + i] - sum[i];
        difference += error * error, norm += sum[i] * sum[i];
      }
    }
    // The reference uses the record's weights, so only the rounding of activations differs.
    EXPECT_LT(std::sqrt(difference / norm), format == Format::kBf16 ? 0.006 : 0.02)
        << format_name(format);
  }
}

TEST(Engine, SkipsSentinelsAndCountsAnExpertAsOftenAsItIsChosen) {
  const Model model(small_shape(Format::kBf16));
  const auto engine = model.open({.slots = 2});
  Batch batch(3, 2, model.shape().hidden, 7);
  batch.ids = {4, kExperts, kExperts + 9, kExperts, 5, 5};
  const std::vector<float> out = batch.run(*engine, 0, /*sentinels=*/true);

  Batch alone = batch;
  alone.top_k = 1;
  alone.ids = {4, 5, 5};
  const auto expected = [&](int32_t token, float weight) {
    alone.weights.assign(3, weight);
    return alone.run(*engine, 0, token, 1);
  };
  const int32_t hidden = batch.hidden;
  EXPECT_TRUE(std::equal(out.begin(), out.begin() + hidden, expected(0, batch.weights[0]).begin()));
  EXPECT_TRUE(std::all_of(out.begin() + hidden, out.begin() + 2 * hidden,
                          [](float value) { return value == 0; }));
  const std::vector<float> first = expected(2, batch.weights[4]);
  const std::vector<float> second = expected(2, batch.weights[5]);
  for (int32_t i = 0; i < hidden; ++i) ASSERT_EQ(out[2 * hidden + i], first[i] + second[i]);
  expect_at_rest(*engine);
}

TEST(Engine, WritesTheDtypeAndTheRowsThatItIsGiven) {
  const Model model(small_shape(Format::kInt8));
  const auto engine = model.open_resident({.threads = 2});
  const Batch batch(5, 2, model.shape().hidden, 3);
  const std::vector<float> wide = batch.run(*engine, 0);
  const int32_t stride = batch.hidden + 11;
  for (const ScalarType type : {ScalarType::kBf16, ScalarType::kFloat16}) {
    constexpr uint16_t kUntouched = 0x5a5a;
    std::vector<uint16_t> out(static_cast<size_t>(batch.tokens * stride), kUntouched);
    engine->experts({.layer = 0,
                     .tokens = batch.tokens,
                     .top_k = batch.top_k,
                     .x = {batch.x.data(), ScalarType::kFloat32, batch.stride},
                     .ids = batch.ids.data(),
                     .weights = batch.weights.data(),
                     .sentinels = false,
                     .out = {out.data(), type, stride}});
    std::vector<uint16_t> expected(out.size(), kUntouched);
    for (int32_t token = 0; token < batch.tokens; ++token) {
      store_row(&wide[token * batch.hidden], batch.hidden, &expected[token * stride], type);
    }
    EXPECT_EQ(out, expected);
  }
}

// -- chunks ---------------------------------------------------------------------------------------

TEST(Engine, AWorkspaceTooSmallForTwoTokensComputesThemOneByOne) {
  const Model model(small_shape(Format::kInt4));
  const auto whole = model.open_resident({});
  const auto chunked = model.open({.slots = 3, .threads = 2, .workspace = 1});
  const Batch batch(7, 3, model.shape().hidden, 11);
  std::vector<float> expected;
  for (int32_t token = 0; token < batch.tokens; ++token) {
    const std::vector<float> row = batch.run(*whole, 1, token, 1);
    expected.insert(expected.end(), row.begin(), row.end());
  }
  EXPECT_TRUE(testing::same_bits(batch.run(*chunked, 1), expected));
  expect_at_rest(*chunked);
}

TEST(Engine, StaysWithinItsWorkspaceHoweverLongThePrompt) {
  const Model model(small_shape(Format::kInt8));
  constexpr int64_t kWorkspace = 300'000;
  const auto engine = model.open_resident({.workspace = kWorkspace});
  EXPECT_EQ(engine->workspace_bytes(), 0);
  for (const int32_t tokens : {1, 40, 333}) {
    Batch(tokens, 4, model.shape().hidden, 5).run(*engine, 0);
    EXPECT_GT(engine->workspace_bytes(), 0);
    EXPECT_LE(engine->workspace_bytes(), kWorkspace + 3 * 64);  // three buffers, whole cache lines
  }
}

TEST(Engine, AnIoThreadWithoutMemoryFailsAReadAndNotTheProcess) {
  const testing::RecordFile file(
      1, 4, [](int32_t, int32_t) { return std::vector<std::byte>(kRecordAlignment); });
  Source source = file.source();
  source.raw = true;
  source.checksums.clear();
  std::atomic<int32_t> packed = 0;
  const auto pack = [&](int32_t, std::span<const std::byte* const>, std::byte*) {
    if (packed++ > 0) throw Error(ErrorKind::kInvalid, "these bytes are no weights of an expert");
  };
  PoolOptions options;
  options.slots = 4;
  options.record_bytes = kRecordAlignment;
  options.reader.backend = "threads";
  Pool pool(options, {}, source, pack);
  const auto kind = [&](auto... experts) -> std::optional<ErrorKind> {
    const std::array<int32_t, sizeof...(experts)> all{experts...};
    try {
      pool.promote(0, all);
      return std::nullopt;
    } catch (const Error& error) {
      return error.kind();
    }
  };
  io_starves = true;
  EXPECT_EQ(kind(0), std::nullopt);  // its read allocates nothing
  EXPECT_EQ(kind(1), ErrorKind::kMemory);
  EXPECT_EQ(kind(1, 2, 3), ErrorKind::kMemory);  // starting a helper thread fails too
  pool.drain();
  io_starves = false;
  EXPECT_EQ(kind(1), ErrorKind::kInvalid);
  pool.validate();
}

// A step evicts few experts at a time, so it queues its last read after computing some experts.
// reads_queued is called then, and reads predicted for the next layer go behind.
TEST(Engine, CallsReadsQueuedOnceAllItsReadsAreQueued) {
  const Model model(small_shape(Format::kInt8));
  for (const int32_t chosen : {4, kExperts}) {
    SCOPED_TRACE(chosen);
    // A window of 8 slots.
    const std::shared_ptr<Engine> engine = model.open({.slots = kExperts - 2});
    Batch batch(4, 3, model.shape().hidden, seed());
    for (size_t i = 0; i < batch.ids.size(); ++i) batch.ids[i] = static_cast<int64_t>(i) % chosen;
    struct Context {
      Engine& engine;
      int32_t told = 0;
    } context{*engine};
    std::vector<float> out(static_cast<size_t>(batch.tokens) * batch.hidden);
    const auto tell = [](void* argument) {
      auto& context = *static_cast<Context*>(argument);
      ++context.told;
      context.engine.pool().expect(1, std::array{3, 7}, Phase::kDecode);
    };
    ExpertsCall call = batch.call(0, out);
    call.reads_queued = tell;
    call.context = &context;
    engine->experts(call);
    EXPECT_EQ(context.told, 1);
    engine->pool().drain();
    for (const int32_t expert : {3, 7}) {
      EXPECT_EQ(state_of(engine->pool(), 1, expert), SlotState::kReady) << "expert " << expert;
    }
    EXPECT_EQ(out, batch.run(*model.open_resident({}), 0));
  }
}

TEST(Engine, CloseLetsAForwardEndThatThenPredicts) {
  const Model model(small_shape(Format::kInt8));
  const auto engine = model.open({});
  const Batch batch(1, 4, model.shape().hidden, seed());
  std::vector<float> out(static_cast<size_t>(batch.hidden));
  const auto close_and_predict = [](void* argument) {
    Pool& pool = *static_cast<Pool*>(argument);
    pool.close();
    pool.expect(1, std::array{3, 7}, Phase::kDecode);
  };
  ExpertsCall call = batch.call(0, out);
  call.reads_queued = close_and_predict;
  call.context = &engine->pool();
  engine->experts(call);
  EXPECT_EQ(out, batch.run(*model.open_resident({}), 0));
  EXPECT_EQ(state_of(engine->pool(), 1, 3), SlotState::kEmpty);
  expect_at_rest(*engine);
}

TEST(Engine, CloseLetsAVisitInOrderEnd) {
  const Model model(small_shape(Format::kInt8));
  const auto engine = model.open({});
  std::vector<int32_t> all(kExperts);
  std::iota(all.begin(), all.end(), 0);
  std::vector<int32_t> visited;
  engine->visit_in_order(1, all, 2, [&](int32_t first, std::span<const std::byte* const> records) {
    engine->pool().close();
    for (size_t i = 0; i < records.size(); ++i) {
      const auto expert = static_cast<int32_t>(visited.size());
      ASSERT_EQ(expert, first + static_cast<int32_t>(i));
      const Bytes& record = model.record(1, expert);
      EXPECT_EQ(std::memcmp(records[i], record.data(), static_cast<size_t>(record.size())), 0);
      visited.push_back(expert);
    }
  });
  EXPECT_EQ(visited, all);
  expect_at_rest(*engine);
}

TEST(Engine, AnyAllocationOfAFirstForwardMayFail) {
  const Model model(small_shape(Format::kInt8));
  const Batch batch(3, 4, model.shape().hidden, seed());
  std::vector<float> out(static_cast<size_t>(batch.tokens) * batch.hidden);
  const std::vector<float> expected = batch.run(*model.open_resident({}), 0);
  int64_t failed = 0;
  for (bool reached = true; reached;) {
    const auto engine = model.open_resident({});
    {
      const FailingAllocation failing(failed);
      const auto error = caught([&] { batch.run_into(*engine, 0, out); });
      reached = failing.reached();
      EXPECT_EQ(error.has_value(), reached);
    }
    failed += reached;
    batch.run_into(*engine, 0, out);
    EXPECT_EQ(out, expected);
  }
  EXPECT_GT(failed, 2);
}

TEST(Engine, AllocatesNothingOnceItHasSeenAShape) {
  // Tasks run one after the other on this thread, whose allocations are counted.
  Runtime in_turns;
  in_turns.parallel_for = [](int64_t count, int32_t, ParallelBody body, void* context) {
    for (int64_t part = 0; part < count; ++part) body(context, part, part + 1);
  };
  for (const Format format : {Format::kBf16, Format::kInt8, Format::kInt4}) {
    const Model model(small_shape(format));
    for (const char* policy : {"lru", "lfu", "heat"}) {
      const auto engine = model.open_resident({.policy = policy, .threads = 2}, in_turns);
      for (const int32_t tokens : {1, 60}) {
        const Batch batch(tokens, 4, model.shape().hidden, 5);
        std::vector<float> out(static_cast<size_t>(tokens) * batch.hidden);
        batch.run_into(*engine, 0, out);
        const int64_t before = allocations, workspace = engine->workspace_bytes();
        for (int repeat = 0; repeat < 3; ++repeat) batch.run_into(*engine, repeat % kLayers, out);
        EXPECT_EQ(allocations - before, 0);
        EXPECT_EQ(engine->workspace_bytes(), workspace);
      }
    }
  }
}

// -- waiting --------------------------------------------------------------------------------------

std::atomic<int32_t> sleeps = 0;
std::atomic<bool> asleep = false;

// A runtime whose team sleeps during waits. It counts them, and checks that they do not nest.
Runtime sleeping_runtime() {
  Runtime runtime = thread_runtime();
  runtime.wait_asleep = [](int32_t threads, void (*wait)(void*), void* context) {
    EXPECT_EQ(threads, 3);
    EXPECT_FALSE(asleep.exchange(true));
    ++sleeps;
    struct Wake {
      ~Wake() { asleep = false; }
    } const wake;
    wait(context);
  };
  return runtime;
}

TEST(Engine, ATeamSleepsDuringLongWaitsOnly) {
  const Model model(small_shape(Format::kInt4));
  const auto resident = model.open_resident({.threads = 3}, sleeping_runtime());
  sleeps = 0;
  const Batch batch(2, 3, model.shape().hidden, 17);
  const std::vector<float> expected = batch.run(*resident, 0);
  EXPECT_EQ(sleeps, 0);
  const auto cold = model.open(
      {.threads = 3, .faults = {.seed = testing::seed(), .delay = 1, .max_delay = 100ms}},
      sleeping_runtime());
  EXPECT_TRUE(testing::same_bits(batch.run(*cold, 0), expected));
  EXPECT_GT(sleeps, 0);
  sleeps = 0;
  EXPECT_TRUE(testing::same_bits(batch.run(*cold, 0), expected));
  EXPECT_EQ(sleeps, 0);
  expect_at_rest(*cold);
}

TEST(Engine, ATeamWakesWhenAWaitEndsInAnError) {
  const Model model(small_shape(Format::kInt4));
  Runtime runtime = sleeping_runtime();
  runtime.interrupted = [] { return asleep.load(); };
  const Batch batch(2, 3, model.shape().hidden, 17);
  const auto interrupted =
      model.open({.threads = 3, .faults = {.seed = 3, .delay = 1, .max_delay = 1500ms}}, runtime);
  EXPECT_EQ(error_of([&] { batch.run(*interrupted, 0); }).kind(), ErrorKind::kInterrupted);
  EXPECT_FALSE(asleep);
  expect_at_rest(*interrupted);
  const auto failing = model.open(
      {.threads = 3, .faults = {.seed = 3, .eio_always = 1, .delay = 1, .max_delay = 20ms}},
      sleeping_runtime());
  EXPECT_EQ(error_of([&] { batch.run(*failing, 0); }).kind(), ErrorKind::kRead);
  EXPECT_FALSE(asleep);
  expect_at_rest(*failing);
}

// -- bit identity ---------------------------------------------------------------------------------

TEST(Engine, OutputIsTheSameForAnyNumberOfSlots) {
  std::mt19937_64 random(testing::seed());
  const std::array<const char*, 3> policies{"lru", "lfu", "heat"};
  const std::string uring = uring_unavailable().empty() ? "uring" : "threads";
  int32_t with_evictions = 0;
  for (const Format format : {Format::kBf16, Format::kInt8, Format::kInt4, Format::kLut4}) {
    const Model model(small_shape(format));
    const auto resident = model.open_resident({.threads = 2});
    for (const int32_t slots : {1, 3, 8, 17}) {
      const auto engine = model.open({.slots = slots,
                                      .policy = policies[random() % 3],
                                      .reader = random() % 2 ? uring : "threads",
                                      .threads = 2,
                                      .faults = harmless_faults(random())});
      for (int32_t step = 0; step < 6; ++step) {
        const Batch batch(1 + random() % 12, 1 + random() % 4, model.shape().hidden, random());
        const int32_t layer = step % kLayers;
        ASSERT_TRUE(testing::same_bits(batch.run(*engine, layer), batch.run(*resident, layer)))
            << format_name(format) << ", " << slots << " slots";
        engine->pool().validate();
      }
      expect_at_rest(*engine);
      with_evictions += total(*engine).evicted > 0;
    }
  }
  EXPECT_GE(with_evictions, 9);
}

TEST(Engine, AWindowChangesReadsButNotTheOutput) {
  const Model model(small_shape(Format::kInt4));
  const auto resident = model.open_resident({});
  std::mt19937_64 random(testing::seed());
  for (const PrefillWindow prefill :
       {PrefillWindow::kNever, PrefillWindow::kAuto, PrefillWindow::kAlways}) {
    for (const int64_t workspace : {int64_t{60'000}, int64_t{64} << 20}) {
      for (const int32_t slots : {1, 7, 16}) {
        const auto engine = model.open({.slots = slots,
                                        .policy = "auto",
                                        .threads = 2,
                                        .workspace = workspace,
                                        .faults = harmless_faults(random()),
                                        .prefill = prefill});
        for (int32_t step = 0; step < 4; ++step) {
          Batch batch(40, 1 + random() % 4, model.shape().hidden, random());
          // Every chunk needs all experts.
          for (size_t i = 0; i < batch.ids.size(); ++i) batch.ids[i] = i % kExperts;
          ASSERT_TRUE(testing::same_bits(batch.run(*engine, step % kLayers),
                                         batch.run(*resident, step % kLayers)));
          engine->pool().validate();
        }
        expect_at_rest(*engine);
        const LayerStats ahead = engine->pool().stats()[1];
        if (prefill == PrefillWindow::kNever) {
          EXPECT_EQ(ahead.prefetches, 0);
        } else if (slots > 1) {
          EXPECT_GT(ahead.prefetches, 0) << slots << " slots, workspace " << workspace
                                         << ", prefill " << static_cast<int>(prefill);
        }
      }
    }
  }
}

TEST(Engine, APromptOfFewExpertsTakesTheWindowOnlyWhenToldTo) {
  const Model model(small_shape(Format::kInt4));
  Batch batch(40, 1, model.shape().hidden, testing::seed());
  for (int64_t& id : batch.ids) id %= kExperts / 2;
  for (const PrefillWindow prefill : {PrefillWindow::kAuto, PrefillWindow::kAlways}) {
    const auto engine = model.open({.slots = 12, .prefill = prefill});
    batch.run(*engine, 0);
    EXPECT_EQ(engine->pool().stats()[1].prefetches > 0, prefill == PrefillWindow::kAlways);
    expect_at_rest(*engine);
  }
}

TEST(Engine, ChunksOfAPromptShareTheirLayer) {
  const Model model(small_shape(Format::kInt4));
  const auto engine = model.open({.slots = kExperts, .workspace = 60'000});
  Batch batch(200, 2, model.shape().hidden, testing::seed());
  batch.run(*engine, 1);
  expect_at_rest(*engine);
  EXPECT_LE(engine->pool().stats()[1].promoted, kExperts);
  EXPECT_GT(engine->pool().stats()[1].accesses, 2 * kExperts);  // the prompt has several chunks
}

std::vector<float> run_linear(Engine& engine, int32_t layer, int32_t projection,
                              const std::vector<float>& x, const std::vector<int64_t>& offsets) {
  const int32_t in = engine.in_features(projection), out = engine.out_features(projection);
  std::vector<float> result(static_cast<size_t>(offsets.back()) * out,
                            std::numeric_limits<float>::quiet_NaN());
  engine.grouped_linear({.layer = layer,
                         .projection = projection,
                         .x = {x.data(), ScalarType::kFloat32, in},
                         .offsets = offsets.data(),
                         .out = {result.data(), ScalarType::kFloat32, out}});
  return result;
}

TEST(Engine, OneProjectionIsTheSameInChunksAndWithOneSlot) {
  Random random;
  Shape shape = small_shape(Format::kInt8);
  shape.bias = true;
  const Model model(shape);
  const auto resident = model.open_resident({});
  const auto engine = model.open({.slots = 1,
                                  .threads = 2,
                                  .workspace = 4096,  // a few rows
                                  .faults = harmless_faults(testing::seed())});
  std::vector<int64_t> offsets(kExperts + 1, 0);
  for (int32_t expert = 0; expert < kExperts; ++expert) {
    offsets[expert + 1] = offsets[expert] + random.below(4);
  }
  for (const int32_t projection : {0, 1}) {
    const std::vector<float> x = random.normals(offsets.back() * resident->in_features(projection));
    const std::vector<float> expected = run_linear(*resident, 1, projection, x, offsets);
    EXPECT_TRUE(testing::same_bits(run_linear(*engine, 1, projection, x, offsets), expected));
    EXPECT_TRUE(std::none_of(expected.begin(), expected.end(),
                             [](float value) { return std::isnan(value); }));
  }
  expect_at_rest(*engine);
}

TEST(Engine, RefusesOffsetsThatDoNotGrow) {
  const Model model(small_shape(Format::kBf16));
  const auto engine = model.open_resident({});
  std::vector<int64_t> offsets(kExperts + 1, 2);
  const std::vector<float> x(1000);
  EXPECT_EQ(error_of([&] { run_linear(*engine, 0, 0, x, offsets); }).kind(), ErrorKind::kInvalid);
  offsets[0] = 0, offsets[5] = 1;
  EXPECT_EQ(error_of([&] { run_linear(*engine, 0, 0, x, offsets); }).kind(), ErrorKind::kInvalid);
}

// -- several at once ------------------------------------------------------------------------------

// Forwards of random batches, each compared with the resident engine's.
void run_and_compare(Engine& engine, Engine& resident, uint64_t seed, int32_t forwards) {
  std::mt19937_64 random(seed);
  for (int32_t step = 0; step < forwards; ++step) {
    const Batch batch(1 + random() % 6, 1 + random() % 3, engine.layout().hidden, random());
    const auto layer = static_cast<int32_t>(random() % kLayers);
    ASSERT_TRUE(testing::same_bits(batch.run(engine, layer), batch.run(resident, layer)));
  }
}

TEST(Engine, OutputIsTheSameForAnyNumberOfThreads) {
  for (const Format format : {Format::kBf16, Format::kInt4}) {
    const Model model(small_shape(format));
    const auto alone = model.open_resident({});
    const Batch batch(90, 4, model.shape().hidden, testing::seed());  // work for several
    const std::vector<float> expected = batch.run(*alone, 1);
    for (const int32_t threads : {2, 5}) {
      const auto team = model.open({.slots = 7, .threads = threads});
      EXPECT_TRUE(testing::same_bits(batch.run(*team, 1), expected));
      expect_at_rest(*team);
    }
  }
}

TEST(Engine, OutputIsTheSameForAnyPlacementOnNodes) {
  static std::atomic<int32_t> calls;
  for (const int32_t nodes : {2, 3, TaskQueue::kMaxNodes + 3}) {
    const testing::NodeFolder folder = testing::NodeFolder::with_one_cpu_each(nodes);
    std::vector<int32_t> all(nodes);
    std::iota(all.begin(), all.end(), 0);
    // Each query reports another processor for the thread.
    const Topology topology = Topology::read(folder.path(), all, all, [] { return calls++ % 20; });
    ASSERT_EQ(topology.nodes(), nodes);
    for (const Format format : {Format::kBf16, Format::kInt8}) {
      const Model model(small_shape(format));
      const auto one_node = model.open_resident({});
      for (const int32_t threads : {1, 2, 5}) {
        const auto engine = model.open_resident({.threads = threads, .topology = topology});
        const auto small = model.open({.slots = 5, .threads = threads, .topology = topology});
        calls = 0;
        for (const int32_t tokens : {1, 90}) {
          const Batch batch(tokens, 4, model.shape().hidden, testing::seed());
          const std::vector<float> expected = batch.run(*one_node, 1);
          EXPECT_TRUE(testing::same_bits(batch.run(*engine, 1), expected));
          EXPECT_TRUE(testing::same_bits(batch.run(*small, 1), expected));
        }
        EXPECT_GT(calls, 0);
        expect_at_rest(*small);
      }
    }
  }
}

TEST(Engine, ThreadsShareOneSmallPool) {
  const Model model(small_shape(Format::kInt8));
  const auto resident = model.open_resident({.threads = 2});
  for (const int32_t slots : {1, 5}) {
    const auto engine = model.open(
        {.slots = slots, .threads = 2, .faults = harmless_faults(testing::seed() + slots)});
    std::vector<std::thread> threads;
    for (int32_t thread = 0; thread < 3; ++thread) {
      threads.emplace_back(
          [&, thread] { run_and_compare(*engine, *resident, testing::seed() + thread, 12); });
    }
    std::atomic<bool> stop = false;
    std::thread hints([&] {
      const std::vector<int32_t> some{0, 3, 6, 9};
      while (!stop) {
        engine->pool().prefetch(1, some);
        engine->pool().evict(0, some);
        engine->pool().validate();
      }
    });
    for (std::thread& thread : threads) thread.join();
    stop = true;
    hints.join();
    expect_at_rest(*engine);
    EXPECT_GT(total(*engine).evicted, 0);
  }
}

TEST(Engine, TwoModelsRunAtTheSameTime) {
  const Model first(small_shape(Format::kBf16)), second(small_shape(Format::kInt4));
  const auto first_resident = first.open_resident({.threads = 2});
  const auto second_resident = second.open_resident({.threads = 2});
  const auto first_engine =
      first.open({.slots = 4, .threads = 2, .faults = harmless_faults(testing::seed())});
  const auto second_engine =
      second.open({.slots = 3, .threads = 2, .faults = harmless_faults(testing::seed() + 1)});
  std::thread other(
      [&] { run_and_compare(*second_engine, *second_resident, testing::seed() + 2, 20); });
  run_and_compare(*first_engine, *first_resident, testing::seed() + 3, 20);
  other.join();
  expect_at_rest(*first_engine);
  expect_at_rest(*second_engine);
}

// -- errors ---------------------------------------------------------------------------------------

TEST(Engine, AnErrorNamesItsExpertAndLeavesNothingPinned) {
  const Model model(small_shape(Format::kInt8));
  const auto resident = model.open_resident({});
  int32_t right = 0;
  std::map<ErrorKind, int32_t> errors;
  for (uint64_t round = 0; round < 6; ++round) {
    Faults faults = harmless_faults(testing::seed() + round);
    faults.eio_always = .02, faults.bit_flip = .05, faults.wrong_offset = .05;
    const auto engine = model.open({.slots = 6, .threads = 2, .faults = faults});
    std::mt19937_64 random(testing::seed() + round);
    for (int32_t step = 0; step < 20; ++step) {
      const Batch batch(1 + random() % 4, 2, model.shape().hidden, random());
      const int32_t layer = step % kLayers;
      try {
        ASSERT_TRUE(testing::same_bits(batch.run(*engine, layer), batch.run(*resident, layer)));
        ++right;
      } catch (const Error& error) {
        ++errors[error.kind()];
        EXPECT_EQ(error.place().layer, layer);
        EXPECT_NE(std::find(batch.ids.begin(), batch.ids.end(), error.place().expert),
                  batch.ids.end());
        EXPECT_FALSE(error.place().file.empty());
        EXPECT_GE(error.place().offset, 0);
      }
      EXPECT_EQ(engine->pool().pinned(), 0);
      engine->pool().validate();
    }
    expect_at_rest(*engine);
  }
  EXPECT_GT(right, 0);
  EXPECT_GT(errors[ErrorKind::kRead], 0);
  EXPECT_GT(errors[ErrorKind::kChecksum], 0);
  EXPECT_EQ(std::ssize(errors), 2);
}

TEST(Engine, BadArgumentsLeaveTheEngineUsable) {
  const Model model(small_shape(Format::kBf16));
  const auto engine = model.open({.slots = 2});
  const auto resident = model.open_resident({});
  Batch bad(4, 2, model.shape().hidden, 1);
  const Batch good = bad;
  bad.ids[5] = kExperts;
  EXPECT_EQ(error_of([&] { bad.run(*engine, 0); }).kind(), ErrorKind::kInvalid);
  EXPECT_EQ(error_of([&] { good.run(*engine, kLayers); }).kind(), ErrorKind::kInvalid);
  expect_at_rest(*engine);
  EXPECT_TRUE(testing::same_bits(good.run(*engine, 0), good.run(*resident, 0)));
}

// -- rounding -------------------------------------------------------------------------------------

// The finite values of a 16-bit format from 0 up, and one step beyond the last: its midpoint with
// the last decides what rounds to infinity.
std::vector<double> values_of(int32_t exponent_bits, int32_t mantissa_bits) {
  const int32_t bias = (1 << (exponent_bits - 1)) - 1;
  std::vector<double> values;
  for (int32_t bits = 0; bits <= ((1 << exponent_bits) - 1) << mantissa_bits; ++bits) {
    const int32_t exponent = bits >> mantissa_bits;
    const int32_t mantissa = bits & ((1 << mantissa_bits) - 1);
    const int32_t significand = exponent == 0 ? mantissa : mantissa + (1 << mantissa_bits);
    values.push_back(std::ldexp(significand, std::max(exponent, 1) - bias - mantissa_bits));
  }
  return values;
}

// Rounds to nearest, ties to even. Exact, since the neighbours and distances are doubles.
uint16_t round_reference(float value, const std::vector<double>& values) {
  const uint16_t sign = std::signbit(value) ? 0x8000 : 0;
  const double magnitude = std::abs(double{value});
  if (magnitude >= values.back()) return sign | static_cast<uint16_t>(values.size() - 1);
  const auto above = std::upper_bound(values.begin(), values.end(), magnitude);
  const auto low = static_cast<uint16_t>(above - values.begin() - 1);
  const double down = magnitude - values[low], up = values[low + 1] - magnitude;
  const bool away = up < down || (up == down && low % 2 == 1);
  return sign | static_cast<uint16_t>(low + away);
}

// Each value of the format, each midpoint, and the neighbouring floats of both.
std::vector<float> interesting_floats(const std::vector<double>& values) {
  std::vector<float> floats;
  const auto add = [&](double exact) {
    const auto value = static_cast<float>(exact);
    for (const float near : {value, std::nextafter(value, 0.0f), std::nextafter(value, INFINITY)}) {
      floats.push_back(near);
      floats.push_back(-near);
    }
  };
  for (size_t i = 0; i < values.size(); ++i) {
    add(values[i]);
    if (i > 0) add((values[i - 1] + values[i]) / 2);
  }
  for (uint32_t bits = 0; bits < 1u << 16; ++bits) {  // every sign, exponent and leading mantissa
    for (const uint32_t low : {0x0000u, 0x0001u, 0x1000u, 0x7fffu, 0x8000u, 0x8001u, 0xffffu}) {
      floats.push_back(std::bit_cast<float>(bits << 16 | low));
    }
  }
  return floats;
}

void expect_rounding(ScalarType type, const std::vector<double>& values) {
  const std::vector<float> floats = interesting_floats(values);
  std::vector<uint16_t> rounded(floats.size());
  store_row(floats.data(), std::ssize(floats), rounded.data(), type);
  const auto infinity = static_cast<uint16_t>(values.size() - 1);
  for (size_t i = 0; i < floats.size(); ++i) {
    if (std::isnan(floats[i])) {
      ASSERT_GT(rounded[i] & 0x7fff, infinity) << std::bit_cast<uint32_t>(floats[i]);
      ASSERT_EQ(rounded[i] >> 15, std::bit_cast<uint32_t>(floats[i]) >> 31);
    } else {
      ASSERT_EQ(rounded[i], round_reference(floats[i], values))
          << floats[i] << " has bits " << std::bit_cast<uint32_t>(floats[i]);
    }
  }
}

TEST(Convert, RoundsToBf16LikeExactArithmetic) {
  expect_rounding(ScalarType::kBf16, values_of(8, 7));
}

TEST(Convert, RoundsToFp16LikeExactArithmetic) {
  expect_rounding(ScalarType::kFloat16, values_of(5, 10));
}

TEST(Convert, LeavesFp32AsItIs) {
  const std::vector<float> floats = interesting_floats(values_of(5, 10));
  std::vector<float> stored(floats.size());
  store_row(floats.data(), std::ssize(floats), stored.data(), ScalarType::kFloat32);
  EXPECT_EQ(std::memcmp(floats.data(), stored.data(), floats.size() * sizeof(float)), 0);
}

}  // namespace
}  // namespace torch_mesh
