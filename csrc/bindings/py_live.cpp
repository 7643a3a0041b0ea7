#include "bindings/py_live.h"

#include <exception>
#include <utility>

#include "bindings/runtime.h"

namespace torch_mesh {

namespace py = pybind11;

template <typename T>
void PyLive<T>::open(std::unique_ptr<T> object) {
  live_ = Handles<T>::add(std::move(object));
  id_ = live_->id;
}

template <typename T>
PyLive<T>::~PyLive() {
  if (closed()) return;
  try {
    close(/*wait=*/true);
  } catch (const std::exception&) {  // a destructor must not throw
    // A forked child cannot close what its parent opened. A Ctrl-C ends the wait and is reported.
    if (restore_interrupt()) PyErr_WriteUnraisable(nullptr);
  }
}

template <typename T>
void PyLive<T>::close(bool wait) {
  if (!closed()) {
    freeing_ = live_->freeing;
    timeout_ = closable(*live_->object).timeout();
    // The GIL is held, so only one of several callers gets the object.
    std::shared_ptr<Live<T>> live = std::move(live_);
    const py::gil_scoped_release released;
    Handles<T>::remove(id_);
    closable(*live->object).close();
    live.reset();
  }
  // A signal handler runs inside the forward that it interrupts, so it cannot wait for that forward
  // to end. At exit there is no need to wait: the process frees everything.
  if (!wait || in_signal_handler() || !Py_IsInitialized()) return;
  const std::shared_ptr<Freeing> freeing = freeing_;
  const py::gil_scoped_release released;
  freeing->wait(timeout_, torch_runtime());
}

template class PyLive<Engine>;
template class PyLive<Tables>;

}  // namespace torch_mesh
