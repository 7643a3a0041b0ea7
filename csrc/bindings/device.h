// torch_mesh._C.HostShare, what of a device's layers the host computes; Uplift, which brings a
// prompt experts; Mover, which moves hot ones there.
#pragma once

#include <pybind11/pybind11.h>

namespace torch_mesh {

void define_device(pybind11::module_& module);

}  // namespace torch_mesh
