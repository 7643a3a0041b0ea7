// Waits for descriptors by epoll: poll() refuses more of them than the process may open, and that
// limit may have been lowered since.
#pragma once

#include <sys/epoll.h>

#include <algorithm>
#include <cerrno>
#include <cstdint>
#include <cstring>
#include <span>

#include "base/descriptor.h"
#include "base/error.h"

namespace torch_mesh::lending {

class Poller {
 public:
  // Throws Error(kRead) where the system has no descriptor for it.
  Poller() : epoll_(epoll_create1(EPOLL_CLOEXEC)) {
    if (epoll_.get() >= 0) return;
    throw Error(ErrorKind::kRead,
                concat("no descriptor to wait for connections with: ", strerror(errno),
                       "; raise the limit of open files (ulimit -n)"),
                {}, errno);
  }

  // `events` as in epoll_ctl(); EPOLLHUP and EPOLLERR always. `tag` comes back with them. False
  // where the system has no memory for it.
  bool add(int descriptor, uint32_t events, void* tag) const {
    return control(EPOLL_CTL_ADD, descriptor, events, tag) == 0;
  }
  // Changes the events of a descriptor that was added.
  void change(int descriptor, uint32_t events, void* tag) const {
    control(EPOLL_CTL_MOD, descriptor, events, tag);
  }
  // Call it before closing the descriptor, since a forked child may have it, too.
  void remove(int descriptor) const { control(EPOLL_CTL_DEL, descriptor, 0, nullptr); }

  // Waits for events and returns as many as fit; none after `milliseconds` (-1: never), or after a
  // signal.
  std::span<const epoll_event> wait(std::span<epoll_event> ready, int milliseconds) const {
    const int count =
        epoll_wait(epoll_.get(), ready.data(), static_cast<int>(ready.size()), milliseconds);
    return ready.first(static_cast<size_t>(std::max(count, 0)));
  }

 private:
  int control(int what, int descriptor, uint32_t events, void* tag) const {
    epoll_event event{};
    event.events = events;
    event.data.ptr = tag;
    return epoll_ctl(epoll_.get(), what, descriptor, &event);
  }

  const Descriptor epoll_;
};

}  // namespace torch_mesh::lending
