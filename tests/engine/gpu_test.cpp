// What csrc/gpu builds on a driver, over the one that is in process: with delays drawn from a seed
// between its streams, and with every call failing in turn.
#include <gtest/gtest.h>

#include <array>
#include <atomic>
#include <cmath>
#include <cstring>
#include <limits>
#include <memory>
#include <random>
#include <string>
#include <thread>
#include <vector>

#include "base/error.h"
#include "engine_fixture.h"
#include "gpu/driver.h"
#include "gpu/host_share.h"
#include "gpu/stand_in.h"

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
