// Engine errors as Python exceptions.
#pragma once

#include <pybind11/pytypes.h>

#include <string>

#include "base/error.h"

namespace torch_mesh {

// Error becomes the class of torch_mesh.errors that its kind names (ValueError, MemoryError and
// KeyboardInterrupt for those kinds), also when it comes out of torch.ops, whose calls go through
// the same translators.
void register_error_translator();

// The exception that `error` becomes, not raised.
pybind11::object exception_of(const Error& error);

[[noreturn]] inline void invalid(const std::string& message) {
  throw Error(ErrorKind::kInvalid, message);
}

}  // namespace torch_mesh
