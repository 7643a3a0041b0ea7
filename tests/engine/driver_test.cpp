// The drivers themselves: the simulated one orders streams by events alone, and errors of CUDA's
// name what is missing.
#include "gpu/driver.h"

#include <gtest/gtest.h>

#include <string>

#include "base/error.h"
#include "gpu_fixture.h"

namespace torch_mesh {
namespace {

using namespace testing;

TEST(SimulatedDevice, AStreamThatWaitsForAnEventSeesTheWriteBeforeIt) {
  const auto device = make_simulated_device({.seed = 1, .max_delay_us = 2000});
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

TEST(SimulatedDevice, RefusesCallsThatAreForbiddenDuringCapture) {
  const auto device = make_simulated_device();
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

TEST(CudaDriver, ErrorNamesTheMissingLibraryOrSymbol) {
  EXPECT_NE(describe_cuda_driver("libtorch_mesh_nothing.so.1").find("no CUDA driver"),
            std::string::npos);
  const std::string old = describe_cuda_driver("libm.so.6");
  EXPECT_NE(old.find("libm.so.6 has no cuInit"), std::string::npos) << old;
  EXPECT_NE(old.find("CUDA 11 or later"), std::string::npos) << old;
  EXPECT_EQ(error_of([] { open_cuda_driver(0, "libm.so.6"); }).kind(), ErrorKind::kDevice);
}

}  // namespace
}  // namespace torch_mesh
