// Engine errors as Python exceptions.
#pragma once

#include <pybind11/pytypes.h>

#include <new>
#include <string>
#include <utility>

#include "base/error.h"

namespace torch_mesh {

// Error becomes the class of torch_mesh.errors that its kind names (ValueError, MemoryError and
// KeyboardInterrupt for those kinds) when it leaves a function of the module.
void register_error_translator();

// Raises the same exceptions from an op. torch translates what an op throws by a list of its own,
// which knows Python's exceptions and not ours: from torch 2.15 on pybind11 is not asked.
[[noreturn]] void throw_as_python(const Error& error);
[[noreturn]] void throw_memory_error();

template <auto function>
struct PythonErrors;
template <typename Result, typename... Arguments, Result (*function)(Arguments...)>
struct PythonErrors<function> {
  static Result call(Arguments... arguments) {
    try {
      return function(std::forward<Arguments>(arguments)...);
    } catch (const Error& error) {
      throw_as_python(error);
    } catch (const std::bad_alloc&) {
      throw_memory_error();
    }
  }
};

// What m.impl takes for `function`, an op's implementation.
template <auto function>
constexpr auto op = &PythonErrors<function>::call;

// The exception that `error` becomes, not raised.
pybind11::object exception_of(const Error& error);

[[noreturn]] inline void invalid(const std::string& message) {
  throw Error(ErrorKind::kInvalid, message);
}

}  // namespace torch_mesh
