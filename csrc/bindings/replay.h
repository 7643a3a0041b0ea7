// torch_mesh._C.replay: recorded routing through the live pool's policies.
#pragma once

#include <pybind11/pybind11.h>

namespace torch_mesh {

void define_replay(pybind11::module_& module);

}  // namespace torch_mesh
