#include "residency/lending/loan.h"

#include <fcntl.h>
#include <poll.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <array>
#include <cerrno>
#include <cstring>
#include <map>
#include <span>
#include <thread>
#include <utility>

#include "base/error.h"
#include "base/interrupts.h"
#include "io/backend.h"
#include "residency/lending/poller.h"
#include "store/record.h"

namespace torch_mesh {
namespace {

using lending::Answer;
using lending::Request;
using lending::throw_refused;
using lending::Welcome;

constexpr int32_t kMaxUnderWay = 32;   // requests to the owner at a time
constexpr int kAskMilliseconds = 100;  // how often the interrupt hook is asked
constexpr std::chrono::milliseconds kRetryTime{20};
constexpr int kSeals = F_SEAL_SHRINK | F_SEAL_GROW;

// Calls ready() until it is true, and the interrupt hook after each call. ready() takes
// kAskMilliseconds at most.
template <typename Ready>
void wait_for_owner(const std::string& path, std::chrono::milliseconds timeout,
                    const Runtime& runtime, const Ready& ready) {
  const auto deadline = std::chrono::steady_clock::now() + timeout;
  while (!ready()) {
    check_interrupted(runtime, "connecting to " + path);
    if (std::chrono::steady_clock::now() < deadline) continue;
    throw Error(ErrorKind::kTimeout,
                concat("the owner of the pool at ", path, " did not answer in ", timeout.count(),
                       " ms; is it stopped?"));
  }
}

[[noreturn]] void throw_no_descriptors(const std::string& path, int error) {
  throw_refused(path, error, "cannot connect to ", path, ": ", strerror(error),
                "; this process has too many open files, raise its limit (ulimit -n)");
}

}  // namespace

Loan::Loan(const std::string& path, const Source& source, int64_t record_bytes,
           std::chrono::milliseconds timeout, const Runtime& runtime)
    : path_(path) {
  if (source.raw) {
    throw_invalid(
        "only the records of a converted store can be shared; convert this checkpoint and share "
        "that folder");
  }
  connect_within(timeout, runtime);
  receive_welcome(timeout, runtime);
  if (welcome_.borrowed == 0) {
    throw_refused(path, EBUSY, "all slots of the pool at ", path,
                  " are taken by other workers; start its owner with more --workers");
  }
  if (welcome_.fingerprint != lending::fingerprint(source) ||
      welcome_.record_bytes != record_bytes || welcome_.layers != source.layers ||
      welcome_.experts != source.experts) {
    throw_invalid("the pool at ", path, " is of another store (", welcome_.layers, " layers of ",
                  welcome_.experts, " experts of ", welcome_.record_bytes,
                  " bytes) than this model's (", source.layers, " of ", source.experts, " of ",
                  record_bytes,
                  "), or of another conversion; share the folder that the model is opened from");
  }
  map();
}

Loan::~Loan() {
  if (owner_.forked()) return;
  // Ends the connection even if a child that this process has forked has the socket, too.
  shutdown(socket_.get(), SHUT_RDWR);
  munmap(begin_, static_cast<size_t>(welcome_.pool_bytes));
}

// While the owner's queue is full, connect() has to be repeated.
void Loan::connect_within(std::chrono::milliseconds timeout, const Runtime& runtime) {
  const sockaddr_un address = lending::address_of(path_);
  socket_.reset(socket(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC | SOCK_NONBLOCK, 0));
  if (socket_.get() < 0) throw_no_descriptors(path_, errno);
  wait_for_owner(path_, timeout, runtime, [&] {
    if (connect(socket_.get(), lending::generic(address), sizeof(address)) == 0) return true;
    const int error = errno;
    if (error != EAGAIN && error != EINTR) {
      throw_refused(path_, error, "no process shares a pool at ", path_, " (", strerror(error),
                    "); start its owner: torch-mesh share STORE --socket ", path_);
    }
    std::this_thread::sleep_for(kRetryTime);
    return false;
  });
}

void Loan::receive_welcome(std::chrono::milliseconds timeout, const Runtime& runtime) {
  pollfd polled{socket_.get(), POLLIN, 0};
  wait_for_owner(path_, timeout, runtime, [&] { return poll(&polled, 1, kAskMilliseconds) > 0; });
  iovec part{&welcome_, sizeof(welcome_)};
  alignas(cmsghdr) std::array<char, CMSG_SPACE(sizeof(int))> beside{};
  msghdr header{};
  header.msg_iov = &part;
  header.msg_iovlen = 1;
  header.msg_control = beside.data();
  header.msg_controllen = beside.size();
  const ssize_t count = recvmsg(socket_.get(), &header, MSG_CMSG_CLOEXEC | MSG_DONTWAIT);
  const bool cut = (header.msg_flags & MSG_CTRUNC) != 0;
  int received = 0;
  for (cmsghdr* control = CMSG_FIRSTHDR(&header); count > 0 && control != nullptr;
       control = CMSG_NXTHDR(&header, control)) {
    if (control->cmsg_level != SOL_SOCKET || control->cmsg_type != SCM_RIGHTS) continue;
    // With its padding the buffer has room for two descriptors: each that was received must be
    // closed.
    for (size_t at = 0; CMSG_LEN(at + sizeof(int)) <= control->cmsg_len; at += sizeof(int)) {
      int descriptor;
      std::memcpy(&descriptor, CMSG_DATA(control) + at, sizeof(descriptor));
      shared_.reset(descriptor);
      ++received;
    }
  }
  ucred peer{};
  socklen_t size = sizeof(peer);
  if (count == 0 || (count < 0 && errno == ECONNRESET) ||
      getsockopt(socket_.get(), SOL_SOCKET, SO_PEERCRED, &peer, &size) != 0 ||
      peer.uid != geteuid()) {
    throw_refused(path_, ECONNRESET, "the owner of the pool at ", path_,
                  " closed the connection: it is ending, or runs as another user");
  }
  if (cut && received == 0) throw_no_descriptors(path_, EMFILE);
  if (received > 1) shared_.reset();
  if (count != sizeof(welcome_) || welcome_.magic != lending::kMagic) {
    throw_invalid("what answers at ", path_,
                  " is no torch-mesh share of this version; run the same torch_mesh on both sides");
  }
}

void Loan::map() {
  struct stat about {};
  // Without the seals the owner could cut the memory off, and a read of it would kill this process.
  const int seals = fcntl(shared_.get(), F_GET_SEALS);
  const bool sound = welcome_.borrowed > 0 && welcome_.borrowed <= welcome_.slots &&
                     welcome_.pool_bytes == welcome_.slots * welcome_.record_bytes && seals >= 0 &&
                     (seals & kSeals) == kSeals && fstat(shared_.get(), &about) == 0 &&
                     about.st_size == welcome_.pool_bytes;
  if (!sound) {
    throw_invalid("the process that answers at ", path_, " is not the owner of a shared pool");
  }
  lent_.assign(static_cast<size_t>(slots()), nullptr);
  // Populated at once: otherwise the first use of each record would pay for its page faults.
  void* mapped = mmap(nullptr, static_cast<size_t>(welcome_.pool_bytes), PROT_READ,
                      MAP_SHARED | MAP_POPULATE, shared_.get(), 0);
  if (mapped == MAP_FAILED) {
    const int error = errno;
    throw Error(ErrorKind::kMemory, concat("cannot map the pool at ", path_, ": ", strerror(error)),
                {}, error);
  }
  begin_ = static_cast<std::byte*>(mapped);
  madvise(begin_, static_cast<size_t>(welcome_.pool_bytes), MADV_DONTFORK);
}

// A backend whose reads are of whole records. Each is a request to the owner, for a slot.
class LentBackend final : public Backend {
 public:
  LentBackend(Loan& loan, const Source& source) : loan_(loan) {
    if (wake_up_.get() < 0 || !poller_.add(wake_up_.get(), EPOLLIN, nullptr) ||
        !poller_.add(loan_.socket_.get(), EPOLLIN, &loan_)) {
      throw Error(ErrorKind::kMemory, concat("cannot wait for an owner: ", strerror(errno)), {},
                  errno);
    }
    reads_.resize(static_cast<size_t>(loan_.slots()));
    ended_.reserve(kMaxUnderWay);
    for (int32_t id = 0; id < source.layers * source.experts; ++id) {
      const Extent& extent = source.extents_of(id)[0];
      experts_[{extent.file, extent.offset}] = {0, source.layer_of(id), source.index_of(id)};
    }
  }

  void submit(const ChunkRead& read) override {
    Request request = experts_.at({read.file, read.offset});
    request.slot = static_cast<int32_t>((read.to - loan_.begin_) / loan_.welcome_.record_bytes);
    loan_.lent_[request.slot] = nullptr;
    reads_[request.slot] = {read.chunk, read.bytes};
    int error = disconnect_error_;
    if (error == 0) {
      const ssize_t sent =
          send(loan_.socket_.get(), &request, sizeof(request), MSG_DONTWAIT | MSG_NOSIGNAL);
      if (sent != sizeof(request)) error = errno == EPIPE ? ECONNRESET : errno;
    }
    if (error != 0) end(request.slot, -error);
  }

  int32_t wait(std::chrono::microseconds timeout, std::span<ChunkResult> results) override {
    if (ended_.empty()) {
      std::array<epoll_event, 2> events;
      const auto milliseconds = static_cast<int>((timeout.count() + 999) / 1000);
      for (const epoll_event& event : poller_.wait(events, milliseconds)) {
        if (event.data.ptr != nullptr) {
          receive();
          continue;
        }
        wake_up_.clear();
      }
    }
    return take(ended_, results);
  }

  // Ends reads at once: the owner may never answer, and writes to no memory of this process.
  void cancel() override { disconnect(ECANCELED); }

  void wake() override { wake_up_.wake(); }
  const char* name() const override { return "shared"; }
  int32_t capacity() const override { return kMaxUnderWay; }

 private:
  struct UnderWay {
    int32_t chunk = -1;  // -1: none
    int64_t bytes = 0;
  };

  void end(int32_t slot, int64_t result, bool final = false) {
    ended_.push_back({std::exchange(reads_[slot].chunk, -1), result, final});
  }

  void receive() {
    while (ended_.size() < kMaxUnderWay) {
      Answer answer;
      const ssize_t count =
          recv(loan_.socket_.get(), &answer, sizeof(answer), MSG_DONTWAIT | MSG_TRUNC);
      if (count < 0 && errno == EINTR) continue;
      if (count < 0 && errno == EAGAIN) return;
      if (count != sizeof(answer) || !accept(answer)) return disconnect(ECONNRESET);
    }
  }

  // False for an answer that no owner gives.
  bool accept(const Answer& answer) {
    const Welcome& welcome = loan_.welcome_;
    if (answer.slot < 0 || answer.slot >= welcome.borrowed || reads_[answer.slot].chunk < 0) {
      return false;
    }
    if (answer.error != 0) {
      if (answer.error < 0 || answer.error > 4095) return false;
      end(answer.slot, -answer.error, /*final=*/true);
      return true;
    }
    if (answer.offset < 0 || answer.offset % kRecordAlignment != 0 ||
        answer.offset > welcome.pool_bytes - welcome.record_bytes) {
      return false;
    }
    loan_.lent_[answer.slot] = loan_.begin_ + answer.offset;
    end(answer.slot, reads_[answer.slot].bytes);
    return true;
  }

  // Ends all reads. Loans stay valid: the owner has gone, or ends them only with the connection.
  void disconnect(int error) {
    if (std::exchange(disconnect_error_, error) == 0) poller_.remove(loan_.socket_.get());
    for (int32_t slot = 0; slot < loan_.slots(); ++slot) {
      if (reads_[slot].chunk >= 0) end(slot, -error);
    }
  }

  Loan& loan_;
  const lending::Poller poller_;
  const WakeUp wake_up_;
  std::map<std::pair<int32_t, int64_t>, Request> experts_;  // by file and offset
  std::vector<UnderWay> reads_;                             // by slot
  std::vector<ChunkResult> ended_;                          // not returned by wait() yet
  int disconnect_error_ = 0;                                // an errno: the owner answers no more
};

Owned<Reader> Loan::open_reader(const ReaderOptions& options, const Source& source,
                                std::span<const MemoryRegion>, Reader::Done done) {
  ReaderOptions whole = options;
  whole.chunk_bytes = welcome_.record_bytes;
  whole.max_bytes_under_way = kMaxUnderWay * welcome_.record_bytes;
  const auto files = std::make_shared<const FileTable>(source.files, /*direct=*/false);
  return open_reader_over(std::make_unique<LentBackend>(*this, source), whole, files,
                          std::move(done), /*buffered=*/false, {});
}

}  // namespace torch_mesh
