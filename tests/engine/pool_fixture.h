// Pools over records whose every word holds their layer and expert, so that reading a wrong buffer
// is detected.
#pragma once

#include <gtest/gtest.h>

#include <algorithm>
#include <chrono>
#include <cstring>
#include <functional>
#include <numeric>
#include <thread>
#include <vector>

#include "claim_fixture.h"
#include "residency/pool.h"
#include "store_fixture.h"
#include "testing/faults.h"

namespace torch_mesh::testing {

inline constexpr int64_t kRecord = 8192;

inline std::vector<std::byte> record_of(int32_t layer, int32_t expert, int64_t bytes = kRecord) {
  std::vector<uint32_t> words(static_cast<size_t>(bytes / 4));
  for (size_t i = 0; i < words.size(); ++i) {
    words[i] = static_cast<uint32_t>(layer) << 24 | static_cast<uint32_t>(expert) << 16 |
               static_cast<uint32_t>(i);
  }
  std::vector<std::byte> record(static_cast<size_t>(bytes));
  std::memcpy(record.data(), words.data(), record.size());
  return record;
}

inline bool is_record(const std::byte* data, int32_t layer, int32_t expert,
                      int64_t bytes = kRecord) {
  return std::memcmp(data, record_of(layer, expert, bytes).data(), bytes) == 0;
}

struct TestStore : RecordFile {
  TestStore(int32_t layers, int32_t experts, int64_t bytes = kRecord)
      : RecordFile(layers, experts, [bytes](int32_t layer, int32_t expert) {
          return record_of(layer, expert, bytes);
        }) {}

  Source raw() const {
    Source source = this->source();
    source.raw = true;
    source.checksums.clear();
    return source;
  }
};

inline PoolOptions options_of(int32_t slots) {
  PoolOptions options;
  options.slots = slots;
  options.record_bytes = kRecord;
  options.policy = "lru";
  options.reader.backend = "threads";
  options.reader.chunk_bytes = 4096;
  return options;
}

// Every read takes up to `delay` longer.
inline PoolOptions slow_options(int32_t slots, std::chrono::microseconds delay) {
  PoolOptions options = options_of(slots);
  options.reader.interpose = with_faults({.delay = 1, .max_delay = delay});
  return options;
}

inline std::vector<int32_t> all_of(int32_t experts) {
  std::vector<int32_t> ids(experts);
  std::iota(ids.begin(), ids.end(), 0);
  return ids;
}

// One forward: claims every expert, checks its bytes and releases it.
inline void forward(
    Pool& pool, int32_t layer, const std::vector<int32_t>& experts, const ForwardPart& part = {},
    size_t batch = 3, const std::function<void()>& step = [] {}, int64_t bytes = kRecord) {
  std::vector<Claim::Entry> entries(experts.size());
  std::vector<ReadyExpert> ready(batch);
  std::vector<bool> seen(experts.size(), false);
  Claim claim(pool, layer, experts, entries, part);
  step();
  while (const int32_t count = claim.next(ready)) {
    step();
    for (int32_t i = 0; i < count; ++i) {
      ASSERT_FALSE(seen[ready[i].index]) << "handed out twice";
      seen[ready[i].index] = true;
      ASSERT_TRUE(is_record(ready[i].record, layer, experts[ready[i].index], bytes));
      claim.release({&ready[i], 1});
      step();
    }
  }
  ASSERT_TRUE(std::all_of(seen.begin(), seen.end(), [](bool s) { return s; }));
}

// Waits until `holds()`, 20 seconds at most. Returns whether it does.
inline bool eventually(const std::function<bool()>& holds) {
  const auto end = std::chrono::steady_clock::now() + std::chrono::seconds(20);
  while (!holds()) {
    if (std::chrono::steady_clock::now() > end) return false;
    std::this_thread::sleep_for(std::chrono::milliseconds(1));
  }
  return true;
}

inline void expect_at_rest(const Pool& pool) {
  EXPECT_EQ(pool.pinned(), 0);
  pool.validate();
}

inline LayerStats total(const Pool& pool) { return pool.totals().counts; }

}  // namespace torch_mesh::testing
