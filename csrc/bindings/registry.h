// Looks up engines by handle.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <memory>
#include <utility>
#include <vector>

#include "base/freeing.h"
#include "bindings/handles.h"
#include "engine/engine.h"

namespace torch_mesh {

// A registered engine. Its last user hands it to `freeing`, which outlives it.
struct LiveEngine {
  ~LiveEngine() { freeing->begin(std::move(engine)); }

  std::unique_ptr<Engine> engine;
  const std::shared_ptr<Freeing> freeing = std::make_shared<Freeing>();
  int64_t id;
};

struct LayerHandle {
  std::shared_ptr<LiveEngine> live;  // keeps the engine while a forward runs
  int32_t layer;

  Engine& engine() const { return *live->engine; }
  HandleIds ids() const { return {live->id, layer}; }
};

// The state of each expert of the layer at one moment.
std::vector<SlotState> states_of(const LayerHandle& layer);

std::shared_ptr<LiveEngine> register_engine(std::unique_ptr<Engine> engine);
// Later look-ups fail; running forwards keep the engine alive until they end.
void unregister_engine(int64_t id);

// Checks shape, dtype, id and layer. Throws Error(kClosed) for a stale handle, and
// Error(kForked) in a child of the process that opened the pool.
LayerHandle resolve(const at::Tensor& handle);
LayerHandle resolve(const HandleIds& handle);

}  // namespace torch_mesh
