#pragma once

#include <string>

#include "base/error.h"

namespace torch_mesh {

// The Error for `what` at `place`, whose read failed with the errno `error`.
Error read_error(const std::string& what, const ErrorPlace& place, int error);

}  // namespace torch_mesh
