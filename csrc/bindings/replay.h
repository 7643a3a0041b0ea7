// torch_mesh._C.replay and replay_ranks: recorded routing through the pool's own core.
#pragma once

#include <pybind11/pybind11.h>

namespace torch_mesh {

void define_replay(pybind11::module_& module);

}  // namespace torch_mesh
