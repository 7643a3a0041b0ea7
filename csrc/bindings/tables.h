// torch_mesh._C.Tables: embedding tables whose rows are read from files.
#pragma once

#include <pybind11/pybind11.h>

#include "bindings/py_live.h"

namespace torch_mesh {

class PyTables : public PyLive<Tables> {
 public:
  explicit PyTables(const pybind11::kwargs& options);
};

void define_tables(pybind11::module_& module);

}  // namespace torch_mesh
