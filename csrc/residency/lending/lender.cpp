#include "residency/lending/lender.h"

#include <fcntl.h>
#include <poll.h>
#include <pthread.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <chrono>
#include <cstring>
#include <new>
#include <thread>
#include <utility>
#include <vector>

#include "base/descriptor.h"
#include "base/start_thread.h"
#include "residency/lending/poller.h"
#include "residency/lending/protocol.h"

namespace torch_mesh {
namespace {

using lending::Answer;
using lending::Poller;
using lending::Request;
using lending::Welcome;

// The most requests of a borrower that are heard at a time, so that it cannot keep the thread from
// the others.
constexpr int kRequestsAtOnce = 64;
// The pause after the system had no descriptor or memory for a connection, which waits in the
// queue.
constexpr int kRetryMilliseconds = 100;
constexpr std::chrono::seconds kLockPatience{10};

[[noreturn]] void throw_system(const std::string& path, const char* what) {
  const int error = errno;
  lending::throw_refused(path, error, "cannot ", what, " ", path, ": ", strerror(error));
}

// One record that is lent, or will be when it is there.
struct Lent {
  Lent(Pool& pool, int32_t layer, int32_t which)
      : expert(which), claim(pool, layer, {&expert, 1}, {&entry, 1}) {}

  int32_t expert;
  Claim::Entry entry{};
  Claim claim;
};

// The poller's events are tagged with the descriptors' addresses.
struct Borrower {
  Descriptor socket;
  Descriptor process;                       // readable when it has ended; none: unknown
  std::vector<std::unique_ptr<Lent>> lent;  // by slot
  std::vector<int32_t> pending = {};        // slots whose record is not there yet
  bool refused = false;                     // its further messages are ignored
  bool disconnected = false;
};

// Whether the peer has closed its end. recv() also returns 0 for an empty packet, and for a worker
// that has only ended sending.
bool is_closed(const Descriptor& socket) {
  pollfd polled{socket.get(), 0, 0};
  return poll(&polled, 1, 0) > 0 && (polled.revents & POLLHUP) != 0;
}

// The errno by which an Answer reports an error.
int errno_of(const Error& error) {
  switch (error.kind()) {
    case ErrorKind::kChecksum:
      return EBADMSG;
    case ErrorKind::kMemory:
      return ENOMEM;
    case ErrorKind::kClosed:
      return ECONNRESET;
    default:
      return error.os_error() > 0 ? error.os_error() : EIO;
  }
}

// Locks the folder of a socket. Of several owners that start at once, one looks at the socket,
// replaces it and listens before the next one looks.
Descriptor lock_folder(const std::string& path) {
  const size_t slash = path.rfind('/');
  const std::string folder = slash == std::string::npos ? "." : path.substr(0, slash + 1);
  Descriptor locked(open(folder.c_str(), O_RDONLY | O_DIRECTORY | O_CLOEXEC));
  if (locked.get() < 0) throw_system(folder, "open the folder");
  const auto deadline = std::chrono::steady_clock::now() + kLockPatience;
  while (flock(locked.get(), LOCK_EX | LOCK_NB) != 0) {
    if (errno == EINTR) continue;
    if (errno != EWOULDBLOCK) throw_system(folder, "lock the folder");
    if (std::chrono::steady_clock::now() > deadline) {
      throw Error(ErrorKind::kTimeout, concat("another process has locked ", folder,
                                              "; give a --socket in another folder"));
    }
    std::this_thread::sleep_for(std::chrono::milliseconds(1));
  }
  return locked;
}

// Removes a socket at `path` that no process answers at.
void remove_stale_socket(const std::string& path, const sockaddr_un& address) {
  struct stat about {};
  if (lstat(path.c_str(), &about) != 0) {
    if (errno == ENOENT) return;
    throw_system(path, "look at");
  }
  if (!S_ISSOCK(about.st_mode)) {
    throw_invalid(path, " is there and is no socket; give another --socket");
  }
  const Descriptor probe(socket(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC | SOCK_NONBLOCK, 0));
  if (probe.get() < 0) throw_system(path, "make a socket for");
  if (connect(probe.get(), lending::generic(address), sizeof(address)) == 0 ||
      errno != ECONNREFUSED) {
    throw_invalid("a process answers at ", path, " already; end it, or give another --socket");
  }
  if (unlink(path.c_str()) != 0 && errno != ENOENT) throw_system(path, "replace");
}

}  // namespace

struct Lender::Impl {
  Impl(Pool& given, const std::string& where, int32_t max)
      : pool(given), path(where), max_borrowers(max), shared(given.shared_descriptor()) {
    if (max < 1 || max > pool.max_slots()) {
      throw_invalid("a pool of ", pool.max_slots(),
                    " experts can be lent to 1 to as many workers; got ", max);
    }
    welcome = {.borrowed = pool.max_slots() / max,
               .layers = pool.layers(),
               .experts = pool.experts(),
               .slots = pool.max_slots(),
               .record_bytes = pool.shared_bytes() / pool.max_slots(),
               .pool_bytes = pool.shared_bytes(),
               .fingerprint = lending::fingerprint(pool.source())};
    // Reserved here, since an exception on the thread terminates the process.
    all.reserve(static_cast<size_t>(max));
    events.resize(2 + 2 * static_cast<size_t>(max));
    if (wake_up.get() < 0) throw_system(path, "make an event for");
    pool.on_progress([this] { wake_up.wake(); });
    try {
      listen_at(lending::address_of(path));
      if (!poller.add(wake_up.get(), EPOLLIN, &wake_up) ||
          !poller.add(listening.get(), EPOLLIN, &listening)) {
        throw_system(path, "wait at");
      }
      thread = start_thread("the thread that lends", [this] { run(); });
    } catch (...) {
      pool.on_progress({});
      if (inode != 0) unlink(path.c_str());
      throw;
    }
  }

  ~Impl() {
    pool.close();
    closing = true;
    wake_up.wake();
    thread.join();
    pool.on_progress({});
    struct stat about {};
    if (lstat(path.c_str(), &about) == 0 && about.st_ino == inode) unlink(path.c_str());
  }

  void listen_at(const sockaddr_un& address) {
    const Descriptor locked = lock_folder(path);
    remove_stale_socket(path, address);
    listening.reset(socket(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC | SOCK_NONBLOCK, 0));
    if (listening.get() < 0) throw_system(path, "make a socket for");
    // No process can connect before listen(), and the mode is set by then.
    if (bind(listening.get(), lending::generic(address), sizeof(address)) != 0)
      throw_system(path, "bind");
    struct stat about {};
    if (chmod(path.c_str(), 0600) != 0 || listen(listening.get(), 64) != 0 ||
        lstat(path.c_str(), &about) != 0) {
      const int error = errno;
      unlink(path.c_str());
      errno = error;
      throw_system(path, "listen at");
    }
    inode = about.st_ino;
  }

  void run() {
    pthread_setname_np(pthread_self(), "mesh-lend");
    while (!closing) {
      const auto ready = poller.wait(events, no_descriptors ? kRetryMilliseconds : -1);
      if (no_descriptors) poller.change(listening.get(), EPOLLIN, &listening);
      no_descriptors = false;
      bool connecting = false;
      for (const epoll_event& event : ready) {
        if (event.data.ptr == &wake_up) {
          wake_up.clear();
        } else if (event.data.ptr == &listening) {
          connecting = true;
        } else {
          on_event(event.data.ptr, event.events);
        }
      }
      std::erase_if(all, [this](const auto& each) {
        if (each->disconnected) unwatch(*each);
        return each->disconnected;
      });
      connected = static_cast<int32_t>(all.size());
      for (const auto& each : all) send_ready(*each);
      if (connecting) welcome_one();
    }
    all.clear();
    connected = 0;
  }

  void unwatch(const Borrower& borrower) const {
    poller.remove(borrower.socket.get());
    if (borrower.process.get() >= 0) poller.remove(borrower.process.get());
  }

  // Called after the slots of borrowers that have disconnected are released.
  void welcome_one() {
    Descriptor socket(accept4(listening.get(), nullptr, nullptr, SOCK_CLOEXEC | SOCK_NONBLOCK));
    if (socket.get() < 0) {
      if (errno == EAGAIN || errno == EINTR || errno == ECONNABORTED) return;
      no_descriptors = true;
      poller.change(listening.get(), 0, &listening);
      return;
    }
    ucred peer{};
    socklen_t size = sizeof(peer);
    if (getsockopt(socket.get(), SOL_SOCKET, SO_PEERCRED, &peer, &size) != 0 ||
        peer.uid != geteuid()) {
      ++refusals;
      return;
    }
    if (std::ssize(all) >= max_borrowers) {
      static_cast<void>(lending::send_with(socket.get(), Welcome{}, -1));
      return;
    }
    try {
      auto borrower = std::make_unique<Borrower>();
      borrower->lent.resize(static_cast<size_t>(welcome.borrowed));
      borrower->pending.reserve(static_cast<size_t>(welcome.borrowed));
      // The process is watched, too: a child that the borrower has forked keeps its socket open.
      if (peer.pid > 0) {
        borrower->process.reset(static_cast<int>(syscall(SYS_pidfd_open, peer.pid, 0)));
      }
      borrower->socket = std::move(socket);
      const bool watched = poller.add(borrower->socket.get(), EPOLLIN, &borrower->socket) &&
                           (borrower->process.get() < 0 ||
                            poller.add(borrower->process.get(), EPOLLIN, &borrower->process));
      if (!watched || !lending::send_with(borrower->socket.get(), welcome, shared)) {
        unwatch(*borrower);
        return;
      }
      all.push_back(std::move(borrower));
      connected = static_cast<int32_t>(all.size());
    } catch (const std::bad_alloc&) {  // the borrower finds the connection closed
    }
  }

  void on_event(const void* descriptor, uint32_t what) {
    Borrower& borrower = **std::ranges::find_if(all, [descriptor](const auto& each) {
      return descriptor == &each->socket || descriptor == &each->process;
    });
    if (descriptor == &borrower.process || (what & EPOLLHUP) != 0) {
      borrower.disconnected = true;
    } else if (!borrower.refused) {
      receive_requests(borrower);
    }
  }

  void receive_requests(Borrower& borrower) {
    for (int i = 0; i < kRequestsAtOnce && !borrower.refused; ++i) {
      std::array<std::byte, sizeof(Request) + 1> message{};
      const ssize_t count =
          recv(borrower.socket.get(), message.data(), message.size(), MSG_DONTWAIT);
      if (count < 0 && errno == EINTR) continue;
      if (count < 0) return;  // nothing is left, or it is closed, which is an event of its own
      Request request;
      std::memcpy(&request, message.data(), sizeof(request));
      if (count == sizeof(request) && is_valid(borrower, request)) {
        lend(borrower, request);
      } else if (count == 0 && is_closed(borrower.socket)) {
        borrower.disconnected = true;
        return;
      } else {
        refuse(borrower);
      }
    }
  }

  bool is_valid(const Borrower& borrower, const Request& request) const {
    return request.slot >= 0 && request.slot < welcome.borrowed && request.layer >= 0 &&
           request.layer < welcome.layers && request.expert >= 0 &&
           request.expert < welcome.experts &&
           std::ranges::find(borrower.pending, request.slot) == borrower.pending.end();
  }

  // Loans stay valid until the borrower disconnects, since it may be reading them. An empty packet
  // tells it that it was refused. shutdown() would hide from is_closed() whether it has closed its
  // own end.
  void refuse(Borrower& borrower) {
    borrower.refused = true;
    ++refusals;
    static_cast<void>(::send(borrower.socket.get(), nullptr, 0, MSG_DONTWAIT | MSG_NOSIGNAL));
    poller.change(borrower.socket.get(), 0, &borrower.socket);
  }

  void lend(Borrower& borrower, const Request& request) {
    std::unique_ptr<Lent>& lent = borrower.lent[request.slot];
    lent.reset();  // first: its slot may be the only one that is free
    const auto error = caught([&] {
      lent = std::make_unique<Lent>(pool, request.layer, request.expert);
      borrower.pending.push_back(request.slot);
    });
    if (error) send(borrower, {request.slot, errno_of(*error), 0});
  }

  void send_ready(Borrower& borrower) {
    std::erase_if(borrower.pending, [&](int32_t slot) {
      std::unique_ptr<Lent>& lent = borrower.lent[slot];
      ReadyExpert ready{};
      int32_t count = 0;
      const auto error = caught([&] { count = lent->claim.try_next({&ready, 1}); });
      if (!error && count == 0) return false;
      if (error) lent.reset();
      send(borrower, error ? Answer{slot, errno_of(*error), 0}
                           : Answer{slot, 0, pool.shared_offset(ready.record)});
      return true;
    });
  }

  // Refuses a borrower that sends requests and does not receive answers.
  void send(Borrower& borrower, const Answer& message) {
    if (borrower.refused) return;
    const ssize_t sent =
        ::send(borrower.socket.get(), &message, sizeof(message), MSG_DONTWAIT | MSG_NOSIGNAL);
    if (sent == sizeof(message)) return;
    if (errno == EPIPE || errno == ECONNRESET) return;  // an event of its own
    refuse(borrower);
  }

  Pool& pool;
  const std::string path;
  const int32_t max_borrowers;
  const int shared;
  Welcome welcome;
  const Poller poller;
  WakeUp wake_up;
  Descriptor listening;
  ino_t inode = 0;
  std::atomic<bool> closing{false};
  std::atomic<int32_t> connected{0};
  std::atomic<int64_t> refusals{0};

  // Used by the thread alone.
  std::vector<std::unique_ptr<Borrower>> all;
  std::vector<epoll_event> events;
  bool no_descriptors = false;  // for the next connection

  std::thread thread;
};

Lender::Lender(Pool& pool, const std::string& path, int32_t borrowers)
    : impl_(make_owned<Impl>(pool, path, borrowers)) {}

Lender::~Lender() = default;

int32_t Lender::borrowers() const { return impl_->connected; }
int32_t Lender::slots() const { return impl_->welcome.borrowed; }
int64_t Lender::refused() const { return impl_->refusals; }

}  // namespace torch_mesh
