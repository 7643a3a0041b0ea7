// torch_mesh._C.Tables: embedding tables whose rows are read from files.
#pragma once

#include <pybind11/pybind11.h>

#include <chrono>
#include <cstdint>
#include <memory>
#include <type_traits>

#include "base/error.h"
#include "base/freeing.h"
#include "tables/tables.h"

namespace torch_mesh {

struct LiveTables {
  ~LiveTables() { freeing->begin(std::move(tables)); }

  std::unique_ptr<Tables> tables;
  const std::shared_ptr<Freeing> freeing = std::make_shared<Freeing>();
  int64_t id;
};

class PyTables {
 public:
  explicit PyTables(const pybind11::kwargs& options);
  ~PyTables();
  PyTables(const PyTables&) = delete;
  PyTables& operator=(const PyTables&) = delete;

  int64_t id() const { return id_; }

  // Returns see(tables), called without the GIL. The tables are released before Python objects are
  // made from the result (see PyEngine::look). Throws Error(kClosed) after close(), and
  // Error(kForked) in a child.
  template <typename See>
  std::invoke_result_t<See, Tables&> look(const See& see) const {
    const std::shared_ptr<LiveTables> live = live_;
    if (live == nullptr) throw Error(ErrorKind::kClosed, "these tables are closed");
    const pybind11::gil_scoped_release released;
    live->tables->check_owner();
    return see(*live->tables);
  }

  // As PyEngine::close().
  void close(bool wait);

 private:
  std::shared_ptr<LiveTables> live_;  // nullptr: closed
  std::shared_ptr<Freeing> freeing_;  // of the closed tables
  std::chrono::milliseconds timeout_{};
  int64_t id_ = 0;
};

void define_tables(pybind11::module_& module);

}  // namespace torch_mesh
