// An owned file descriptor, and an eventfd that wakes a thread which waits for descriptors.
#pragma once

#include <sys/eventfd.h>
#include <unistd.h>

#include <utility>

namespace torch_mesh {

// Owns a file descriptor and closes it at the end; -1: none.
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

// Readable from wake() until clear(). get() is -1 if the system had no descriptor left.
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
