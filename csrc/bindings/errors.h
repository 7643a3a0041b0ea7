// Engine errors as Python exceptions.
#pragma once

#include <pybind11/pytypes.h>

#include <new>
#include <utility>

#include "base/error.h"

namespace torch_mesh {

// Registers the translation of an Error that leaves a function of the module: to the class of
// torch_mesh.errors for its kind, or to ValueError, MemoryError or KeyboardInterrupt.
void register_error_translator();

// Raise the same exceptions from an op. torch translates exceptions of ops by a list of its own,
// which has Python's exceptions but not Error. From torch 2.15 on it does not call pybind11's
// translators.
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

// The argument of m.impl for an op that `function` implements.
template <auto function>
constexpr auto op = &PythonErrors<function>::call;

// Returns the Python exception for `error` without raising it.
pybind11::object exception_of(const Error& error);
// Issues a RuntimeWarning with the error's message. Throws where filters make it an exception.
void warn_of(const Error& error);

}  // namespace torch_mesh
