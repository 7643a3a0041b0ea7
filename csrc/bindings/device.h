// torch_mesh._C.HostShare, the host's part of layers that are partly on a device; Uplift, which
// streams a prompt's experts to the device; Mover, which moves hot experts there.
#pragma once

#include <pybind11/pybind11.h>

namespace torch_mesh {

void define_device(pybind11::module_& module);

}  // namespace torch_mesh
