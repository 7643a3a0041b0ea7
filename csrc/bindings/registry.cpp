#include "bindings/registry.h"

#include <c10/util/Exception.h>

#include <memory>
#include <utility>

namespace torch_mesh {

HandleIds ids_of(const at::Tensor& handle) {
  TORCH_CHECK_VALUE(
      handle.device().is_cpu() && handle.scalar_type() == at::kLong && handle.numel() == 2,
      "a torch_mesh handle is an int64 CPU tensor [pool, layer]; got ", handle.scalar_type(),
      " of shape ", handle.sizes(), " on ", handle.device());
  const at::Tensor contiguous = handle.contiguous();
  const int64_t* ids = contiguous.const_data_ptr<int64_t>();
  return {ids[0], ids[1]};
}

LayerHandle resolve(const at::Tensor& handle) { return resolve(ids_of(handle)); }

LayerHandle resolve(const HandleIds& handle) {
  std::shared_ptr<Live<Engine>> live = Handles<Engine>::find(handle, "the pool of this handle");
  const int32_t layers = live->object->pool().layers();
  TORCH_CHECK_VALUE(handle.layer >= 0 && handle.layer < layers, "the handle names layer ",
                    handle.layer, "; its pool has layers [0, ", layers, ")");
  return LayerHandle{std::move(live), static_cast<int32_t>(handle.layer)};
}

std::vector<SlotState> states_of(const LayerHandle& layer) {
  const Pool& pool = layer.engine().pool();
  std::vector<SlotState> states(static_cast<size_t>(pool.experts()));
  pool.states(layer.layer, states);
  return states;
}

}  // namespace torch_mesh
