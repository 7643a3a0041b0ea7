// The host share: concurrent forwards, captured ones, errors of host nodes, failing driver calls.
#include "gpu/host_share.h"

#include <gtest/gtest.h>

#include <array>
#include <atomic>
#include <cmath>
#include <cstring>
#include <memory>
#include <random>
#include <span>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "base/error.h"
#include "gpu_fixture.h"
#include "interrupts_fixture.h"

namespace torch_mesh {
namespace {

using namespace testing;

struct HostShareTest : DeviceTest {};

TEST_F(HostShareTest, ManyForwardsGiveTheEnginesOutput) {
  const std::shared_ptr<Engine> small = model.open({.slots = 5});
  const auto device = make_simulated_device({.seed = seed(), .max_delay_us = kDelay});
  {
    HostShare share(device, small);
    const OwnedStream compute(*device);
    constexpr int32_t kCalls = 3 * HostShare::kInFlight;  // reuses calls and memory
    std::vector<std::unique_ptr<DeviceBatch>> batches;
    std::vector<std::vector<float>> wanted;
    for (int32_t i = 0; i < kCalls; ++i) {
      const Batch batch = batch_of(1 + static_cast<int32_t>(random() % 4), random());
      batches.push_back(std::make_unique<DeviceBatch>(batch));
      DeviceBatch& on_device = *batches.back();
      on_device.table = some_on_device(random);
      wanted.push_back(expected(*engine, batch, i % kLayers, on_device.table));
      on_device.fill(*device, compute);
      const Ticket ticket = share.submit(on_device.call(i % kLayers), compute);
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
  const auto device = make_simulated_device({.seed = seed(), .max_delay_us = kDelay});
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
  const auto device = make_simulated_device({.seed = seed(), .max_delay_us = kDelay});
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
  const auto device = make_simulated_device({.seed = seed()});
  HostShare share(device, engine, nullptr, /*block_bytes=*/20'000);
  const Batch batch = batch_of(70, random());  // 804 bytes a token
  DeviceBatch prompt(batch);
  prompt.x = prompt.source_x, prompt.ids = prompt.source_ids,
  prompt.weights = prompt.source_weights;
  share.join(share.submit(prompt.call(1), {}), {});
  device->synchronize({});
  EXPECT_EQ(share.stats().calls, 3);
  EXPECT_EQ(prompt.out, batch.run(*engine, 1));
}

TEST_F(HostShareTest, AGraphKeepsItsBuffersWhenOthersAreSet) {
  const auto device = make_simulated_device();
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

TEST_F(HostShareTest, ALayerAllOnTheDeviceIsCountedAndReadsNothing) {
  const std::shared_ptr<Engine> cold = model.open({.slots = 5});
  const auto device = make_simulated_device();
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
  const auto device = make_simulated_device();
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

TEST_F(HostShareTest, EachWaitThrowsTheErrorOfItsOwnCall) {
  const auto device = make_simulated_device({.seed = seed(), .max_delay_us = kDelay});
  HostShare share(device, engine);
  const Batch batch = batch_of(2, random());
  DeviceBatch wrong(batch), right(batch);
  wrong.source_ids[4] = kExperts;
  wrong.fill(*device, {});
  right.fill(*device, {});
  const auto first = share.submit(wrong.call(0), {});
  share.join(first, {});
  EXPECT_EQ(error_of([&] { share.wait(first); }).kind(), ErrorKind::kInvalid);
  const auto second = share.submit(right.call(0), {});  // the first call's error was thrown already
  share.join(second, {});
  share.wait(second);
  share.wait(first);
  const auto third = share.submit(wrong.call(0), {});
  share.join(third, {});
  EXPECT_EQ(error_of([&] { share.synchronize(); }).kind(), ErrorKind::kInvalid);
  EXPECT_EQ(error_of([&] { share.wait(third); }).kind(), ErrorKind::kInvalid) << "all the same";
}

// Writes the inputs directly, for calls whose stream is blocked and so would not copy them.
void write_inputs(DeviceBatch& on_device) {
  on_device.x = on_device.source_x;
  on_device.ids = on_device.source_ids;
  on_device.weights = on_device.source_weights;
}

// The hook runs Python's signal handlers and garbage collector, which joins dropped calls.
TEST_F(HostShareTest, TheInterruptHookMayUseTheShare) {
  const std::shared_ptr<Engine> asking = model.open_resident({}, hooked_runtime());
  const auto device = make_simulated_device();
  HostShare share(device, asking);
  const OwnedStream compute(*device);
  Gate gate(*device, compute);
  const Batch batch = batch_of(2, random());
  std::vector<std::unique_ptr<DeviceBatch>> batches;
  std::vector<Ticket> tickets;
  const auto submit = [&] {
    batches.push_back(std::make_unique<DeviceBatch>(batch));
    write_inputs(*batches.back());
    tickets.push_back(share.submit(batches.back()->call(0), compute));
  };
  for (Ticket i = 0; i < HostShare::kInFlight; ++i) submit();
  {
    Beside beside;
    int32_t asked = 0;
    const Hook hook([&] {
      if (asked++ > 0) return false;
      const bool free = beside.ends([&] {
        share.join(tickets[0], compute);
        static_cast<void>(share.stats());
      });
      EXPECT_TRUE(free) << "the share's lock is held while the hook runs";
      if (free) share.join(tickets[1], compute);
      gate.open();
      return false;
    });
    submit();  // waits until the first call has ended
    EXPECT_GT(asked, 0);
  }
  for (size_t i = 2; i < tickets.size(); ++i) share.join(tickets[i], compute);
  device->synchronize(compute);
  for (const auto& each : batches) EXPECT_EQ(each->out, batch.run(*engine, 0));
}

TEST_F(HostShareTest, AnInterruptedSubmitWaitsForNothingElse) {
  const std::shared_ptr<Engine> asking = model.open_resident({}, hooked_runtime());
  const auto device = make_simulated_device();
  HostShare share(device, asking);
  const OwnedStream compute(*device);
  DeviceBatch on_device(batch_of(1, random()));
  write_inputs(on_device);
  Gate gate(*device, compute);
  for (Ticket i = 0; i < HostShare::kInFlight; ++i) share.submit(on_device.call(0), compute);
  const Hook hook([] { return true; });
  const Error error = error_of([&] { share.submit(on_device.call(0), compute); });
  EXPECT_EQ(error.kind(), ErrorKind::kInterrupted);
  gate.open();
  share.synchronize();  // pending work uses `on_device`
}

TEST_F(HostShareTest, ACallBetweenThePartsOfAPromptIsKeptApart) {
  const std::shared_ptr<Engine> asking = model.open_resident({}, hooked_runtime());
  const auto device = make_simulated_device();
  HostShare share(device, asking, nullptr, /*block_bytes=*/20'000);
  const OwnedStream compute(*device);
  const Batch batch = batch_of(70, random());  // 804 bytes a token: three parts
  DeviceBatch prompt(batch), wrong(batch_of(1, random())), before(batch_of(1, random()));
  for (DeviceBatch* each : {&prompt, &wrong, &before}) write_inputs(*each);
  wrong.ids[0] = kExperts;
  share.join(share.submit(prompt.call(1), compute), compute);  // buffers for the longest part
  device->synchronize(compute);
  Gate gate(*device, compute);
  for (Ticket i = 0; i + 1 < HostShare::kInFlight; ++i) share.submit(before.call(0), compute);
  Ticket between = -1;
  bool asked = false;
  const Hook hook([&] {  // while the second part waits for a ticket
    if (std::exchange(asked, true)) return false;
    gate.open();
    between = share.submit(wrong.call(0), compute);
    return false;
  });
  const Ticket last = share.submit(prompt.call(1), compute);
  share.join(last, compute);
  ASSERT_TRUE(asked);
  share.wait(last);
  EXPECT_EQ(error_of([&] { share.wait(between); }).kind(), ErrorKind::kInvalid);
  device->synchronize(compute);
  EXPECT_EQ(prompt.out, batch.run(*engine, 1));
}

// The share does not learn of a graph's launches.
TEST_F(HostShareTest, WaitingForACapturedCallIsRefused) {
  const auto device = make_simulated_device();
  HostShare share(device, engine);
  share.set_capture_sizes(std::array{1}, kTopK);
  const Batch batch = batch_of(1, random());
  DeviceBatch on_device(batch);
  device->begin_capture({});
  const Ticket ticket = share.submit(on_device.call(0), {});
  share.join(ticket, {});
  const auto graph = device->end_capture({});
  const auto refuses = [&] {
    const Error error = error_of([&] { share.wait(ticket); });
    return error.kind() == ErrorKind::kInvalid &&
           std::string(error.what()).find("then call check()") != std::string::npos;
  };
  EXPECT_TRUE(refuses());
  for (int32_t launch = 0; launch < 2; ++launch) {
    Gate gate(*device, {});
    on_device.fill(*device, {});
    device->launch(graph, {});
    EXPECT_TRUE(refuses()) << "its node has not begun";
    gate.open();
    device->synchronize({});
    EXPECT_EQ(on_device.out, batch.run(*engine, 0));
  }
}

TEST_F(HostShareTest, ACapturedCallIsJoinedWhateverSizesAreSet) {
  const auto device = make_simulated_device();
  HostShare share(device, engine);
  const Batch batch = batch_of(1, random());
  DeviceBatch on_device(batch);
  on_device.fill(*device, {});
  for (int32_t round = 0; round < 30; ++round) {
    share.set_capture_sizes(std::array{1}, kTopK);
    device->begin_capture({});
    const Ticket ticket = share.submit(on_device.call(0), {});
    std::atomic<bool> joined{false};
    std::thread other([&] {
      while (!joined) share.set_capture_sizes(std::array{1, 2, 3}, kTopK);
    });
    share.join(ticket, {});
    joined = true;
    other.join();
    device->launch(device->end_capture({}), {});
    device->synchronize({});
    EXPECT_EQ(on_device.out, batch.run(*engine, 0));
  }
}

TEST_F(HostShareTest, ATicketFromBeforeASizeChangeNamesNoLaterCall) {
  const auto device = make_simulated_device();
  HostShare share(device, engine);
  const Batch batch = batch_of(1, random());
  DeviceBatch on_device(batch);
  on_device.fill(*device, {});
  std::vector<Ticket> tickets;
  for (int32_t capture = 0; capture < 2; ++capture) {
    share.set_capture_sizes(std::array{1}, kTopK);
    device->begin_capture({});
    tickets.push_back(share.submit(on_device.call(0), {}));
    share.join(tickets.back(), {});
    const auto graph = device->end_capture({});
    if (capture == 0) device->launch(graph, {});
  }
  ASSERT_NE(tickets[0], tickets[1]);
  device->synchronize({});
  EXPECT_EQ(on_device.out, batch.run(*engine, 0));
  EXPECT_EQ(error_of([&] { share.join(tickets[1] + kLayers, {}); }).kind(), ErrorKind::kInvalid);
}

TEST_F(HostShareTest, AClosedPoolIsAnErrorAndNotAHang) {
  const auto device = make_simulated_device();
  HostShare share(device, engine);
  DeviceBatch batch(batch_of(1, random()));
  engine.reset();
  EXPECT_EQ(error_of([&] { share.submit(batch.call(0), {}); }).kind(), ErrorKind::kClosed);
}

// A step of both layers as a graph, launched repeatedly with new inputs and tables.
TEST_F(HostShareTest, ACapturedStepFollowsInputsAndTablesAtEachLaunch) {
  const auto device = make_simulated_device({.seed = seed(), .max_delay_us = kDelay});
  {
    HostShare share(device, engine);
    share.set_capture_sizes(std::array{1, 2}, kTopK);
    EXPECT_EQ(share.capture_sizes(), (std::vector{1, 2}));
    const OwnedStream compute(*device);
    DeviceBatch first(batch_of(2, 1)), second(batch_of(2, 2));
    device->begin_capture(compute);
    for (int32_t layer = 0; layer < kLayers; ++layer) {
      DeviceBatch& batch = layer == 0 ? first : second;
      const Ticket ticket = share.submit(batch.call(layer), compute);
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
  const auto device = make_simulated_device();
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

TEST_F(HostShareTest, AGraphLaunchedAfterItsModelIsFreedGivesNan) {
  const auto device = make_simulated_device();
  DeviceBatch batch(batch_of(1, random()));
  std::shared_ptr<const SimulatedDevice::Graph> graph;
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

// In a run of several forwards each driver call fails, alone or with all calls after it. Every
// failure gives an error and never a hang; outputs that are not reported as failed are right.
TEST_F(HostShareTest, EveryCallMayFail) {
  for (const int64_t failures : {int64_t{1}, int64_t{1} << 40}) {
    for (int64_t failing = 0;; ++failing) {
      int32_t errors = 0;
      const Batch batch = batch_of(2, 5);
      std::array<DeviceBatch, 3> batches{DeviceBatch(batch), DeviceBatch(batch),
                                         DeviceBatch(batch)};
      const auto device = make_simulated_device(
          {.seed = seed(), .max_delay_us = 30, .failing_call = failing, .failures = failures});
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
      const bool at_the_end = errors == 0;  // the failure was in a destructor's wait
      if (!at_the_end && failures == 1) {
        EXPECT_EQ(errors, 1) << "call " << failing;
      }
    }
  }
}

TEST_F(HostShareTest, AProfileCountsExpertsThatTheDeviceComputes) {
  const std::shared_ptr<Engine> alone = model.open_resident({});
  const auto device = make_simulated_device({.seed = seed(), .max_delay_us = kDelay});
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

}  // namespace
}  // namespace torch_mesh
