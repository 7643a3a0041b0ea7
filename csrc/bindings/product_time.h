// What the ways of a product cost, for choosing between them.
#pragma once

#include <pybind11/pybind11.h>

namespace torch_mesh {

void define_product_time(pybind11::module_& m);

}  // namespace torch_mesh
