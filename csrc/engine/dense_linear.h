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

struct DenseLinearCall {
  ConstRows x;  // [rows][matrix.depth]
  int64_t rows;
  const std::byte* packed;  // matrix.bytes()
  const void* bias;         // [matrix.columns]; nullptr: none
  ScalarType bias_type;
  MutableRows out;  // [rows][matrix.columns]
};

// out = x · W^T + bias on at most `threads` threads. Throws Error(kMemory). Safe from several
// threads at once.
void dense_linear(const PackedMatrix& matrix, const DenseLinearCall& call, const Runtime& runtime,
                  int32_t threads, WorkspacePool& workspaces);

}  // namespace torch_mesh
