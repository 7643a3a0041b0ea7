#pragma once

#include <gtest/gtest.h>

#include "base/error.h"

namespace torch_mesh::testing {

// Returns the Error that `call` throws.
template <typename Call>
Error error_of(const Call& call) {
  try {
    call();
  } catch (const Error& error) {
    return error;
  }
  ADD_FAILURE() << "no error was thrown";
  return Error(ErrorKind::kInvalid, "none");
}

}  // namespace torch_mesh::testing
