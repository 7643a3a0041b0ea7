// Looks up engines by handle.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <memory>
#include <vector>

#include "bindings/handles.h"
#include "engine/engine.h"

namespace torch_mesh {

struct LayerHandle {
  std::shared_ptr<Live<Engine>> live;  // keeps the engine while a forward runs
  int32_t layer;

  Engine& engine() const { return *live->object; }
  HandleIds ids() const { return {live->id, layer}; }
};

// The state of each expert of the layer at one moment.
std::vector<SlotState> states_of(const LayerHandle& layer);

// Checks shape, dtype, id and layer. Throws Error(kClosed) for a stale handle, and
// Error(kForked) in a child of the process that opened the pool.
LayerHandle resolve(const at::Tensor& handle);
LayerHandle resolve(const HandleIds& handle);

}  // namespace torch_mesh
