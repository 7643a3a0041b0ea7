// Low-rank adapters of experts, as ops get and the engine takes them.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <vector>

#include "bindings/experts.h"
#include "engine/engine.h"

namespace torch_mesh {

// ValueError for other shapes or dtypes than those.
void check_adapters(const AdapterArguments& adapters, Engine& engine);

// As the engine takes them: fp32 that is contiguous in its last dimension lies where it is, of
// anything else the experts among `ids` are copied.
class EngineAdapters {
 public:
  EngineAdapters(const AdapterArguments& adapters, const at::Tensor& ids, Engine& engine);
  EngineAdapters(const EngineAdapters&) = delete;
  EngineAdapters& operator=(const EngineAdapters&) = delete;

  Adapters of_engine() const { return adapters_; }

 private:
  AdapterStack stack(const at::Tensor& a, const at::Tensor& b, double scaling);

  at::Tensor used_;               // int64, the distinct experts among the ids
  std::vector<int32_t> indices_;  // [experts] in used_
  std::vector<at::Tensor> kept_;
  Adapters adapters_;
};

}  // namespace torch_mesh
