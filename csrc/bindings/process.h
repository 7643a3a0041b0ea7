// What ops without a pool share: those of linear layers and attention.
#pragma once

#include "engine/workspace.h"

namespace torch_mesh {

WorkspacePool& process_workspaces();

// Throws Error(kForked) in a child of the process that first called it: there are no OpenMP threads
// to share the work with, and waiting for them would hang.
void check_process();

}  // namespace torch_mesh
