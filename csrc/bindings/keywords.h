// The keyword arguments of a constructor or function, each read by name where it is used, so that
// an option's name is written once.
#pragma once

#include <pybind11/pybind11.h>

#include <string>
#include <utility>

namespace torch_mesh {

// Raises TypeError for an argument that is missing or of another type and, by none_left(), for one
// that nothing has read.
class Keywords {
 public:
  // Copies `given`: the caller's dict stays whole, and keeps alive what take() returns pointers
  // into.
  Keywords(const char* whose, const pybind11::dict& given)
      : whose_(whose),
        left_(pybind11::reinterpret_steal<pybind11::dict>(PyDict_Copy(given.ptr()))) {
    if (!left_) throw pybind11::error_already_set();
  }

  template <typename T>
  T take(const char* name) {
    if (!left_.contains(name)) throw pybind11::type_error(whose_ + " needs " + name + "=");
    const auto value = left_.attr("pop")(name).template cast<pybind11::object>();
    try {
      return value.template cast<T>();
    } catch (const pybind11::cast_error&) {
      const std::string given = pybind11::repr(value), type = pybind11::type_id<T>();
      throw pybind11::type_error(name + ("= of " + whose_) + " is " + given + "; it must be " +
                                 type);
    }
  }
  template <typename T>
  T take(const char* name, T otherwise) {
    return left_.contains(name) ? take<T>(name) : std::move(otherwise);
  }

  void none_left() const {
    for (const auto& each : left_) {
      throw pybind11::type_error(whose_ + " knows no " +
                                 pybind11::str(each.first).cast<std::string>() + "=");
    }
  }

 private:
  std::string whose_;
  pybind11::dict left_;
};

}  // namespace torch_mesh
