#include "bindings/errors.h"

#include <pybind11/pybind11.h>

#include <exception>

#include "base/error.h"
#include "bindings/runtime.h"

namespace torch_mesh {
namespace {

namespace py = pybind11;

py::object exception_class(ErrorKind kind) {
  const py::module_ errors = py::module_::import("torch_mesh.errors");
  switch (kind) {
    case ErrorKind::kInvalid:
      return py::reinterpret_borrow<py::object>(PyExc_ValueError);
    case ErrorKind::kRead:
      return errors.attr("ReadError");
    case ErrorKind::kChecksum:
      return errors.attr("ChecksumError");
    case ErrorKind::kTimeout:
      return errors.attr("ReadTimeoutError");
    case ErrorKind::kMemory:
      return py::reinterpret_borrow<py::object>(PyExc_MemoryError);
    case ErrorKind::kClosed:
      return errors.attr("PoolClosedError");
    case ErrorKind::kForked:
      return errors.attr("ForkedProcessError");
    case ErrorKind::kInterrupted:
      return py::reinterpret_borrow<py::object>(PyExc_KeyboardInterrupt);
    case ErrorKind::kDevice:
      return errors.attr("DeviceError");
  }
  return errors.attr("MeshError");
}

void raise(const Error& error) {
  if (error.kind() == ErrorKind::kInterrupted && restore_interrupt()) return;
  const py::object exception = exception_of(error);
  PyErr_SetObject(reinterpret_cast<PyObject*>(Py_TYPE(exception.ptr())), exception.ptr());
}

}  // namespace

py::object exception_of(const Error& error) {
  const py::object exception = exception_class(error.kind())(error.what());
  const ErrorPlace& place = error.place();
  if (place.layer >= 0) exception.attr("layer") = place.layer;
  if (place.expert >= 0) exception.attr("expert") = place.expert;
  if (!place.file.empty()) exception.attr("file") = place.file;
  if (place.offset >= 0) exception.attr("offset") = place.offset;
  if (error.kind() == ErrorKind::kRead) exception.attr("errno") = error.os_error();
  return exception;
}

void warn_of(const Error& error) {
  const py::gil_scoped_acquire gil;
  if (PyErr_WarnEx(PyExc_RuntimeWarning, error.what(), 1) != 0) throw py::error_already_set();
}

void throw_as_python(const Error& error) {
  const py::gil_scoped_acquire gil;
  raise(error);
  throw py::error_already_set();
}

void throw_memory_error() {
  const py::gil_scoped_acquire gil;
  PyErr_NoMemory();
  throw py::error_already_set();
}

void register_error_translator() {
  py::register_exception_translator([](std::exception_ptr pointer) {
    try {
      if (pointer) std::rethrow_exception(pointer);
    } catch (const Error& error) {
      raise(error);
    }
  });
}

}  // namespace torch_mesh
