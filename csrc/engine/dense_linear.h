// Linear layers outside the experts, whose weights stay in memory: attention projections, shared
// experts, the head.
#pragma once

#include <cstddef>
#include <cstdint>

#include "base/runtime.h"
#include "engine/workspace.h"
#include "kernels/matrix_view.h"
#include "store/record.h"

namespace torch_mesh {

struct LinearRows {
  ConstRows x;  // [rows][matrix.depth]
  int64_t rows;
  const void* bias;  // [matrix.columns]; nullptr: none
  ScalarType bias_type;
  MutableRows out;  // [rows][matrix.columns]
};

// out = x · W^T + bias on at most `threads` threads; `packed` has matrix.bytes(). A row has the
// same bits in calls of 1 to kMaxDecodeRows rows. Throws Error(kMemory). Safe from several threads
// at once.
void dense_linear(const PackedMatrix& matrix, const std::byte* packed, const LinearRows& call,
                  const Runtime& runtime, int32_t threads, WorkspacePool& workspaces);

// The same with bf16 weights that are not packed: `weights` [columns][depth], whose rows are
// `stride_bytes` apart. `matrix` is the layout that they would be packed to. With many rows each
// block is packed just before it is multiplied, and not kept.
void unpacked_linear(const PackedMatrix& matrix, const void* weights, int64_t stride_bytes,
                     const LinearRows& call, const Runtime& runtime, int32_t threads,
                     WorkspacePool& workspaces);

}  // namespace torch_mesh
