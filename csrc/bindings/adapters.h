// Checks the low-rank adapters that ops take and converts them for the engine.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <vector>

#include "bindings/experts.h"
#include "engine/engine.h"

namespace torch_mesh {

// Raises ValueError for a wrong shape, rank, dtype or device, and for `a` without `b` or `b`
// without `a`.
void check_adapters(const AdapterArguments& adapters, Engine& engine);

// Adapters in the form that the engine takes. Factors are used in place if all of them are fp32 and
// contiguous in their last dimension. Otherwise the experts among `ids` are copied from all of
// them.
class EngineAdapters {
 public:
  EngineAdapters(const AdapterArguments& adapters, const at::Tensor& ids, Engine& engine);
  EngineAdapters(const EngineAdapters&) = delete;
  EngineAdapters& operator=(const EngineAdapters&) = delete;

  Adapters of_engine() const { return adapters_; }

 private:
  AdapterStack stack(const at::Tensor& a, const at::Tensor& b, double scaling);

  at::Tensor used_;               // int64, the distinct experts among the ids
  std::vector<int32_t> indices_;  // [experts]: position in used_, or -1
  std::vector<at::Tensor> kept_;
  Adapters adapters_;
};

}  // namespace torch_mesh
