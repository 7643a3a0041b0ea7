// File descriptors, and the event by which a thread wakes another that waits for some.
#pragma once

#include <sys/eventfd.h>
#include <unistd.h>

#include <utility>

namespace torch_mesh {

// -1: none. Closed at the end.
class Descriptor {
 public:
  explicit Descriptor(int number = -1) : number_(number) {}
  ~Descriptor() { reset(); }
  Descriptor(Descriptor&& other) noexcept : number_(other.release()) {}
  Descriptor& operator=(Descriptor&& other) noexcept {
    if (this != &other) reset(other.release());
    return *this;
  }

  int get() const { return number_; }
  int release() { return std::exchange(number_, -1); }
  void reset(int number = -1) {
    if (number_ >= 0) ::close(number_);
    number_ = number;
  }

 private:
  int number_;
};

// Readable from wake() until clear(). get() is -1 where the system had no descriptor.
class WakeUp {
 public:
  int get() const { return event_.get(); }
  // Fails only when the counter is full, and then it is readable.
  void wake() const { static_cast<void>(::eventfd_write(get(), 1)); }
  void clear() const {
    eventfd_t count;
    static_cast<void>(::eventfd_read(get(), &count));
  }

 private:
  const Descriptor event_{::eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK)};
};

}  // namespace torch_mesh
