// The one exception type of the engine. The bindings turn each kind into its Python class.
#pragma once

#include <cstdint>
#include <stdexcept>
#include <string>
#include <utility>

namespace torch_mesh {

enum class ErrorKind : uint8_t {
  kInvalid,      // a bad argument; the message says what is allowed
  kRead,         // the disk or the file failed: errno, file, offset
  kChecksum,     // the bytes read are not those that were stored
  kTimeout,      // a read or a wait took longer than the pool's time-out
  kMemory,       // an allocation failed
  kClosed,       // the pool is closed, or the handle is stale
  kForked,       // used in a child of the process that opened it
  kInterrupted,  // the interrupt hook said stop (Ctrl-C)
  kDevice,       // the GPU's driver refused a call, or there is none
};

// Where in the model and on disk something went wrong; -1 and "" where that is unknown.
struct ErrorPlace {
  int32_t layer = -1;
  int32_t expert = -1;
  std::string file;
  int64_t offset = -1;
};

class Error : public std::runtime_error {
 public:
  Error(ErrorKind kind, const std::string& message, ErrorPlace place = {}, int os_error = 0)
      : std::runtime_error(message), kind_(kind), place_(std::move(place)), os_error_(os_error) {}

  ErrorKind kind() const { return kind_; }
  const ErrorPlace& place() const { return place_; }
  int os_error() const { return os_error_; }

 private:
  ErrorKind kind_;
  ErrorPlace place_;
  int os_error_;
};

}  // namespace torch_mesh
