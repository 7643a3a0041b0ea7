// The one exception type of the engine. The bindings turn each kind into its Python class.
#pragma once

#include <cstdint>
#include <new>
#include <optional>
#include <stdexcept>
#include <string>
#include <type_traits>
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

// The place of an error in the model and on disk; -1 and "" where it is unknown.
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

// Concatenates strings and numbers into a message.
template <typename... Parts>
std::string concat(const Parts&... parts) {
  std::string all;
  const auto append = [&](const auto& part) {
    if constexpr (std::is_arithmetic_v<std::remove_cvref_t<decltype(part)>>) {
      all += std::to_string(part);
    } else {
      all += part;
    }
  };
  (append(parts), ...);
  return all;
}

template <typename... Parts>
[[noreturn]] void throw_invalid(const Parts&... parts) {
  throw Error(ErrorKind::kInvalid, concat(parts...));
}

// Copying it allocates nothing.
inline const Error kNoMemory{
    ErrorKind::kMemory, "no memory left; keep fewer experts resident, or raise the memory limit"};

// Calls `act`. Returns the Error that it throws, kNoMemory for std::bad_alloc, or nullopt if it
// returns. Other exceptions pass.
template <typename Act>
std::optional<Error> caught(const Act& act) {
  try {
    act();
    return std::nullopt;
  } catch (Error& error) {
    return std::move(error);  // a copy could throw std::bad_alloc
  } catch (const std::bad_alloc&) {
    return kNoMemory;
  }
}

}  // namespace torch_mesh
