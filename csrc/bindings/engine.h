// torch_mesh._C.Engine: the experts of one model.
#pragma once

#include <pybind11/pybind11.h>

#include <chrono>
#include <cstdint>
#include <string>

#include "bindings/py_live.h"
#include "io/reader.h"

namespace torch_mesh {

// torch_mesh._C.Interpose, which tests make: a hook between an engine's reader and its backend.
struct PyInterpose {
  Interpose interpose;
};

class PyEngine : public PyLive<Engine> {
 public:
  explicit PyEngine(const pybind11::kwargs& options);

  // Returns false also if the engine is closed.
  bool wait_for_forwards(int32_t layer, int64_t forwards, double patience) const;
  // Throws Error(kInvalid) if a lender of this engine is open.
  void close(bool wait);
};

// Converts the time-out of an engine or of tables, in seconds. Throws Error(kInvalid) if it is out
// of range.
std::chrono::milliseconds timeout_from(double seconds);

// Sets how `reader` reads, from the `io` of MeshConfig.
void set_reader_io(const std::string& io, ReaderOptions& reader);

// Converts the `prefill` of MeshConfig. Throws Error(kInvalid) for an unknown name.
PrefillWindow prefill_from(const std::string& name);

void define_engine(pybind11::module_& module);

}  // namespace torch_mesh
