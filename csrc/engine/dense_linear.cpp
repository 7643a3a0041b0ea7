#include "engine/dense_linear.h"

#include <algorithm>
#include <array>
#include <cstring>
#include <span>

#include "engine/task_queue.h"
#include "kernels/convert.h"
#include "kernels/linear.h"
#include "kernels/task_products.h"
#include "residency/core/forward.h"

namespace torch_mesh {
namespace {

// Bounds the workspace: a longer prompt reads the weights once per chunk.
constexpr int64_t kChunkRows = 4096;
// Up to this many rows, multiplying unpacked weights costs less than packing them first.
constexpr int32_t kMaxPlainRows = 32;
static_assert(kMaxPlainRows >= kMaxDecodeRows, "or a row's bits depend on what comes with it");

using Bias = float[kBlockColumns];

// Returns a block's bias, padded with zeros, or nullptr if there is none.
const float* load_bias(const KernelTable& table, const LinearRows& call, int64_t first,
                       int32_t columns, Bias& bias) {
  if (call.bias == nullptr) return nullptr;
  std::fill_n(bias, kBlockColumns, 0.0f);
  table.to_floats(row_pointer(call.bias, call.bias_type, 1, first), call.bias_type, columns, bias);
  return bias;
}

// Runs prepare(first row, row after the last) for all rows, then blocks(task, LinearBlocks) for all
// blocks, at most `at_once` (1 or 2) together. The LinearBlocks have no data yet.
template <typename Prepare, typename Blocks>
void for_each_block(const PackedMatrix& matrix, const LinearRows& call, const Runtime& runtime,
                    int32_t threads, int32_t at_once, const Prepare& prepare,
                    const Blocks& blocks) {
  const KernelTable& table = kernel_table();
  const auto rows = static_cast<int32_t>(call.rows);
  TaskQueue queue;
  const int32_t first_stage = queue.add(tasks_for(rows, kPrepareRows), {0, 0});
  queue.add(matrix.blocks, {first_stage, first_stage + 1}, at_once);
  const int64_t work = int64_t{rows} * matrix.columns * matrix.depth;
  queue.run(runtime, team_for(work, threads), [&](int32_t stage, int64_t task, int32_t count) {
    if (stage == first_stage) {
      const auto begin = static_cast<int32_t>(task) * kPrepareRows;
      prepare(begin, std::min(begin + kPrepareRows, rows));
      return;
    }
    alignas(64) Bias bias[2];
    std::array<LinearBlock, 2> of;
    for (int32_t i = 0; i < count; ++i) {
      const int64_t first = (task + i) * kBlockColumns;
      const auto columns =
          static_cast<int32_t>(std::min<int64_t>(matrix.columns - first, kBlockColumns));
      of[i] = {nullptr, columns, load_bias(table, call, first, columns, bias[i]),
               row_pointer(call.out.data, call.out.type, 1, first)};
    }
    blocks(task, std::span(of.data(), static_cast<size_t>(count)));
  });
}

// Multiplies the rows with packed blocks, which block_of(task, columns) returns, at most `at_once`
// of them together.
template <typename BlockOf>
void by_blocks(const PackedMatrix& matrix, const LinearRows& call, const Runtime& runtime,
               int32_t threads, int32_t at_once, Workspace& workspace, const BlockOf& block_of) {
  const KernelTable& table = kernel_table();
  const auto rows = static_cast<int32_t>(call.rows);
  std::byte* prepared = workspace.prepared.reserve(rows * operand_shape(matrix).row_bytes);
  const auto prepare = [&](int32_t begin, int32_t end) {
    prepare_rows(table, matrix, call.x.data, call.x.type, call.x.row_stride, begin, end, prepared);
  };
  for_each_block(matrix, call, runtime, threads, at_once, prepare,
                 [&](int64_t task, std::span<LinearBlock> blocks) {
                   for (LinearBlock& block : blocks) block.data = block_of(task++, block.columns);
                   linear_blocks(table, runtime, matrix, blocks, prepared, rows, call.out.type,
                                 call.out.row_stride);
                 });
}

// Writes the values of even inputs, then of odd ones. A word of weights holds one of each.
void split_row(const KernelTable& table, const LinearRows& call, int32_t row, int32_t depth,
               int32_t half, float* to) {
  constexpr int32_t kAtOnce = 256;
  alignas(64) float values[kAtOnce];
  std::fill_n(to, 2 * half, 0.0f);
  for (int32_t begin = 0; begin < depth; begin += kAtOnce) {
    const int32_t count = std::min(kAtOnce, depth - begin);
    const int64_t at = row * call.x.row_stride + begin;
    table.to_floats(row_pointer(call.x.data, call.x.type, 1, at), call.x.type, count, values);
    float* even = to + begin / 2;
    for (int32_t i = 0; i < count; ++i) even[i / 2 + i % 2 * half] = values[i];
  }
}

struct PlainWeights {
  const std::byte* data;
  int64_t stride_bytes;

  const std::byte* row(int64_t output) const { return data + output * stride_bytes; }
};

void few_plain_rows(const PackedMatrix& matrix, const PlainWeights& weights, const LinearRows& call,
                    const Runtime& runtime, int32_t threads, Workspace& workspace) {
  const KernelTable& table = kernel_table();
  const auto rows = static_cast<int32_t>(call.rows);
  const int32_t half = matrix.depth_padded / 2;
  auto* split = reinterpret_cast<float*>(
      workspace.prepared.reserve(int64_t{rows} * 2 * half * int64_t{sizeof(float)}));
  const auto prepare = [&](int32_t begin, int32_t end) {
    for (int32_t row = begin; row < end; ++row) {
      split_row(table, call, row, matrix.depth, half, split + int64_t{row} * 2 * half);
    }
  };
  for_each_block(
      matrix, call, runtime, threads, 1, prepare, [&](int64_t task, std::span<LinearBlock> blocks) {
        const LinearBlock& block = blocks[0];
        alignas(64) Tile sums;
        table.plain({.weights = weights.row(task * kBlockColumns),
                     .stride_bytes = weights.stride_bytes,
                     .columns = block.columns,
                     .depth = matrix.depth,
                     .rows = split,
                     .half = half,
                     .count = rows,
                     .sums = sums});
        for (int32_t row = 0; row < rows; ++row) {
          float* from = sums + row * kBlockColumns;
          if (block.bias != nullptr) {
            for (int32_t c = 0; c < block.columns; ++c) from[c] += block.bias[c];
          }
          store_row(from, block.columns,
                    row_pointer(block.out, call.out.type, call.out.row_stride, row), call.out.type);
        }
      });
}

// Packs a block as pack_blocks packs bf16, by moving words alone.
void pack_plain_block(const PackedMatrix& matrix, const PlainWeights& weights, int64_t first,
                      int32_t columns, std::byte* block) {
  constexpr int32_t kWords = 16;  // a cache line of each output
  const int32_t whole = matrix.depth / 2;
  if (columns < kBlockColumns || matrix.depth < matrix.depth_padded) {
    std::memset(block, 0, static_cast<size_t>(matrix.block_bytes));
  }
  auto* words = reinterpret_cast<uint32_t*>(block);
  for (int32_t begin = 0; begin < whole; begin += kWords) {
    const int32_t count = std::min(kWords, whole - begin);
    for (int32_t c = 0; c < columns; ++c) {
      uint32_t line[kWords];
      std::memcpy(line, weights.row(first + c) + begin * 4, static_cast<size_t>(count) * 4);
      for (int32_t i = 0; i < count; ++i) words[(begin + i) * kBlockColumns + c] = line[i];
    }
  }
  if (matrix.depth % 2 == 0) return;
  for (int32_t c = 0; c < columns; ++c) {
    uint16_t last;
    std::memcpy(&last, weights.row(first + c) + whole * 4, sizeof(last));
    words[whole * kBlockColumns + c] = last;
  }
}

// Calls part(chunk) for each kChunkRows rows.
template <typename Part>
void for_each_chunk(const LinearRows& call, const Part& part) {
  for (int64_t begin = 0; begin < call.rows; begin += kChunkRows) {
    LinearRows chunk = call;
    chunk.rows = std::min(kChunkRows, call.rows - begin);
    chunk.x.data = row_pointer(call.x.data, call.x.type, call.x.row_stride, begin);
    chunk.out.data = row_pointer(call.out.data, call.out.type, call.out.row_stride, begin);
    part(chunk);
  }
}

}  // namespace

void dense_linear(const PackedMatrix& matrix, const std::byte* packed, const LinearRows& call,
                  const Runtime& runtime, int32_t threads, WorkspacePool& workspaces) {
  WorkspacePool::Lease lease(workspaces);
  const bool few = phase_of(call.rows) == Phase::kDecode;
  const Runtime own = few ? for_few_rows(runtime) : runtime;
  for_each_chunk(call, [&](const LinearRows& rows) {
    const auto at_once = blocks_at_once(static_cast<int32_t>(rows.rows));
    by_blocks(matrix, rows, own, threads, at_once, *lease,
              [&](int64_t task, int32_t) { return packed + task * matrix.block_bytes; });
  });
}

void unpacked_linear(const PackedMatrix& matrix, const void* weights, int64_t stride_bytes,
                     const LinearRows& call, const Runtime& runtime, int32_t threads,
                     WorkspacePool& workspaces) {
  WorkspacePool::Lease lease(workspaces);
  const PlainWeights plain{static_cast<const std::byte*>(weights), stride_bytes};
  if (call.rows <= kMaxPlainRows) {
    few_plain_rows(matrix, plain, call, runtime, threads, *lease);
    return;
  }
  for_each_chunk(call, [&](const LinearRows& rows) {
    by_blocks(matrix, rows, runtime, threads, 1, *lease,
              [&](int64_t task, int32_t columns) -> const std::byte* {
                thread_local Buffer block;
                std::byte* packed = block.reserve(matrix.block_bytes);
                pack_plain_block(matrix, plain, task * kBlockColumns, columns, packed);
                return packed;
              });
  });
}

}  // namespace torch_mesh
