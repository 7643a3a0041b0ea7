// Waiting for descriptors, by epoll: poll() refuses more of them than the process may open, and
// that limit may have been lowered since.
#pragma once

#include <sys/epoll.h>

#include <cstdint>
#include <span>

#include "residency/lending/protocol.h"

namespace torch_mesh::lending {

class Poller {
 public:
  // Throws Error(kRead) where the system has no descriptor for it.
  Poller();

  // `events` as in epoll_ctl(); EPOLLHUP and EPOLLERR always. `tag` comes back with them. False
  // where the system has no memory for it.
  bool add(int descriptor, uint32_t events, void* tag) const;
  // Of one that was added.
  void change(int descriptor, uint32_t events, void* tag) const;
  // To be called before it is closed, since a forked child may have it, too.
  void remove(int descriptor) const;

  // Those that are ready, as many as fit. None after `milliseconds` (-1: never), or after a signal.
  std::span<const epoll_event> wait(std::span<epoll_event> ready, int milliseconds) const;

 private:
  const Descriptor epoll_;
};

}  // namespace torch_mesh::lending
