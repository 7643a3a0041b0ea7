// Attention over a cache: every table gives the scalar table's bits, and threads share the work
// without races. tests/ops/test_attention_op.py tests accuracy, masks and shapes.
#include "engine/attention.h"

#include <gtest/gtest.h>

#include <cstring>
#include <limits>
#include <thread>
#include <vector>

#include "base/team.h"
#include "kernels/convert.h"
#include "kernels_fixture.h"

namespace torch_mesh::testing {
namespace {

std::vector<float> attended(const KernelTable& table, ScalarType type, int32_t rows, int32_t count,
                            int32_t key_dim, int32_t value_dim, bool masked, bool by_lane) {
  Random random;
  const auto stored = [&](int32_t dim) {
    Bytes bytes(count * dim * scalar_bytes(type));
    const std::vector<float> values = random.normals(int64_t{count} * dim);
    store_row(values.data(), count * dim, bytes.data(), type);
    return bytes;
  };
  const std::vector<float> queries = random.normals(rows * key_dim, 0.3f);
  const Bytes keys = stored(key_dim), values = stored(value_dim);
  std::vector<float> mask = random.normals(rows * kAttentionKeys);
  for (size_t i = 0; i < mask.size(); i += 3) mask[i] = -std::numeric_limits<float>::infinity();
  std::vector<float> results(static_cast<size_t>(rows) * (2 + value_dim), std::nanf(""));
  table.attend({.queries = queries.data(),
                .rows = rows,
                .keys = {keys.data(), type, key_dim},
                .values = {values.data(), type, value_dim},
                .count = count,
                .key_dim = key_dim,
                .value_dim = value_dim,
                .mask = masked ? mask.data() : nullptr,
                .mask_stride = kAttentionKeys,
                .by_lane = by_lane,
                .largest = results.data(),
                .total = results.data() + rows,
                .out = results.data() + 2 * rows});
  return results;
}

TEST(Attention, EveryTableAgreesWithScalarToTheBit) {
  const struct {
    int32_t rows, count, key_dim, value_dim;
  } cases[] = {{8, 256, 128, 128}, {1, 1, 16, 16}, {5, 37, 192, 128}, {16, 100, 256, 48}};
  for (const auto& c : cases) {
    for (ScalarType type : {ScalarType::kBf16, ScalarType::kFloat16, ScalarType::kFloat32}) {
      for (int options = 0; options < 4; ++options) {
        const bool masked = options % 2 != 0, by_lane = options / 2 != 0;
        const auto run = [&](const KernelTable& table) {
          return attended(table, type, c.rows, c.count, c.key_dim, c.value_dim, masked, by_lane);
        };
        const std::vector<float> expected = run(kScalarTable);
        for (const KernelTable* table : all_tables()) {
          EXPECT_EQ(
              std::memcmp(run(*table).data(), expected.data(), expected.size() * sizeof(float)), 0)
              << table->name << " with " << c.count << " keys of " << c.key_dim;
        }
      }
    }
  }
}

TEST(Attention, ThreadsAndConcurrentCallersGiveTheSameBits) {
  constexpr int32_t kHeads = 8, kShared = 2, kTokens = 2, kKeys = 1500, kDim = 64;
  Random random;
  const std::vector<float> query = random.normals(kHeads * kTokens * kDim);
  const std::vector<float> key = random.normals(kShared * kKeys * kDim);
  const std::vector<float> value = random.normals(kShared * kKeys * kDim);
  static Team team;
  Runtime runtime;
  runtime.parallel_for = [](int64_t count, int32_t threads, ParallelBody body, void* context) {
    team.parallel_for(count, threads, body, context);
  };
  WorkspacePool workspaces;
  const auto run = [&](int32_t threads) {
    std::vector<float> out(kTokens * kHeads * kDim, std::nanf(""));
    const auto rows = [&](const std::vector<float>& of, int64_t count) {
      return HeadRows{of.data(), ScalarType::kFloat32, 0, count * kDim, kDim};
    };
    decode_attention(AttentionCall{.batch = 1,
                                   .tokens = kTokens,
                                   .heads = kHeads,
                                   .key_value_heads = kShared,
                                   .keys = kKeys,
                                   .key_dim = kDim,
                                   .value_dim = kDim,
                                   .query = rows(query, kTokens),
                                   .key = rows(key, kKeys),
                                   .value = rows(value, kKeys),
                                   .scale = 0.125f,
                                   .out = out.data(),
                                   .out_type = ScalarType::kFloat32},
                     runtime, threads, workspaces);
    return out;
  };
  const std::vector<float> expected = run(1);
  std::vector<std::vector<float>> results(4);
  std::vector<std::thread> callers;
  for (size_t i = 0; i < results.size(); ++i) {
    callers.emplace_back([&, i] { results[i] = run(static_cast<int32_t>(i) + 1); });
  }
  for (std::thread& caller : callers) caller.join();
  for (const std::vector<float>& out : results) EXPECT_EQ(out, expected);
}

}  // namespace
}  // namespace torch_mesh::testing
