// Pools that begin with what is known of their model.
#pragma once

#include <gtest/gtest.h>

#include <algorithm>
#include <string>
#include <utility>
#include <vector>

#include "base/error.h"
#include "pool_fixture.h"

namespace torch_mesh::testing {

// A ModelUse in which expert e of each layer was used by 100 - e of 100 tokens.
inline ModelUse falling(int32_t layers, int32_t experts) {
  ModelUse use(layers, experts);
  std::fill(use.tokens.begin(), use.tokens.end(), 100);
  for (size_t id = 0; id < use.uses.size(); ++id) {
    use.uses[id] = 100 - static_cast<int64_t>(id) % experts;
  }
  return use;
}

inline PoolOptions options_of(int32_t slots, WarmUpOptions warm_up, SoftPinOptions soft_pins = {}) {
  PoolOptions options = options_of(slots);
  options.policy = "auto";
  options.segment_bytes = 4 * kRecord;
  options.warm_up = std::move(warm_up);
  options.soft_pins = soft_pins;
  return options;
}

inline std::vector<int32_t> resident(const Pool& pool, int32_t layer) {
  std::vector<int32_t> ids;
  for (int32_t expert = 0; expert < pool.experts(); ++expert) {
    if (state_of(pool, layer, expert) == SlotState::kReady) ids.push_back(expert);
  }
  return ids;
}

// The message of the Error(kInvalid) that check(arguments...) throws, or "".
template <typename... Arguments>
std::string message_of(const Arguments&... arguments) {
  try {
    check(arguments...);
  } catch (const Error& error) {
    EXPECT_EQ(error.kind(), ErrorKind::kInvalid);
    return error.what();
  }
  return "";
}

}  // namespace torch_mesh::testing
