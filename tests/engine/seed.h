// Seeds of random tests. Set TORCH_MESH_TEST_SEED to repeat a run.
#pragma once

#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <random>

namespace torch_mesh::testing {

inline uint64_t fresh_seed() {
  const char* given = std::getenv("TORCH_MESH_TEST_SEED");
  return given != nullptr ? std::strtoull(given, nullptr, 10) : std::random_device{}();
}

// The same in every call, and printed by the first.
inline uint64_t seed() {
  static const uint64_t value = [] {
    const uint64_t drawn = fresh_seed();
    std::printf("TORCH_MESH_TEST_SEED=%llu\n", static_cast<unsigned long long>(drawn));
    return drawn;
  }();
  return value;
}

}  // namespace torch_mesh::testing
