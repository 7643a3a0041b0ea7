// Records that come up for a prompt.
#include "gpu/uplift.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <array>
#include <cstring>
#include <memory>
#include <numeric>
#include <vector>

#include "base/error.h"
#include "gpu_fixture.h"

namespace torch_mesh {
namespace {

using namespace testing;

struct UpliftTest : DeviceTest {};

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

}  // namespace
}  // namespace torch_mesh
