#include "engine/dense_linear.h"

#include <algorithm>

#include "engine/task_queue.h"
#include "kernels/convert.h"
#include "kernels/linear.h"
#include "kernels/task_products.h"

namespace torch_mesh {
namespace {

// Bounds the workspace: a longer prompt reads the weights once per chunk.
constexpr int64_t kChunkRows = 4096;

void linear_chunk(const PackedMatrix& matrix, const DenseLinearCall& call, const Runtime& runtime,
                  int32_t threads, Workspace& workspace) {
  const KernelTable& table = kernel_table();
  const auto rows = static_cast<int32_t>(call.rows);
  std::byte* prepared = workspace.prepared.at_least(rows * operand_shape(matrix).row_bytes);
  TaskQueue queue;
  const int32_t prepare = queue.add(tasks_for(rows, kPrepareRows), {0, 0});
  queue.add(matrix.blocks, {prepare, prepare + 1});
  const int64_t work = int64_t{rows} * matrix.columns * matrix.depth;
  queue.run(runtime, team_for(work, threads), [&](int32_t stage, int64_t task) {
    if (stage == prepare) {
      const auto begin = static_cast<int32_t>(task) * kPrepareRows;
      prepare_rows(table, matrix, call.x.data, call.x.type, call.x.row_stride, begin,
                   std::min(begin + kPrepareRows, rows), prepared);
      return;
    }
    const int64_t first = task * kBlockColumns;
    const auto columns =
        static_cast<int32_t>(std::min<int64_t>(matrix.columns - first, kBlockColumns));
    alignas(64) float bias[kBlockColumns] = {};
    if (call.bias != nullptr) {
      table.to_floats(row_pointer(call.bias, call.bias_type, 1, first), call.bias_type, columns,
                      bias);
    }
    const LinearBlock block{call.packed + task * matrix.block_bytes, columns,
                            call.bias == nullptr ? nullptr : bias};
    void* out = row_pointer(call.out.data, call.out.type, 1, first);
    linear_block(table, runtime, matrix, block, prepared, rows, out, call.out.type,
                 call.out.row_stride);
  });
}

}  // namespace

void dense_linear(const PackedMatrix& matrix, const DenseLinearCall& call, const Runtime& runtime,
                  int32_t threads, WorkspacePool& workspaces) {
  WorkspacePool::Lease lease(workspaces);
  for (int64_t begin = 0; begin < call.rows; begin += kChunkRows) {
    DenseLinearCall part = call;
    part.rows = std::min(kChunkRows, call.rows - begin);
    part.x.data = row_pointer(call.x.data, call.x.type, call.x.row_stride, begin);
    part.out.data = row_pointer(call.out.data, call.out.type, call.out.row_stride, begin);
    linear_chunk(matrix, part, runtime, threads, *lease);
  }
}

}  // namespace torch_mesh
