#include "bindings/process.h"

#include "base/error.h"
#include "base/owner_process.h"

namespace torch_mesh {

// Never destroyed: a forward may still run on another thread while the process ends.
WorkspacePool& process_workspaces() {
  static auto* pool = new WorkspacePool;
  return *pool;
}

void check_process() {
  static const OwnerProcess owner;
  if (!owner.forked()) return;
  throw Error(
      ErrorKind::kForked,
      std::string("this process was forked from the one that computed with torch_mesh, whose "
                  "threads it does not have; ") +
          kSpawnInstead);
}

}  // namespace torch_mesh
