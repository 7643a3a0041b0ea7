// torch_mesh._C.Engine: the experts of one model.
#pragma once

#include <pybind11/pybind11.h>

#include <chrono>
#include <cstdint>
#include <memory>
#include <string>
#include <type_traits>

#include "base/error.h"
#include "bindings/registry.h"
#include "io/reader.h"

namespace torch_mesh {

// torch_mesh._C.Interpose, which tests make: a hook between an engine's reader and its backend.
struct PyInterpose {
  Interpose interpose;
};

class PyEngine {
 public:
  explicit PyEngine(const pybind11::kwargs& options);
  ~PyEngine();
  PyEngine(const PyEngine&) = delete;
  PyEngine& operator=(const PyEngine&) = delete;

  int64_t id() const { return id_; }

  // Throws Error(kClosed) after close().
  std::shared_ptr<LiveEngine> live() const {
    if (live_ == nullptr) throw Error(ErrorKind::kClosed, "this engine is closed");
    return live_;
  }

  // Returns see(engine), called without the GIL. The engine is released before Python objects are
  // made from the result. Making them may run the garbage collector, which may close this engine
  // with an unreachable model, and close() waits for its last user.
  template <typename See>
  std::invoke_result_t<See, Engine&> look(const See& see) const {
    const std::shared_ptr<LiveEngine> live = this->live();
    const pybind11::gil_scoped_release released;
    return see(*live->engine);
  }

  // Returns false also if the engine is closed.
  bool wait_for_forwards(int32_t layer, int64_t forwards, double patience) const;
  // Waits also if an earlier call did not, or not long enough. Throws Error(kInvalid) if a lender
  // of this engine is open.
  void close(bool wait);

 private:
  std::shared_ptr<LiveEngine> live_;  // nullptr: closed
  std::shared_ptr<Freeing> freeing_;  // of the closed engine
  std::chrono::milliseconds timeout_{};
  int64_t id_ = 0;
};

// Converts the time-out of an engine or of tables, in seconds. Throws Error(kInvalid) if it is out
// of range.
std::chrono::milliseconds timeout_from(double seconds);

// Sets how `reader` reads, from the `io` of MeshConfig. Throws Error(kInvalid) for "mmap", which no
// longer exists.
void read_by(const std::string& io, ReaderOptions& reader);

// Converts the `prefill` of MeshConfig. Throws Error(kInvalid) for an unknown name.
PrefillWindow prefill_from(const std::string& name);

void define_engine(pybind11::module_& module);

}  // namespace torch_mesh
