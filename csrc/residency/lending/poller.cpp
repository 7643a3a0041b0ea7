#include "residency/lending/poller.h"

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <string>

#include "base/error.h"

namespace torch_mesh::lending {
namespace {

epoll_event event_of(uint32_t events, void* tag) {
  epoll_event event{};
  event.events = events;
  event.data.ptr = tag;
  return event;
}

}  // namespace

Poller::Poller() : epoll_(epoll_create1(EPOLL_CLOEXEC)) {
  if (epoll_.get() >= 0) return;
  throw Error(ErrorKind::kRead,
              std::string("no descriptor to wait for connections with: ") + strerror(errno) +
                  "; raise the limit of open files (ulimit -n)",
              {}, errno);
}

bool Poller::add(int descriptor, uint32_t events, void* tag) const {
  epoll_event event = event_of(events, tag);
  return epoll_ctl(epoll_.get(), EPOLL_CTL_ADD, descriptor, &event) == 0;
}

void Poller::change(int descriptor, uint32_t events, void* tag) const {
  epoll_event event = event_of(events, tag);
  epoll_ctl(epoll_.get(), EPOLL_CTL_MOD, descriptor, &event);
}

void Poller::remove(int descriptor) const {
  epoll_ctl(epoll_.get(), EPOLL_CTL_DEL, descriptor, nullptr);
}

std::span<const epoll_event> Poller::wait(std::span<epoll_event> ready, int milliseconds) const {
  const int count =
      epoll_wait(epoll_.get(), ready.data(), static_cast<int>(ready.size()), milliseconds);
  return ready.first(static_cast<size_t>(std::max(count, 0)));
}

}  // namespace torch_mesh::lending
