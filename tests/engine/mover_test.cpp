// Moving experts to the device and off it: consistency for forwards, failures and refusals.
#include "gpu/experimental/mover.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <array>
#include <cstring>
#include <functional>
#include <memory>
#include <span>
#include <string>
#include <thread>
#include <vector>

#include "base/error.h"
#include "gpu/host_share.h"
#include "gpu_fixture.h"
#include "interrupts_fixture.h"

namespace torch_mesh {
namespace {

using namespace testing;

constexpr int32_t kSlots = 8;
constexpr int32_t kBatch = 2;

// A device's slots and table, with a mover over them, and a stream that reads both as kernels do.
// `source` has the records of `model`; by default it is the engine that computes.
struct MovingDevice {
  MovingDevice(const Model& model, std::shared_ptr<Engine> engine,
               const SimulatedDeviceOptions& options = {}, int32_t patience = 4,
               std::function<void(Stream)> before_switch = nullptr,
               std::shared_ptr<Engine> source = nullptr)
      : model(model),
        bytes(model.record(0, 0).size()),
        records(static_cast<size_t>(kSlots * bytes)),
        table(kLayers * kExperts, -1),
        seen_records(records.size()),
        seen_table(table.size()),
        device(make_simulated_device(options)),
        compute(std::make_unique<OwnedStream>(*device)) {
    for (int32_t slot = 0; slot < kSlots - kBatch; ++slot) {  // the first experts of layer 0
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

  // A forward on the device: like kernels, it reads the table, then the records that it names.
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
  std::shared_ptr<SimulatedDevice> device;
  std::unique_ptr<OwnedStream> compute;
  std::unique_ptr<Mover> mover;
};

struct MoverTest : DeviceTest {};

TEST_F(MoverTest, HotExpertsMoveUpAndNoForwardSeesAHalfDoneMove) {
  MovingDevice on(model, engine, {.seed = seed(), .max_delay_us = kDelay});
  // The text uses only experts 3 to 8 of layer 1.
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

TEST_F(MoverTest, ExpertsMovedOnRequestStay) {
  MovingDevice on(model, engine, {}, /*patience=*/2);
  for (int32_t step = 0; step < 20; ++step) {  // all experts on the device are in use
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
  const auto device = make_simulated_device();
  std::vector<std::byte> records(1 << 20);
  std::vector<int32_t> table(kExperts, -1);
  Mover mover(device, engine,
              {.source = engine,
               .records = address(records.data()),
               .table = address(table.data()),
               .slots = 4,
               .slots_of = table,
               .moving = {true},  // only the first of kLayers
               .batch = 2,
               .policy = "lru",
               .patience = 1});
  const int64_t ids[] = {3};
  for (const int32_t layer : {kLayers - 1, kLayers, 1000, -1}) mover.used(layer, ids, 1);
  EXPECT_EQ(mover.step({}), 0);
  EXPECT_EQ(mover.slots_of(), table);
}

TEST_F(MoverTest, RefusesInvalidOptions) {
  const auto device = make_simulated_device();
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

TEST_F(MoverTest, MovesRecordsOfAnotherFormatThanThePools) {
  const Model on_device{small_shape(Format::kBf16)};
  ASSERT_NE(on_device.record(0, 0).size(), model.record(0, 0).size());
  const std::shared_ptr<Engine> source = on_device.open({.slots = 2});
  MovingDevice on(on_device, engine, {.seed = seed(), .max_delay_us = kDelay}, /*patience=*/4,
                  nullptr, source);
  const std::vector<ExpertId> up{kExperts + 1, 7, kExperts + 5}, down{0, 3};
  on.mover->move(up, down, *on.compute);
  on.look();
  for (const ExpertId id : up) EXPECT_GE(on.seen_table[id], 0) << "expert " << id;
  EXPECT_EQ(on.mover->stats().bytes_up, 3 * on.bytes);
}

TEST_F(MoverTest, RefusesRecordsOfAnotherModel) {
  const RecordLayout layout = model.shape().layout();
  const auto device = make_simulated_device();
  std::vector<std::byte> records(static_cast<size_t>(4 * layout.bytes));
  std::vector<int32_t> table(kLayers * kExperts, -1);
  const PoolOptions of_all{.slots = kExperts, .record_bytes = layout.bytes};
  const auto other =
      std::make_shared<Engine>(EngineOptions{.layout = layout}, thread_runtime(),
                               make_owned<Pool>(of_all, thread_runtime(), 1, kExperts));
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

TEST_F(MoverTest, BrieflyUsedExpertsDoNotMove) {
  MovingDevice on(model, engine, {}, /*patience=*/50);
  for (int32_t step = 0; step < 300; ++step) {
    const int64_t ids[] = {step % kExperts, (step + 5) % kExperts};
    on.mover->used(0, ids, 1);
    EXPECT_EQ(on.mover->step(*on.compute), 0);
  }
  EXPECT_EQ(on.mover->stats().batches, 0);
}

TEST_F(MoverTest, MovesTheRequestedExperts) {
  MovingDevice on(model, engine, {.seed = seed(), .max_delay_us = kDelay});
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

TEST_F(MoverTest, RefusesInvalidMoves) {
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

TEST_F(MoverTest, AFailedReadCancelsItsBatchOnly) {
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

// The hook runs Python's signal handlers, which may ask for statistics or run the model.
TEST_F(MoverTest, TheInterruptHookMayUseTheMover) {
  const std::shared_ptr<Engine> cold = model.open({.slots = 5}, hooked_runtime());
  MovingDevice on(model, cold);
  HeldSlots held(cold->pool(), 5);
  Gate gate(*on.device, *on.compute);
  Beside beside;
  int32_t asked = 0;
  const Hook hook([&] {
    if (++asked == 1) held.release();  // the slots that the read waits for
    if (asked == 2) gate.open();       // the stream that the copies wait for
    const bool free = beside.ends([&] {
      static_cast<void>(on.mover->slots_of());
      static_cast<void>(on.mover->stats());
      EXPECT_EQ(on.mover->step(*on.compute), 0);
    });
    EXPECT_TRUE(free) << "the mover's lock is held while the hook runs";
    if (free) {
      const Error error = error_of([&] { on.mover->move({}, {}, *on.compute); });
      EXPECT_EQ(error.kind(), ErrorKind::kInvalid) << "it would wait for itself";
    }
    return false;
  });
  on.mover->move(std::array<ExpertId, 2>{14, 15}, std::array<ExpertId, 1>{0}, *on.compute);
  EXPECT_GE(asked, 2);
  on.look();
  EXPECT_GE(on.seen_table[14], 0);
  EXPECT_EQ(on.seen_table[0], -1);
}

TEST_F(MoverTest, AnInterruptedMoveCanBeRepeated) {
  const std::shared_ptr<Engine> asking = model.open_resident({}, hooked_runtime());
  MovingDevice on(model, asking);
  const std::array<ExpertId, 1> up{14}, down{0};
  {
    Gate gate(*on.device, *on.compute);
    const Hook hook([] { return true; });
    EXPECT_EQ(error_of([&] { on.mover->move(up, down, *on.compute); }).kind(),
              ErrorKind::kInterrupted);
  }
  on.look();
  EXPECT_GE(on.seen_table[0], 0);
  on.mover->move(up, down, *on.compute);
  on.look();
  EXPECT_GE(on.seen_table[14], 0);
}

TEST_F(MoverTest, MovesOfTwoThreadsAreSerialized) {
  MovingDevice on(model, engine, {.seed = seed(), .max_delay_us = kDelay});
  std::vector<std::thread> threads;
  for (ExpertId thread = 0; thread < 2; ++thread) {
    threads.emplace_back([&on, thread] {
      const std::array<ExpertId, 1> one{thread}, other{14 + thread};
      for (int32_t round = 0; round < 10; ++round) {
        on.mover->move(other, one, *on.compute);
        on.mover->move(one, other, *on.compute);
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  on.look();
  EXPECT_EQ(on.there(), kSlots - kBatch);
  for (int32_t slot = 0; slot < kSlots - kBatch; ++slot) EXPECT_GE(on.seen_table[slot], 0);
}

// Placement changes while forwards run on the host and on the device. Every output matches the
// table that its forward saw.
TEST_F(MoverTest, ForwardsAndMovesAgreeOnWhoComputesWhat) {
  MovingDevice on(model, engine, {.seed = seed(), .max_delay_us = kDelay});
  HostShare share(on.device, engine,
                  [&](int32_t layer, std::span<const int64_t> ids, int32_t top_k) {
                    on.mover->used(layer, ids, top_k);
                  });
  int32_t moved = 0;
  for (int32_t step = 0; step < 120; ++step) {
    const Batch batch = batch_of(1, random());
    DeviceBatch forward(batch);
    for (int64_t& id : forward.source_ids)
      id = id % 4 + (step < 60 ? 0 : 8);  // the text changes its topic at step 60
    forward.fill(*on.device, *on.compute);
    DeviceCall call = forward.call(1);
    call.table = address(on.table.data() + kExperts);
    const Ticket ticket = share.submit(call, *on.compute);
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

// Forwards that are not joined yet, as when the host runs far ahead, use the table from before a
// later move.
TEST_F(MoverTest, AMoveWaitsForForwardsThatStillReadTheTable) {
  constexpr int32_t kForwards = 6;
  for (int32_t round = 0; round < 5; ++round) {
    HostShare* reader = nullptr;
    std::vector<Batch> batches;
    std::vector<std::unique_ptr<DeviceBatch>> forwards;
    MovingDevice on(model, engine, {.seed = random(), .max_delay_us = kDelay}, 4,
                    [&](Stream stream) { reader->follow_inputs(stream); });
    HostShare share(on.device, engine);
    reader = &share;
    const std::vector<int32_t> before = on.table;
    std::vector<Ticket> tickets;
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
          SimulatedDeviceOptions{.seed = seed(), .max_delay_us = 30, .failing_call = failing});
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

}  // namespace
}  // namespace torch_mesh
