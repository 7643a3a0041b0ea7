// What the Python classes of engines and of tables have in common.
#pragma once

#include <pybind11/pybind11.h>

#include <chrono>
#include <cstdint>
#include <memory>
#include <type_traits>

#include "base/error.h"
#include "base/freeing.h"
#include "bindings/handles.h"
#include "engine/engine.h"
#include "tables/tables.h"

namespace torch_mesh {

// What close() ends: an engine's pool, or the tables themselves.
inline Pool& closable(Engine& engine) { return engine.pool(); }
inline Tables& closable(Tables& tables) { return tables; }

// The owner of an engine or tables, T, in Python.
template <typename T>
class PyLive {
 public:
  PyLive(const PyLive&) = delete;
  PyLive& operator=(const PyLive&) = delete;

  int64_t id() const { return id_; }
  bool closed() const { return live_ == nullptr; }

  // Throws Error(kClosed) after close().
  std::shared_ptr<Live<T>> live() const {
    if (closed()) throw Error(ErrorKind::kClosed, closed_message_);
    return live_;
  }

  // Returns see(object), called without the GIL. The object is released before Python objects are
  // made from the result. Making them may run the garbage collector, which may close this object
  // with an unreachable model, and close() waits for its last user. Throws Error(kClosed) after
  // close(), and Error(kForked) in a child.
  template <typename See>
  std::invoke_result_t<See, T&> call(const See& see) const {
    const std::shared_ptr<Live<T>> live = this->live();
    const pybind11::gil_scoped_release released;
    closable(*live->object).check_process();
    return see(*live->object);
  }

  // Waits also if an earlier call did not, or not long enough.
  void close(bool wait);

 protected:
  explicit PyLive(const char* closed_message) : closed_message_(closed_message) {}
  ~PyLive();
  void open(std::unique_ptr<T> object);

 private:
  const char* closed_message_;
  std::shared_ptr<Live<T>> live_;     // nullptr: closed
  std::shared_ptr<Freeing> freeing_;  // of the closed object
  std::chrono::milliseconds timeout_{};
  int64_t id_ = 0;
};

}  // namespace torch_mesh
