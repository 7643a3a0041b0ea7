// Options of soft pins from Python, and what a model used from and to it: (tokens int64 [layers],
// uses int64 [layers, experts]).
#pragma once

#include <pybind11/numpy.h>
#include <pybind11/stl.h>

#include <optional>
#include <utility>

#include "bindings/keywords.h"
#include "residency/core/model_use.h"
#include "residency/core/soft_pins.h"

namespace torch_mesh {

using CountArray =
    pybind11::array_t<int64_t, pybind11::array::c_style | pybind11::array::forcecast>;
using ProfileArrays = std::pair<CountArray, CountArray>;

inline SoftPinOptions soft_pin_options(Keywords& given) {
  return {.early_layers = given.take<int32_t>("early_layers", 0),
          .early_experts = given.take<int32_t>("early_experts", 0)};
}

inline ModelUse profile_from(Keywords& given) {
  ModelUse use;
  if (const auto profile = given.take<std::optional<ProfileArrays>>("profile", {})) {
    const auto& [tokens, uses] = *profile;
    use.tokens.assign(tokens.data(), tokens.data() + tokens.size());
    use.uses.assign(uses.data(), uses.data() + uses.size());
  }
  return use;
}

inline ProfileArrays profile_arrays(const ModelUse& use) {
  const auto layers = static_cast<pybind11::ssize_t>(use.tokens.size());
  const auto experts = static_cast<pybind11::ssize_t>(use.experts());
  return {CountArray(layers, use.tokens.data()), CountArray({layers, experts}, use.uses.data())};
}

}  // namespace torch_mesh
