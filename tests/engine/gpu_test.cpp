// What csrc/gpu builds on a driver, over the one that is in process: with delays drawn from a seed
// between its streams, and with every call failing in turn.
#include <gtest/gtest.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <cmath>
#include <cstring>
#include <functional>
#include <limits>
#include <memory>
#include <numeric>
#include <random>
#include <string>
#include <thread>
#include <vector>

#include "base/error.h"
#include "engine_fixture.h"
#include "gpu/driver.h"
#include "gpu/host_share.h"
#include "gpu/mover.h"
#include "gpu/stand_in.h"
#include "gpu/uplift.h"

namespace torch_mesh {
namespace {

using namespace testing;

constexpr int32_t kTopK = 3;
constexpr int32_t kDelay = 300;  // microseconds at most

DeviceAddress address(const void* data) { return reinterpret_cast<DeviceAddress>(data); }

void copy(StandIn& device, void* to, const void* from, size_t bytes, Stream stream) {
  device.copy_up(address(to), from, static_cast<int64_t>(bytes), stream);
}

// The tensors of one call on the device, written and read by the stream that computes: like
// kernels, its copies do not wait for anybody but those before them.
struct DeviceBatch {
  explicit DeviceBatch(const Batch& batch)
      : tokens(batch.tokens),
        top_k(batch.top_k),
        hidden(batch.hidden),
        source_ids(batch.ids),
        source_weights(batch.weights),
        x(static_cast<size_t>(tokens) * hidden),
        weights(batch.weights.size()),
        out(x.size(), -1.0f),
        result(x.size(), -2.0f),
        ids(batch.ids.size()),
        table(kExperts, -1) {
    for (int32_t token = 0; token < tokens; ++token) {
      const float* row = batch.x.data() + token * batch.stride;
      source_x.insert(source_x.end(), row, row + hidden);
    }
  }

  void fill(StandIn& device, Stream stream) {
    copy(device, x.data(), source_x.data(), x.size() * sizeof(float), stream);
    copy(device, ids.data(), source_ids.data(), ids.size() * sizeof(int64_t), stream);
    copy(device, weights.data(), source_weights.data(), weights.size() * sizeof(float), stream);
  }
  // What later work of the stream would do to memory that it may use again.
  void spoil(StandIn& device, Stream stream) {
    copy(device, x.data(), rubbish.data(), x.size() * sizeof(float), stream);
    copy(device, weights.data(), rubbish.data(), weights.size() * sizeof(float), stream);
  }
  void keep_result(StandIn& device, Stream stream) {
    copy(device, result.data(), out.data(), out.size() * sizeof(float), stream);
    copy(device, out.data(), rubbish.data(), out.size() * sizeof(float), stream);
  }
  DeviceCall call(int32_t layer, bool sentinels = false) {
    return {.layer = layer,
            .tokens = tokens,
            .top_k = top_k,
            .x = address(x.data()),
            .x_type = ScalarType::kFloat32,
            .ids = address(ids.data()),
            .weights = address(weights.data()),
            .table = address(table.data()),
            .out = address(out.data()),
            .sentinels = sentinels};
  }

  int32_t tokens, top_k, hidden;
  std::vector<float> source_x;
  std::vector<int64_t> source_ids;
  std::vector<float> source_weights;
  std::vector<float> x, weights, out, result;
  std::vector<int64_t> ids;
  std::vector<int32_t> table;
  std::vector<float> rubbish = std::vector<float>(1 << 16, 1e30f);
};

// What the engine computes of `batch` when the experts of `on_device` are left out.
std::vector<float> expected(Engine& engine, Batch batch, int32_t layer,
                            const std::vector<int32_t>& table) {
  for (int64_t& id : batch.ids) {
    if (id < kExperts && table[id] >= 0) id = kExperts;
  }
  return batch.run(engine, layer, /*sentinels=*/true);
}

std::vector<int32_t> some_on_device(std::mt19937_64& random) {
  std::vector<int32_t> table(kExperts, -1);
  int32_t slot = 0;
  for (int32_t& entry : table) {
    if (random() % 2 == 0) entry = slot++;
  }
  return table;
}

Batch batch_of(int32_t tokens, uint64_t seed) {
  return Batch(tokens, kTopK, small_shape(Format::kInt8).hidden, seed);
}

struct HostShareTest : ::testing::Test {
  Model model{small_shape(Format::kInt8)};
  std::shared_ptr<Engine> engine = model.open_resident({});
  std::mt19937_64 random{seed()};
};

TEST_F(HostShareTest, StreamsOfManyForwardsGiveWhatTheEngineGives) {
  const std::shared_ptr<Engine> small = model.open({.slots = 5});
  const auto device = make_stand_in({.seed = seed(), .most_delay_us = kDelay});
  {
    HostShare share(device, small);
    const OwnedStream compute(*device);
    constexpr int32_t kCalls = 3 * HostShare::kInFlight;  // calls and their memory are used again
    std::vector<std::unique_ptr<DeviceBatch>> batches;
    std::vector<std::vector<float>> wanted;
    for (int32_t i = 0; i < kCalls; ++i) {
      const Batch batch = batch_of(1 + static_cast<int32_t>(random() % 4), random());
      batches.push_back(std::make_unique<DeviceBatch>(batch));
      DeviceBatch& on_device = *batches.back();
      on_device.table = some_on_device(random);
      wanted.push_back(expected(*engine, batch, i % kLayers, on_device.table));
      on_device.fill(*device, compute);
      const HostShare::Ticket ticket = share.submit(on_device.call(i % kLayers), compute);
      share.join(ticket, compute);
      on_device.spoil(*device, compute);
      on_device.keep_result(*device, compute);
    }
    device->synchronize(compute);
    for (int32_t i = 0; i < kCalls; ++i) EXPECT_EQ(batches[i]->result, wanted[i]) << "call " << i;
    const HostShareStats stats = share.stats();
    EXPECT_EQ(stats.calls, kCalls);
    EXPECT_GT(stats.bytes_down, 0);
    EXPECT_GT(stats.node_seconds, 0);
    EXPECT_EQ(stats.waited_calls, HostShare::kInFlight);
    share.reset_stats();
    EXPECT_EQ(share.stats().calls, 0);
    EXPECT_EQ(share.stats().waited_calls, 0);
  }
  EXPECT_EQ(device->live(), 0) << "streams, events and pinned memory are given back";
}

TEST_F(HostShareTest, ThreadsShareItEachWithAStreamOfItsOwn) {
  const auto device = make_stand_in({.seed = seed(), .most_delay_us = kDelay});
  HostShare share(device, engine);
  std::vector<std::thread> threads;
  for (int32_t t = 0; t < 3; ++t) {
    threads.emplace_back([&, drawn = random()] {
      std::mt19937_64 random(drawn);
      const OwnedStream compute(*device);
      for (int32_t i = 0; i < 20; ++i) {
        const Batch batch = batch_of(1 + static_cast<int32_t>(random() % 3), random());
        DeviceBatch on_device(batch);
        on_device.table = some_on_device(random);
        on_device.fill(*device, compute);
        share.join(share.submit(on_device.call(0), compute), compute);
        on_device.keep_result(*device, compute);
        device->synchronize(compute);
        EXPECT_EQ(on_device.result, expected(*engine, batch, 0, on_device.table));
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
}

TEST_F(HostShareTest, ALongerPromptGetsLargerBuffersWhileOthersAreUnderWay) {
  const auto device = make_stand_in({.seed = seed(), .most_delay_us = kDelay});
  HostShare share(device, engine);
  const OwnedStream compute(*device);
  std::vector<std::unique_ptr<DeviceBatch>> batches;
  std::vector<std::vector<float>> wanted;
  for (const int32_t tokens : {1, 7, 2, 40, 3}) {
    const Batch batch = batch_of(tokens, random());
    batches.push_back(std::make_unique<DeviceBatch>(batch));
    wanted.push_back(batch.run(*engine, 1));
    batches.back()->fill(*device, compute);
    share.join(share.submit(batches.back()->call(1), compute), compute);
    batches.back()->keep_result(*device, compute);
  }
  device->synchronize(compute);
  for (size_t i = 0; i < wanted.size(); ++i) EXPECT_EQ(batches[i]->result, wanted[i]);
}

TEST_F(HostShareTest, APromptThatIsLongerThanTheBuffersComesInParts) {
  const auto device = make_stand_in({.seed = seed()});
  HostShare share(device, engine, nullptr, /*block_bytes=*/20'000);
  const Batch batch = batch_of(70, random());  // of 804 bytes each
  DeviceBatch prompt(batch);
  prompt.x = prompt.source_x, prompt.ids = prompt.source_ids,
  prompt.weights = prompt.source_weights;
  share.join(share.submit(prompt.call(1), {}), {});
  device->synchronize({});
  EXPECT_EQ(share.stats().calls, 3);
  EXPECT_EQ(prompt.out, batch.run(*engine, 1));
}

TEST_F(HostShareTest, AGraphKeepsItsBuffersWhenOthersAreSet) {
  const auto device = make_stand_in();
  HostShare share(device, engine);
  share.set_capture_sizes(std::array{1}, kTopK);
  const Batch batch = batch_of(1, random());
  DeviceBatch on_device(batch);
  device->begin_capture({});
  share.join(share.submit(on_device.call(0), {}), {});
  const auto graph = device->end_capture({});
  share.set_capture_sizes({}, kTopK);
  on_device.fill(*device, {});
  device->launch(graph, {});
  device->synchronize({});
  EXPECT_EQ(on_device.out, batch.run(*engine, 0));

  share.set_capture_sizes(std::array{1}, kTopK);
  device->begin_capture({});
  share.join(share.submit(on_device.call(0), {}), {});
  DeviceCall other = on_device.call(0);
  other.sentinels = true;
  EXPECT_EQ(error_of([&] { share.submit(other, {}); }).kind(), ErrorKind::kInvalid);
  device->end_capture({});
}

TEST_F(HostShareTest, WhatIsAllOnTheDeviceIsCountedAndReadsNothing) {
  const std::shared_ptr<Engine> cold = model.open({.slots = 5});
  const auto device = make_stand_in();
  std::vector<int64_t> seen;
  HostShare share(device, cold, [&](int32_t layer, std::span<const int64_t> ids, int32_t top_k) {
    EXPECT_EQ(layer, 1);
    EXPECT_EQ(top_k, kTopK);
    seen.insert(seen.end(), ids.begin(), ids.end());
  });
  const Batch batch = batch_of(2, random());
  DeviceBatch on_device(batch);
  on_device.table.assign(kExperts, 0);
  on_device.fill(*device, {});
  share.join(share.submit(on_device.call(1), {}), {});
  on_device.keep_result(*device, {});
  device->synchronize({});
  EXPECT_EQ(on_device.result, std::vector<float>(on_device.result.size(), 0.0f));
  EXPECT_EQ(share.stats().all_on_device, 1);
  EXPECT_EQ(cold->pool().stats()[1].cold_misses, 0);
  EXPECT_EQ(seen, batch.ids) << "who learns from routing sees the device's experts too";
}

TEST_F(HostShareTest, ANodesErrorMakesNanAndIsThrownOnce) {
  const auto device = make_stand_in();
  HostShare share(device, engine);
  const Batch batch = batch_of(2, random());
  DeviceBatch wrong(batch), right(batch);
  wrong.source_ids[4] = kExperts;
  wrong.fill(*device, {});
  share.join(share.submit(wrong.call(0), {}), {});
  wrong.keep_result(*device, {});
  device->synchronize({});
  for (const float value : wrong.result) EXPECT_TRUE(std::isnan(value));

  const Error error = error_of([&] { share.submit(right.call(0), {}); });
  EXPECT_EQ(error.kind(), ErrorKind::kInvalid);
  EXPECT_NE(std::string(error.what()).find("expert id 12"), std::string::npos) << error.what();
  EXPECT_EQ(share.stats().failed, 1);

  right.fill(*device, {});
  share.join(share.submit(right.call(0), {}), {});
  right.keep_result(*device, {});
  share.synchronize();
  device->synchronize({});
  EXPECT_EQ(right.result, batch.run(*engine, 0));

  wrong.fill(*device, {});
  share.join(share.submit(wrong.call(0), {}), {});
  EXPECT_EQ(error_of([&] { share.synchronize(); }).kind(), ErrorKind::kInvalid);
  share.synchronize();
  share.check();
}

TEST_F(HostShareTest, WhoWaitsForACallGetsItsOwnError) {
  const auto device = make_stand_in({.seed = seed(), .most_delay_us = kDelay});
  HostShare share(device, engine);
  const Batch batch = batch_of(2, random());
  DeviceBatch wrong(batch), right(batch);
  wrong.source_ids[4] = kExperts;
  wrong.fill(*device, {});
  right.fill(*device, {});
  const auto first = share.submit(wrong.call(0), {});
  share.join(first, {});
  EXPECT_EQ(error_of([&] { share.wait(first); }).kind(), ErrorKind::kInvalid);
  const auto second = share.submit(right.call(0), {});  // it is known: not thrown again
  share.join(second, {});
  share.wait(second);
  share.wait(first);
  const auto third = share.submit(wrong.call(0), {});
  share.join(third, {});
  EXPECT_EQ(error_of([&] { share.synchronize(); }).kind(), ErrorKind::kInvalid);
  EXPECT_EQ(error_of([&] { share.wait(third); }).kind(), ErrorKind::kInvalid) << "all the same";
}

TEST_F(HostShareTest, WhoWaitsForACapturedCallFindsItWhateverSizesAreSet) {
  const auto device = make_stand_in();
  HostShare share(device, engine);
  const Batch batch = batch_of(1, random());
  DeviceBatch on_device(batch);
  on_device.fill(*device, {});
  for (int32_t round = 0; round < 30; ++round) {
    share.set_capture_sizes(std::array{1}, kTopK);
    device->begin_capture({});
    const HostShare::Ticket ticket = share.submit(on_device.call(0), {});
    share.join(ticket, {});
    const auto graph = device->end_capture({});
    device->launch(graph, {});
    std::atomic<bool> waited{false};
    std::thread other([&] {
      while (!waited) share.set_capture_sizes(std::array{1, 2, 3}, kTopK);
    });
    share.wait(ticket);
    waited = true;
    other.join();
    device->synchronize({});
    EXPECT_EQ(on_device.out, batch.run(*engine, 0));
  }
}

TEST_F(HostShareTest, ATicketOfEarlierSizesNamesNoCallOfLaterOnes) {
  const auto device = make_stand_in();
  HostShare share(device, engine);
  const Batch batch = batch_of(1, random());
  DeviceBatch on_device(batch);
  on_device.fill(*device, {});
  std::vector<HostShare::Ticket> tickets;
  for (int32_t capture = 0; capture < 2; ++capture) {
    share.set_capture_sizes(std::array{1}, kTopK);
    device->begin_capture({});
    tickets.push_back(share.submit(on_device.call(0), {}));
    share.join(tickets.back(), {});
    const auto graph = device->end_capture({});
    if (capture == 0) device->launch(graph, {});
  }
  ASSERT_NE(tickets[0], tickets[1]);
  share.wait(tickets[0]);  // and not for what is never launched
  device->synchronize({});
  EXPECT_EQ(on_device.out, batch.run(*engine, 0));
  EXPECT_EQ(error_of([&] { share.wait(tickets[1] + kLayers); }).kind(), ErrorKind::kInvalid);
}

TEST_F(HostShareTest, AClosedPoolIsAnErrorAndNotAHang) {
  const auto device = make_stand_in();
  HostShare share(device, engine);
  DeviceBatch batch(batch_of(1, random()));
  engine.reset();
  EXPECT_EQ(error_of([&] { share.submit(batch.call(0), {}); }).kind(), ErrorKind::kClosed);
}

// A step of both layers, as a graph that is launched again and again over new inputs and tables.
TEST_F(HostShareTest, ACapturedStepFollowsInputsAndTablesAtEachLaunch) {
  const auto device = make_stand_in({.seed = seed(), .most_delay_us = kDelay});
  {
    HostShare share(device, engine);
    share.set_capture_sizes(std::array{1, 2}, kTopK);
    EXPECT_EQ(share.capture_sizes(), (std::vector{1, 2}));
    const OwnedStream compute(*device);
    DeviceBatch first(batch_of(2, 1)), second(batch_of(2, 2));
    device->begin_capture(compute);
    for (int32_t layer = 0; layer < kLayers; ++layer) {
      DeviceBatch& batch = layer == 0 ? first : second;
      const HostShare::Ticket ticket = share.submit(batch.call(layer), compute);
      share.join(ticket, compute);
      copy(*device, batch.result.data(), batch.out.data(), batch.out.size() * sizeof(float),
           compute);
    }
    const auto graph = device->end_capture(compute);
    EXPECT_EQ(share.stats().calls, 0) << "capturing runs nothing";

    for (int32_t step = 0; step < 20; ++step) {
      const Batch inputs[] = {batch_of(2, random()), batch_of(2, random())};
      std::vector<float> wanted[kLayers];
      for (int32_t layer = 0; layer < kLayers; ++layer) {
        DeviceBatch& batch = layer == 0 ? first : second;
        const DeviceBatch source(inputs[layer]);
        batch.source_x = source.source_x, batch.source_ids = source.source_ids;
        batch.source_weights = source.source_weights;
        const std::vector<int32_t> table = some_on_device(random);
        wanted[layer] = expected(*engine, inputs[layer], layer, table);
        batch.fill(*device, compute);
        copy(*device, batch.table.data(), table.data(), table.size() * sizeof(int32_t), compute);
        device->synchronize(compute);  // `table` ends here
      }
      device->launch(graph, compute);
      if (step % 3 == 0) {  // between launches, a call that is not captured
        const Batch other = batch_of(3, random());
        DeviceBatch beside(other);
        beside.fill(*device, compute);
        share.join(share.submit(beside.call(0), compute), compute);
        beside.keep_result(*device, compute);
        device->synchronize(compute);
        EXPECT_EQ(beside.result, other.run(*engine, 0));
      }
      device->synchronize(compute);
      EXPECT_EQ(first.result, wanted[0]);
      EXPECT_EQ(second.result, wanted[1]);
    }
    EXPECT_EQ(share.stats().calls, 20 * kLayers + 7);
  }
}

TEST_F(HostShareTest, ACapturedCallOfAnotherSizeSaysWhatToDo) {
  const auto device = make_stand_in();
  HostShare share(device, engine);
  share.set_capture_sizes(std::array{1}, kTopK);
  const OwnedStream compute(*device);
  DeviceBatch batch(batch_of(2, random()));
  device->begin_capture(compute);
  const Error error = error_of([&] { share.submit(batch.call(0), compute); });
  EXPECT_NE(std::string(error.what()).find("set_capture_batch_sizes(model, [2])"),
            std::string::npos);
  device->end_capture(compute);
  EXPECT_EQ(error_of([&] { share.set_capture_sizes(std::array{0}, kTopK); }).kind(),
            ErrorKind::kInvalid);
  share.set_capture_sizes({}, kTopK);
  EXPECT_TRUE(share.capture_sizes().empty());
}

TEST_F(HostShareTest, AGraphThatIsLaunchedAfterTheModelWentGivesNan) {
  const auto device = make_stand_in();
  DeviceBatch batch(batch_of(1, random()));
  std::shared_ptr<const StandIn::Graph> graph;
  {
    HostShare share(device, engine);
    share.set_capture_sizes(std::array{1}, kTopK);
    device->begin_capture({});
    share.join(share.submit(batch.call(0), {}), {});
    graph = device->end_capture({});
  }
  engine.reset();
  batch.fill(*device, {});
  device->launch(graph, {});
  device->synchronize({});
  for (const float value : batch.out) EXPECT_TRUE(std::isnan(value));
}

// Every call of the driver fails once, in a run of several forwards and with everything after it
// too: an error each time, never a hang; what is not reported as failed is right.
TEST_F(HostShareTest, EveryCallMayFail) {
  for (const int64_t failures : {int64_t{1}, int64_t{1} << 40}) {
    for (int64_t failing = 0;; ++failing) {
      int32_t errors = 0;
      const Batch batch = batch_of(2, 5);
      std::array<DeviceBatch, 3> batches{DeviceBatch(batch), DeviceBatch(batch),
                                         DeviceBatch(batch)};
      const auto device = make_stand_in(
          {.seed = seed(), .most_delay_us = 30, .failing_call = failing, .failures = failures});
      try {
        HostShare share(device, engine);
        for (DeviceBatch& on_device : batches) {
          std::memcpy(on_device.x.data(), on_device.source_x.data(),
                      on_device.x.size() * sizeof(float));
          on_device.ids = on_device.source_ids, on_device.weights = on_device.source_weights;
          try {
            share.join(share.submit(on_device.call(0), {}), {});
            device->synchronize({});
            EXPECT_EQ(on_device.out, batch.run(*engine, 0)) << "call " << failing;
          } catch (const Error& error) {
            EXPECT_EQ(error.kind(), ErrorKind::kDevice) << error.what();
            ++errors;
          }
        }
      } catch (const Error& error) {
        EXPECT_EQ(error.kind(), ErrorKind::kDevice) << error.what();
        ++errors;
      }
      EXPECT_EQ(device->live(), 0) << "call " << failing;
      if (device->calls() <= failing) break;
      const bool at_the_end = errors == 0;  // in what a destructor waits for
      if (!at_the_end && failures == 1) {
        EXPECT_EQ(errors, 1) << "call " << failing;
      }
    }
  }
}

TEST_F(HostShareTest, AProfileKnowsOfWhatTheDeviceComputes) {
  const std::shared_ptr<Engine> alone = model.open_resident({});
  const auto device = make_stand_in({.seed = seed(), .most_delay_us = kDelay});
  HostShare share(device, engine);
  const OwnedStream compute(*device);
  for (int32_t round = 0; round < 20; ++round) {
    const int32_t tokens = round % 2 == 0 ? 1 + round % 5 : 40;  // decode steps and prompts
    const Batch batch = batch_of(tokens, random());
    DeviceBatch on_device(batch);
    on_device.table = round % 4 < 2 ? std::vector<int32_t>(kExperts, 0) : some_on_device(random);
    on_device.fill(*device, compute);
    share.join(share.submit(on_device.call(round % kLayers), compute), compute);
    device->synchronize(compute);
    batch.run(*alone, round % kLayers);
  }
  const ModelUse shared = engine->pool().model_use(), all = alone->pool().model_use();
  EXPECT_EQ(shared.tokens, all.tokens);
  EXPECT_EQ(shared.uses, all.uses);
}

// -- moving experts
// ----------------------------------------------------------------------------------

constexpr int32_t kSlots = 8;
constexpr int32_t kBatch = 2;

// A device's slots and table, with a mover over them, and a stream that reads both as kernels do.
// The records are those of `model`, which `source` has, or else the engine that computes.
struct MovingDevice {
  MovingDevice(const Model& model, std::shared_ptr<Engine> engine,
               const StandInOptions& options = {}, int32_t patience = 4,
               std::function<void(Stream)> before_switch = nullptr,
               std::shared_ptr<Engine> source = nullptr)
      : model(model),
        bytes(model.record(0, 0).size()),
        records(static_cast<size_t>(kSlots * bytes)),
        table(kLayers * kExperts, -1),
        seen_records(records.size()),
        seen_table(table.size()),
        device(make_stand_in(options)),
        compute(std::make_unique<OwnedStream>(*device)) {
    for (int32_t slot = 0; slot < kSlots - kBatch; ++slot) {  // the first of layer 0
      table[slot] = slot;
      std::memcpy(records.data() + slot * bytes, model.record(0, slot).data(), bytes);
    }
    mover = std::make_unique<Mover>(device, engine,
                                    MoverOptions{.source = source ? source : engine,
                                                 .records = address(records.data()),
                                                 .table = address(table.data()),
                                                 .slots = kSlots,
                                                 .slots_of = table,
                                                 .moving = std::vector<bool>(kLayers, true),
                                                 .batch = kBatch,
                                                 .policy = "lru",
                                                 .patience = patience,
                                                 .before_switch = std::move(before_switch)});
  }

  // A forward of the device: as kernels do, it reads the table and then the records that it names.
  void look() {
    device->launch_host(
        *compute,
        [](void* argument) {
          auto& on = *static_cast<MovingDevice*>(argument);
          on.seen_table = on.table;
          for (const int32_t slot : on.table) {
            if (slot < 0) continue;
            std::memcpy(on.seen_records.data() + slot * on.bytes,
                        on.records.data() + slot * on.bytes, on.bytes);
          }
        },
        this);
    device->synchronize(*compute);
    std::vector<bool> taken(kSlots, false);
    for (int32_t id = 0; id < kLayers * kExperts; ++id) {
      const int32_t slot = seen_table[id];
      if (slot < 0) continue;
      ASSERT_LT(slot, kSlots);
      EXPECT_FALSE(taken[slot]) << "slot " << slot << " has two experts";
      taken[slot] = true;
      EXPECT_EQ(std::memcmp(seen_records.data() + slot * bytes,
                            model.record(id / kExperts, id % kExperts).data(), bytes),
                0)
          << "expert " << id << " is not in its slot";
    }
  }
  int32_t there() const {
    return static_cast<int32_t>(
        std::ranges::count_if(seen_table, [](int32_t slot) { return slot >= 0; }));
  }

  const Model& model;
  int64_t bytes;
  std::vector<std::byte> records;
  std::vector<int32_t> table;
  std::vector<std::byte> seen_records;
  std::vector<int32_t> seen_table;
  std::shared_ptr<StandIn> device;
  std::unique_ptr<OwnedStream> compute;
  std::unique_ptr<Mover> mover;
};

struct MoverTest : HostShareTest {};

TEST_F(MoverTest, HotExpertsComeUpAndNoForwardSeesHalfOfAMove) {
  MovingDevice on(model, engine, {.seed = seed(), .most_delay_us = kDelay});
  // A text that uses experts 3 to 8 of layer 1 alone.
  for (int32_t step = 0; step < 200; ++step) {
    const int64_t ids[] = {3 + step % 3, 6 + step % 3, kExperts};
    on.mover->used(1, ids, 1);
    on.mover->step(*on.compute);
    on.look();
    ASSERT_FALSE(HasFailure()) << "step " << step;
    std::this_thread::sleep_for(std::chrono::microseconds(200));
  }
  for (int32_t expert = 3; expert < 9; ++expert) {
    EXPECT_GE(on.seen_table[kExperts + expert], 0) << "expert " << expert;
  }
  EXPECT_EQ(on.there(), kSlots - kBatch) << "the spare slots are spare again";
  EXPECT_EQ(on.mover->slots_of(), on.seen_table);
  const MoverStats stats = on.mover->stats();
  EXPECT_EQ(stats.moved_up, 6);
  EXPECT_EQ(stats.bytes_up, 6 * on.bytes);
  EXPECT_EQ(stats.failed, 0);
}

TEST_F(MoverTest, SlotsThatBeginEmptyFill) {
  MovingDevice on(model, engine, {}, /*patience=*/2);
  const std::vector<ExpertId> all{0, 1, 2, 3, 4, 5};
  on.mover->move({}, all, *on.compute);
  on.look();
  EXPECT_EQ(on.there(), 0);
  for (int32_t step = 0; step < 200 && on.there() < 3; ++step) {
    const int64_t ids[] = {7, 8, 9};
    on.mover->used(1, ids, 3);
    on.mover->step(*on.compute);
    on.look();
    std::this_thread::sleep_for(std::chrono::microseconds(200));
  }
  for (const int32_t expert : {7, 8, 9}) EXPECT_GE(on.seen_table[kExperts + expert], 0);
}

TEST_F(MoverTest, WhatItWasToldToMoveStays) {
  MovingDevice on(model, engine, {}, /*patience=*/2);
  for (int32_t step = 0; step < 20; ++step) {  // all that is there is in use
    const int64_t ids[] = {0, 1, 2, 3, 4, 5};
    on.mover->used(0, ids, 6);
  }
  const std::vector<ExpertId> up{20}, down{0};
  on.mover->move(up, down, *on.compute);
  for (int32_t step = 0; step < 50; ++step) {
    EXPECT_EQ(on.mover->step(*on.compute), 0);
    std::this_thread::sleep_for(std::chrono::microseconds(200));
  }
  on.look();
  EXPECT_GE(on.seen_table[20], 0);
  EXPECT_EQ(on.seen_table[0], -1);
}

TEST_F(MoverTest, APromptMovesNothing) {
  MovingDevice on(model, engine, {}, /*patience=*/1);
  std::vector<int64_t> ids;
  for (int32_t token = 0; token < 100; ++token) ids.push_back(token % kExperts);
  for (int32_t prompt = 0; prompt < 20; ++prompt) {
    on.mover->used(1, ids, 1);
    EXPECT_EQ(on.mover->step(*on.compute), 0);
  }
  EXPECT_EQ(on.mover->stats().batches, 0);
}

TEST_F(MoverTest, LearnsNothingOfLayersThatDoNotMove) {
  const auto device = make_stand_in();
  std::vector<std::byte> records(1 << 20);
  std::vector<int32_t> table(kExperts, -1);
  Mover mover(device, engine,
              {.source = engine,
               .records = address(records.data()),
               .table = address(table.data()),
               .slots = 4,
               .slots_of = table,
               .moving = {true},  // the first of kLayers alone
               .batch = 2,
               .policy = "lru",
               .patience = 1});
  const int64_t ids[] = {3};
  for (const int32_t layer : {kLayers - 1, kLayers, 1000, -1}) mover.used(layer, ids, 1);
  EXPECT_EQ(mover.step({}), 0);
  EXPECT_EQ(mover.slots_of(), table);
}

TEST_F(MoverTest, RefusesASizeThatCannotBe) {
  const auto device = make_stand_in();
  std::vector<std::byte> records(1 << 20);
  std::vector<int32_t> table(kLayers * kExperts, -1);
  MoverOptions options{.source = engine,
                       .records = address(records.data()),
                       .table = address(table.data()),
                       .slots = 4,
                       .slots_of = table,
                       .moving = {true, true},
                       .batch = 2};
  const auto refusal = [&](const MoverOptions& wrong) {
    const Error error = error_of([&] { Mover(device, engine, wrong); });
    EXPECT_EQ(error.kind(), ErrorKind::kInvalid);
    return std::string(error.what());
  };
  MoverOptions wrong = options;
  wrong.batch = 0;
  EXPECT_NE(refusal(wrong).find("a batch of 0"), std::string::npos);
  wrong.batch = 5;
  EXPECT_NE(refusal(wrong).find("there are 4 spare ones of 4"), std::string::npos);
  wrong = options, wrong.slots_of.pop_back();
  EXPECT_NE(refusal(wrong).find("slots_of has 23 entries"), std::string::npos);
  wrong = options, wrong.slots_of[3] = 4;
  EXPECT_NE(refusal(wrong).find("slot 4"), std::string::npos);
}

TEST_F(MoverTest, MovesRecordsOfAnotherFormatThanIsInMemory) {
  const Model on_device{small_shape(Format::kBf16)};
  ASSERT_NE(on_device.record(0, 0).size(), model.record(0, 0).size());
  const std::shared_ptr<Engine> source = on_device.open({.slots = 2});
  MovingDevice on(on_device, engine, {.seed = seed(), .most_delay_us = kDelay}, /*patience=*/4,
                  nullptr, source);
  const std::vector<ExpertId> up{kExperts + 1, 7, kExperts + 5}, down{0, 3};
  on.mover->move(up, down, *on.compute);
  on.look();
  for (const ExpertId id : up) EXPECT_GE(on.seen_table[id], 0) << "expert " << id;
  EXPECT_EQ(on.mover->stats().bytes_up, 3 * on.bytes);
}

TEST_F(MoverTest, RefusesRecordsOfAnotherModel) {
  const RecordLayout layout = model.shape().layout();
  const auto device = make_stand_in();
  std::vector<std::byte> records(static_cast<size_t>(4 * layout.bytes));
  std::vector<int32_t> table(kLayers * kExperts, -1);
  const PoolOptions of_all{.slots = kExperts, .record_bytes = layout.bytes};
  const auto other =
      std::make_shared<Engine>(EngineOptions{.layout = layout}, thread_runtime(),
                               std::make_unique<Pool>(of_all, thread_runtime(), 1, kExperts));
  const Error error = error_of([&] {
    Mover(device, engine,
          {.source = other,
           .records = address(records.data()),
           .table = address(table.data()),
           .slots = 4,
           .slots_of = table,
           .moving = {true, true}});
  });
  EXPECT_EQ(error.kind(), ErrorKind::kInvalid);
  EXPECT_NE(std::string(error.what()).find("are of 1 layers of 12"), std::string::npos);
}

TEST_F(MoverTest, WhatIsWantedForAMomentDoesNotMove) {
  MovingDevice on(model, engine, {}, /*patience=*/50);
  for (int32_t step = 0; step < 300; ++step) {
    const int64_t ids[] = {step % kExperts, (step + 5) % kExperts};
    on.mover->used(0, ids, 1);
    EXPECT_EQ(on.mover->step(*on.compute), 0);
  }
  EXPECT_EQ(on.mover->stats().batches, 0);
}

TEST_F(MoverTest, MovesAsItIsTold) {
  MovingDevice on(model, engine, {.seed = seed(), .most_delay_us = kDelay});
  for (int32_t round = 0; round < 20; ++round) {
    std::vector<ExpertId> there, elsewhere;
    const std::vector<int32_t> before = on.mover->slots_of();
    for (ExpertId id = 0; id < kLayers * kExperts; ++id)
      (before[id] >= 0 ? there : elsewhere).push_back(id);
    std::shuffle(there.begin(), there.end(), random);
    std::shuffle(elsewhere.begin(), elsewhere.end(), random);
    there.resize(random() % there.size());
    elsewhere.resize(std::min(elsewhere.size(), there.size()));
    on.mover->move(elsewhere, there, *on.compute);
    on.look();
    for (const ExpertId id : elsewhere) EXPECT_GE(on.seen_table[id], 0);
    for (const ExpertId id : there) EXPECT_EQ(on.seen_table[id], -1);
    ASSERT_FALSE(HasFailure()) << "round " << round;
  }
}

TEST_F(MoverTest, RefusesWhatCannotBe) {
  MovingDevice on(model, engine);
  const auto message = [&](std::vector<ExpertId> up, std::vector<ExpertId> down) {
    return std::string(error_of([&] { on.mover->move(up, down, *on.compute); }).what());
  };
  EXPECT_NE(message({0}, {}).find("is there already"), std::string::npos);
  EXPECT_NE(message({}, {20}).find("is not there"), std::string::npos);
  EXPECT_NE(message({20, 20}, {}).find("named twice"), std::string::npos);
  EXPECT_NE(message({kLayers * kExperts}, {}).find("not one of this model"), std::string::npos);
  EXPECT_NE(message({12, 13, 14}, {}).find("room for 2"), std::string::npos);
  on.look();
  EXPECT_EQ(on.there(), kSlots - kBatch);
}

TEST_F(MoverTest, AFailedReadGivesUpTheBatchAndNothingElse) {
  Faults faults;
  faults.seed = seed(), faults.eio_always = 1;
  const std::shared_ptr<Engine> broken = model.open({.slots = 5, .faults = faults});
  MovingDevice on(model, broken);
  for (int32_t step = 0; step < 40; ++step) {
    const int64_t ids[] = {3 + step % 3};
    on.mover->used(1, ids, 1);
    on.mover->step(*on.compute);
    on.look();
    std::this_thread::sleep_for(std::chrono::milliseconds(1));
  }
  EXPECT_GT(on.mover->stats().failed, 0);
  EXPECT_EQ(on.mover->stats().moved_up, 0);
  EXPECT_THROW(std::rethrow_exception(on.mover->stats().last_failure), Error);
  const std::vector<ExpertId> up{14};
  EXPECT_EQ(error_of([&] { on.mover->move(up, {}, *on.compute); }).kind(), ErrorKind::kRead);
  on.look();
  EXPECT_EQ(on.there(), kSlots - kBatch);
}

// Placement changes while forwards are under way on the host and on the device: every output is
// that of the table that its forward saw.
TEST_F(MoverTest, ForwardsAndMovesAgreeOnWhoComputesWhat) {
  MovingDevice on(model, engine, {.seed = seed(), .most_delay_us = kDelay});
  HostShare share(on.device, engine,
                  [&](int32_t layer, std::span<const int64_t> ids, int32_t top_k) {
                    on.mover->used(layer, ids, top_k);
                  });
  int32_t moved = 0;
  for (int32_t step = 0; step < 120; ++step) {
    const Batch batch = batch_of(1, random());
    DeviceBatch forward(batch);
    for (int64_t& id : forward.source_ids)
      id = id % 4 + (step < 60 ? 0 : 8);  // a topic, then another
    forward.fill(*on.device, *on.compute);
    DeviceCall call = forward.call(1);
    call.table = address(on.table.data() + kExperts);
    const HostShare::Ticket ticket = share.submit(call, *on.compute);
    copy(*on.device, on.seen_table.data(), on.table.data(), on.table.size() * sizeof(int32_t),
         *on.compute);
    share.join(ticket, *on.compute);
    forward.keep_result(*on.device, *on.compute);
    moved += on.mover->step(*on.compute);
    on.device->synchronize(*on.compute);
    Batch chosen = batch;
    chosen.ids = forward.source_ids;
    const std::vector<int32_t> table(on.seen_table.begin() + kExperts, on.seen_table.end());
    EXPECT_EQ(forward.result, expected(*engine, chosen, 1, table)) << "step " << step;
  }
  EXPECT_GT(moved, 0);
}

// Forwards that nobody has joined yet, as of a host far ahead, keep to the table that their kernels
// saw when experts move behind them.
TEST_F(MoverTest, AMoveWaitsForWhatStillReadsTheTable) {
  constexpr int32_t kForwards = 6;
  for (int32_t round = 0; round < 5; ++round) {
    HostShare* reader = nullptr;
    std::vector<Batch> batches;
    std::vector<std::unique_ptr<DeviceBatch>> forwards;
    MovingDevice on(model, engine, {.seed = random(), .most_delay_us = kDelay}, 4,
                    [&](Stream stream) { reader->follow_inputs(stream); });
    HostShare share(on.device, engine);
    reader = &share;
    const std::vector<int32_t> before = on.table;
    std::vector<HostShare::Ticket> tickets;
    for (int32_t i = 0; i < kForwards; ++i) {
      batches.push_back(batch_of(4, random()));
      forwards.push_back(std::make_unique<DeviceBatch>(batches[i]));
      DeviceBatch& forward = *forwards[i];
      forward.x = forward.source_x, forward.ids = forward.source_ids;
      forward.weights = forward.source_weights;
      DeviceCall call = forward.call(0);
      call.table = address(on.table.data());
      tickets.push_back(share.submit(call, *on.compute));
    }
    on.mover->move(std::array<ExpertId, 2>{10, 11}, std::array<ExpertId, 3>{0, 1, 2}, *on.compute);
    for (int32_t i = 0; i < kForwards; ++i) {
      share.join(tickets[i], *on.compute);
      forwards[i]->keep_result(*on.device, *on.compute);
    }
    on.device->synchronize(*on.compute);
    for (int32_t i = 0; i < kForwards; ++i) {
      EXPECT_EQ(forwards[i]->result, expected(*engine, batches[i], 0, before)) << "forward " << i;
    }
  }
}

TEST_F(MoverTest, EveryCallMayFail) {
  for (int64_t failing = 0;; ++failing) {
    std::unique_ptr<MovingDevice> on;
    int64_t calls = 0;
    try {
      on = std::make_unique<MovingDevice>(
          model, engine,
          StandInOptions{.seed = seed(), .most_delay_us = 30, .failing_call = failing});
    } catch (const Error& error) {
      EXPECT_EQ(error.kind(), ErrorKind::kDevice);
      continue;
    }
    const std::vector<ExpertId> up{14, 15, 16}, down{0, 1};
    try {
      on->mover->move(up, down, *on->compute);
      on->mover->move(down, up, *on->compute);
    } catch (const Error& error) {
      EXPECT_EQ(error.kind(), ErrorKind::kDevice) << error.what();
    }
    calls = on->device->calls();
    if (calls <= failing) break;
    on->look();
    ASSERT_FALSE(HasFailure()) << "call " << failing;
    on->mover.reset();
    on->compute.reset();
    EXPECT_EQ(on->device->live(), 0) << "call " << failing;
  }
}

// -- records for a prompt
// ----------------------------------------------------------------------------

struct UpliftTest : HostShareTest {};

TEST_F(UpliftTest, BuffersTakeTurnsAndNobodyReadsAHalfWrittenOne) {
  const std::shared_ptr<Engine> cold = model.open({.slots = 4, .threads = 2});
  const int64_t bytes = model.record(0, 0).size();
  constexpr int32_t kTogether = 3;
  std::array<std::vector<std::byte>, 2> buffers{std::vector<std::byte>(kTogether * bytes),
                                                std::vector<std::byte>(kTogether * bytes)};
  struct Seen {
    int32_t layer;
    std::vector<int32_t> experts;
    std::vector<std::byte> records;
  };
  std::vector<std::unique_ptr<Seen>> all;
  const auto device = make_stand_in({.seed = seed(), .most_delay_us = kDelay});
  const OwnedStream one(*device), another(*device);
  Uplift uplift(device, cold, {address(buffers[0].data()), address(buffers[1].data())}, kTogether);
  for (int32_t prompt = 0; prompt < 10; ++prompt) {
    const Stream compute = prompt % 2 == 0 ? one : another;
    Uplift::Turn turn(uplift, compute);
    for (int32_t call = 0; call < 1 + prompt % 4; ++call) {
      auto seen = std::make_unique<Seen>();
      seen->layer = call % kLayers;
      seen->records.resize(kTogether * bytes);
      std::vector<int32_t> order(kExperts);
      std::iota(order.begin(), order.end(), 0);
      std::shuffle(order.begin(), order.end(), random);
      seen->experts.assign(order.begin(), order.begin() + 1 + random() % kTogether);
      const int32_t buffer = turn.bring(seen->layer, seen->experts);
      copy(*device, seen->records.data(), buffers[buffer].data(), seen->experts.size() * bytes,
           compute);
      all.push_back(std::move(seen));
    }
  }
  device->synchronize(one);
  device->synchronize(another);
  int64_t brought = 0;
  for (const auto& seen : all) {
    for (size_t i = 0; i < seen->experts.size(); ++i, ++brought) {
      EXPECT_EQ(std::memcmp(seen->records.data() + i * bytes,
                            model.record(seen->layer, seen->experts[i]).data(), bytes),
                0);
    }
  }
  EXPECT_EQ(uplift.bytes_up(), brought * bytes);
  cold->pool().drain();
  EXPECT_EQ(cold->pool().pinned(), 0);
}

TEST_F(UpliftTest, RefusesWhatDoesNotFitAndOutlivesAFailedRead) {
  Faults faults;
  faults.seed = seed(), faults.eio_always = 1;
  const std::shared_ptr<Engine> broken = model.open({.slots = 4, .faults = faults});
  const int64_t bytes = model.record(0, 0).size();
  std::vector<std::byte> buffer(2 * bytes);
  const auto device = make_stand_in();
  const std::array<DeviceAddress, 2> halves{address(buffer.data()), address(buffer.data() + bytes)};
  EXPECT_EQ(error_of([&] { Uplift(device, broken, halves, 0); }).kind(), ErrorKind::kInvalid);
  Uplift uplift(device, broken, halves, 1);
  Uplift::Turn turn(uplift, {});
  EXPECT_EQ(error_of([&] { turn.bring(0, std::array{1, 2}); }).kind(), ErrorKind::kInvalid);
  EXPECT_EQ(error_of([&] { turn.bring(0, {}); }).kind(), ErrorKind::kInvalid);
  EXPECT_EQ(error_of([&] { turn.bring(0, std::array{1}); }).kind(), ErrorKind::kRead);
  EXPECT_EQ(broken->pool().pinned(), 0);
}

// -- the stand-in itself --------------------------------------------------------------------------

TEST(StandIn, ShowsWhatForgetsToWait) {
  const auto device = make_stand_in({.seed = 1, .most_delay_us = 2000});
  const OwnedStream producer(*device), consumer(*device);
  const OwnedEvent written(*device);
  int32_t value = 7, on_device = 0, seen = -1;
  device->copy_up(address(&on_device), &value, sizeof value, producer);
  device->record(written, producer);
  device->wait(consumer, written);
  device->copy_down(&seen, address(&on_device), sizeof seen, consumer);
  device->synchronize(consumer);
  EXPECT_EQ(seen, 7);
  EXPECT_TRUE(device->done(written));
}

TEST(StandIn, RefusesWhatACaptureRefuses) {
  const auto device = make_stand_in();
  const OwnedStream main(*device), side(*device);
  const OwnedEvent fork(*device), join(*device);
  int32_t from = 1, to = 0;
  device->begin_capture(main);
  EXPECT_EQ(error_of([&] { device->synchronize(main); }).kind(), ErrorKind::kDevice);
  EXPECT_EQ(error_of([&] { device->allocate_pinned(64); }).kind(), ErrorKind::kDevice);
  device->record(fork, main);
  device->wait(side, fork);
  device->copy_up(address(&to), &from, sizeof from, side);
  EXPECT_EQ(to, 0);
  EXPECT_EQ(error_of([&] { device->end_capture(main); }).kind(), ErrorKind::kDevice)
      << "side is not joined";

  device->begin_capture(main);
  device->record(fork, main);
  device->wait(side, fork);
  device->copy_up(address(&to), &from, sizeof from, side);
  device->record(join, side);
  device->wait(main, join);
  const auto graph = device->end_capture(main);
  device->launch(graph, main);
  device->synchronize(main);
  EXPECT_EQ(to, 1);
}

// -- CUDA's driver --------------------------------------------------------------------------------

TEST(CudaDriver, SaysWhatIsMissing) {
  EXPECT_NE(describe_cuda_driver("libtorch_mesh_nothing.so.1").find("no CUDA driver"),
            std::string::npos);
  const std::string old = describe_cuda_driver("libm.so.6");
  EXPECT_NE(old.find("libm.so.6 has no cuInit"), std::string::npos) << old;
  EXPECT_NE(old.find("CUDA 11 or later"), std::string::npos) << old;
  EXPECT_EQ(error_of([] { open_cuda_driver(0, "libm.so.6"); }).kind(), ErrorKind::kDevice);
}

}  // namespace
}  // namespace torch_mesh
