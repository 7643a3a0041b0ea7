// Tests of csrc/gpu over the simulated, in-process driver. They draw delays between its streams
// from a seed, or make each driver call fail in turn.
#pragma once

#include <gtest/gtest.h>

#include <cstdint>
#include <memory>
#include <random>
#include <vector>

#include "engine_fixture.h"
#include "gpu/driver.h"
#include "gpu/host_share.h"
#include "testing/simulated_device.h"

namespace torch_mesh::testing {

inline constexpr int32_t kTopK = 3;
inline constexpr int32_t kDelay = 300;  // microseconds at most

inline DeviceAddress address(const void* data) { return reinterpret_cast<DeviceAddress>(data); }

inline void copy(SimulatedDevice& device, void* to, const void* from, size_t bytes, Stream stream) {
  device.copy_up(address(to), from, static_cast<int64_t>(bytes), stream);
}

// The tensors of one call on the device. The compute stream writes and reads them; like kernels,
// its copies wait only for earlier work in the same stream.
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

  void fill(SimulatedDevice& device, Stream stream) {
    copy(device, x.data(), source_x.data(), x.size() * sizeof(float), stream);
    copy(device, ids.data(), source_ids.data(), ids.size() * sizeof(int64_t), stream);
    copy(device, weights.data(), source_weights.data(), weights.size() * sizeof(float), stream);
  }
  // Overwrites memory that the stream may reuse, as later work in it would.
  void spoil(SimulatedDevice& device, Stream stream) {
    copy(device, x.data(), rubbish.data(), x.size() * sizeof(float), stream);
    copy(device, weights.data(), rubbish.data(), weights.size() * sizeof(float), stream);
  }
  void keep_result(SimulatedDevice& device, Stream stream) {
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

// The engine's output for `batch` without the experts that are on the device.
inline std::vector<float> expected(Engine& engine, Batch batch, int32_t layer,
                                   const std::vector<int32_t>& table) {
  for (int64_t& id : batch.ids) {
    if (id < kExperts && table[id] >= 0) id = kExperts;
  }
  return batch.run(engine, layer, /*sentinels=*/true);
}

inline std::vector<int32_t> some_on_device(std::mt19937_64& random) {
  std::vector<int32_t> table(kExperts, -1);
  int32_t slot = 0;
  for (int32_t& entry : table) {
    if (random() % 2 == 0) entry = slot++;
  }
  return table;
}

inline Batch batch_of(int32_t tokens, uint64_t seed) {
  return Batch(tokens, kTopK, small_shape(Format::kInt8).hidden, seed);
}

struct DeviceTest : ::testing::Test {
  Model model{small_shape(Format::kInt8)};
  std::shared_ptr<Engine> engine = model.open_resident({});
  std::mt19937_64 random{seed()};
};

}  // namespace torch_mesh::testing
