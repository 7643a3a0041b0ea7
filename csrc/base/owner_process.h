// Threads and locks do not survive fork(): what has them remembers which process opened it.
#pragma once

#include <unistd.h>

namespace torch_mesh {

class OwnerProcess {
 public:
  bool forked() const { return getpid() != pid_; }

 private:
  pid_t pid_ = getpid();
};

}  // namespace torch_mesh
