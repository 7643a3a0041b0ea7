// The engine of a pool that may have been closed meanwhile.
#pragma once

#include <memory>

#include "base/error.h"
#include "engine/engine.h"

namespace torch_mesh {

inline std::shared_ptr<Engine> live_engine(const std::weak_ptr<Engine>& engine) {
  auto live = engine.lock();
  if (live == nullptr) {
    throw Error(ErrorKind::kClosed,
                "the pool is closed: the model was unpatched or deleted; patch it again");
  }
  return live;
}

}  // namespace torch_mesh
