// Copies of a prompt's records to the device.
#include "gpu/experimental/uplift.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <array>
#include <chrono>
#include <cstring>
#include <memory>
#include <numeric>
#include <thread>
#include <utility>
#include <vector>

#include "base/error.h"
#include "gpu_fixture.h"
#include "interrupts_fixture.h"

namespace torch_mesh {
namespace {

using namespace testing;

struct UpliftTest : DeviceTest {};

TEST_F(UpliftTest, BuffersAlternateAndNoReaderSeesAHalfWrittenOne) {
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
  const auto device = make_simulated_device({.seed = seed(), .max_delay_us = kDelay});
  const OwnedStream one(*device), another(*device);
  Uplift uplift(device, cold, {address(buffers[0].data()), address(buffers[1].data())}, kTogether,
                one);
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

struct UpliftBuffers {
  explicit UpliftBuffers(int64_t bytes)
      : bytes(bytes), first(static_cast<size_t>(bytes)), second(static_cast<size_t>(bytes)) {}
  std::array<DeviceAddress, 2> addresses() const {
    return {address(first.data()), address(second.data())};
  }
  std::vector<std::byte>& operator[](int32_t buffer) { return buffer == 0 ? first : second; }

  int64_t bytes;
  std::vector<std::byte> first, second;
};

// An allocator may hand out memory that pending work of its stream still reads.
TEST_F(UpliftTest, TheFirstCopiesWaitForPendingReadsOfTheStream) {
  const std::shared_ptr<Engine> cold = model.open({.slots = 4, .threads = 2});
  const int64_t bytes = model.record(0, 0).size();
  UpliftBuffers buffers(bytes);
  std::ranges::fill(buffers.first, std::byte{7});
  std::ranges::fill(buffers.second, std::byte{7});
  const auto device = make_simulated_device({.seed = seed(), .max_delay_us = 0});
  const OwnedStream compute(*device);
  std::vector<std::byte> before(static_cast<size_t>(2 * bytes));
  device->launch_host(
      compute, [](void*) { std::this_thread::sleep_for(std::chrono::milliseconds(50)); }, nullptr);
  copy(*device, before.data(), buffers.first.data(), bytes, compute);
  copy(*device, before.data() + bytes, buffers.second.data(), bytes, compute);
  Uplift uplift(device, cold, buffers.addresses(), 1, compute);
  {
    Uplift::Turn turn(uplift, compute);
    for (const int32_t expert : {0, 1}) {
      const int32_t buffer = turn.bring(0, {&expert, 1});
      EXPECT_EQ(buffer, expert);
    }
  }
  device->synchronize(compute);
  EXPECT_TRUE(std::ranges::all_of(before, [](std::byte byte) { return byte == std::byte{7}; }));
  EXPECT_EQ(std::memcmp(buffers.first.data(), model.record(0, 0).data(), bytes), 0);
}

// A signal handler runs the model, during a wait and between two.
TEST_F(UpliftTest, ANestedPromptOfTheSameThreadGetsTheOtherBuffer) {
  const std::shared_ptr<Engine> cold = model.open({.slots = 5}, hooked_runtime());
  const auto& expected = [&](int32_t expert) { return model.record(0, expert).data(); };
  const int64_t bytes = model.record(0, 0).size();
  UpliftBuffers buffers(bytes);
  const auto device = make_simulated_device({.seed = seed(), .max_delay_us = kDelay});
  const OwnedStream compute(*device);
  Uplift uplift(device, cold, buffers.addresses(), 1, {});
  std::array<std::vector<std::byte>, 4> seen;
  seen.fill(std::vector<std::byte>(static_cast<size_t>(bytes)));
  const auto use = [&](int32_t buffer, int32_t place) {
    copy(*device, seen[place].data(), buffers[buffer].data(), static_cast<size_t>(bytes), compute);
  };

  HeldSlots held(cold->pool(), 5);
  Uplift::Turn outer(uplift, compute);
  int32_t inner_buffer = -1;
  const auto inner = [&](int32_t expert, int32_t place) {
    Uplift::Turn turn(uplift, compute);
    inner_buffer = turn.bring(0, std::array{expert});
    use(inner_buffer, place);
    Uplift::Turn third(uplift, compute);
    const Error error = error_of([&] { third.bring(0, std::array{expert}); });
    EXPECT_EQ(error.kind(), ErrorKind::kInvalid);
  };
  bool asked = false;
  const Hook hook([&] {
    if (std::exchange(asked, true)) return false;
    held.release();
    inner(7, 0);
    return false;
  });
  int32_t buffer = outer.bring(0, std::array{8});
  EXPECT_TRUE(asked);
  EXPECT_NE(buffer, inner_buffer);
  inner(9, 1);
  EXPECT_NE(buffer, inner_buffer);
  use(buffer, 2);
  buffer = outer.bring(0, std::array{10});
  use(buffer, 3);
  device->synchronize(compute);
  const std::array<int32_t, 4> experts{7, 9, 8, 10};
  for (size_t place = 0; place < experts.size(); ++place) {
    EXPECT_EQ(std::memcmp(seen[place].data(), expected(experts[place]), bytes), 0) << place;
  }
}

TEST_F(UpliftTest, AThreadWaitsForAnothersTurnWhichMayEndOnAnyThread) {
  const std::shared_ptr<Engine> asking = model.open_resident({}, hooked_runtime());
  UpliftBuffers buffers(model.record(0, 0).size());
  const auto device = make_simulated_device();
  Uplift uplift(device, asking, buffers.addresses(), 1, {});
  auto turn = std::make_unique<Uplift::Turn>(uplift, Stream{});
  turn->bring(0, std::array{1});
  {
    const Hook hook([] { return true; });
    std::thread([&] {
      EXPECT_EQ(error_of([&] { Uplift::Turn(uplift, {}); }).kind(), ErrorKind::kInterrupted);
    }).join();
  }
  // The garbage collector may end a turn on any thread.
  std::thread([ended = std::move(turn)]() mutable { ended.reset(); }).join();
  for (int32_t expert = 2; expert < 6; ++expert) {
    std::thread([&] {
      Uplift::Turn next(uplift, {});
      next.bring(0, std::array{expert});
    }).join();
  }
  EXPECT_EQ(uplift.bytes_up(), 5 * buffers.bytes);
}

TEST_F(UpliftTest, RefusesInvalidBatchesAndSurvivesAFailedRead) {
  Faults faults;
  faults.seed = seed(), faults.eio_always = 1;
  const std::shared_ptr<Engine> broken = model.open({.slots = 4, .faults = faults});
  const int64_t bytes = model.record(0, 0).size();
  std::vector<std::byte> buffer(2 * bytes);
  const auto device = make_simulated_device();
  const std::array<DeviceAddress, 2> halves{address(buffer.data()), address(buffer.data() + bytes)};
  EXPECT_EQ(error_of([&] { Uplift(device, broken, halves, 0, {}); }).kind(), ErrorKind::kInvalid);
  Uplift uplift(device, broken, halves, 1, {});
  Uplift::Turn turn(uplift, {});
  EXPECT_EQ(error_of([&] { turn.bring(0, std::array{1, 2}); }).kind(), ErrorKind::kInvalid);
  EXPECT_EQ(error_of([&] { turn.bring(0, {}); }).kind(), ErrorKind::kInvalid);
  EXPECT_EQ(error_of([&] { turn.bring(0, std::array{1}); }).kind(), ErrorKind::kRead);
  EXPECT_EQ(broken->pool().pinned(), 0);
}

}  // namespace
}  // namespace torch_mesh
