// Workspaces and the fork check of ops without a pool: linear layers, attention and
// pack_calibrated.
#pragma once

#include "engine/workspace.h"

namespace torch_mesh {

WorkspacePool& process_workspaces();

// Throws Error(kForked) in a child of the process that first called it. A forked child has none of
// the OpenMP threads, and waiting for them would hang.
void check_process();

}  // namespace torch_mesh
