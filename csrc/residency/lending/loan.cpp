#include "residency/lending/loan.h"

#include <poll.h>
#include <sys/eventfd.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <cstring>
#include <functional>
#include <span>
#include <unordered_map>
#include <utility>

#include "base/error.h"
#include "store/record.h"

namespace torch_mesh {
namespace {

using lending::Answer;
using lending::Descriptor;
using lending::Request;
using lending::Welcome;

constexpr int32_t kUnderWay = 32;      // requests
constexpr int kAskMilliseconds = 100;  // how often the interrupt hook is asked

std::string seconds(std::chrono::milliseconds time) { return std::to_string(time.count()) + " ms"; }

}  // namespace

Loan::Loan(const std::string& path, const Source& source, int64_t record_bytes,
           std::chrono::milliseconds timeout, const Runtime& runtime)
    : path_(path) {
  if (source.raw) {
    throw Error(ErrorKind::kInvalid,
                "only the records of a converted store can be shared; convert this checkpoint and "
                "share that folder");
  }
  const lending::Address address(path);
  socket_.reset(socket(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0));
  const auto* to = reinterpret_cast<const sockaddr*>(address.bytes.data());
  // connect() waits while the owner's queue is full, as long as a send may take.
  timeval patience{.tv_sec = timeout.count() / 1000, .tv_usec = timeout.count() % 1000 * 1000};
  setsockopt(socket_.get(), SOL_SOCKET, SO_SNDTIMEO, &patience, sizeof(patience));
  if (socket_.get() < 0 || connect(socket_.get(), to, address.size) != 0) {
    const int error = errno;
    throw Error(error == EAGAIN ? ErrorKind::kTimeout : ErrorKind::kRead,
                "nobody shares a pool at " + path + " (" + strerror(error) +
                    "); start its owner: torch-mesh share STORE --socket " + path,
                {-1, -1, path, -1}, error);
  }
  receive_welcome(timeout, runtime);
  if (welcome_.places == 0) {
    throw Error(ErrorKind::kRead,
                "all places of the pool at " + path +
                    " are taken by other workers; start its owner with more --workers",
                {-1, -1, path, -1}, EBUSY);
  }
  if (welcome_.fingerprint != lending::fingerprint(source) ||
      welcome_.record_bytes != record_bytes || welcome_.layers != source.layers ||
      welcome_.experts != source.experts) {
    throw Error(ErrorKind::kInvalid,
                "the pool at " + path + " is of another store (" + std::to_string(welcome_.layers) +
                    " layers of " + std::to_string(welcome_.experts) + " experts of " +
                    std::to_string(welcome_.record_bytes) + " bytes) than this model's (" +
                    std::to_string(source.layers) + " of " + std::to_string(source.experts) +
                    " of " + std::to_string(record_bytes) +
                    "), or of another conversion; share the folder that the model is opened from");
  }
  map();
}

Loan::~Loan() {
  if (begin_ != nullptr) munmap(begin_, static_cast<size_t>(welcome_.pool_bytes));
  if (tickets_ != nullptr) munmap(tickets_, static_cast<size_t>(places()) * kRecordAlignment);
}

void Loan::receive_welcome(std::chrono::milliseconds timeout, const Runtime& runtime) {
  pollfd polled{socket_.get(), POLLIN, 0};
  const auto deadline = std::chrono::steady_clock::now() + timeout;
  int ready;
  do {
    ready = poll(&polled, 1, kAskMilliseconds);
    if (ready == 0 && runtime.interrupted != nullptr && runtime.interrupted()) {
      throw Error(ErrorKind::kInterrupted, "interrupted while connecting to " + path_);
    }
  } while (ready <= 0 && std::chrono::steady_clock::now() < deadline);
  if (ready <= 0) {
    throw Error(ErrorKind::kTimeout, "the owner of the pool at " + path_ + " did not answer in " +
                                         seconds(timeout) + "; is it stopped?");
  }
  iovec part{&welcome_, sizeof(welcome_)};
  alignas(cmsghdr) std::array<char, CMSG_SPACE(sizeof(int))> beside{};
  msghdr header{};
  header.msg_iov = &part;
  header.msg_iovlen = 1;
  header.msg_control = beside.data();
  header.msg_controllen = beside.size();
  const ssize_t count = recvmsg(socket_.get(), &header, MSG_CMSG_CLOEXEC | MSG_DONTWAIT);
  for (cmsghdr* control = CMSG_FIRSTHDR(&header); count > 0 && control != nullptr;
       control = CMSG_NXTHDR(&header, control)) {
    if (control->cmsg_level != SOL_SOCKET || control->cmsg_type != SCM_RIGHTS) continue;
    int descriptor;
    std::memcpy(&descriptor, CMSG_DATA(control), sizeof(descriptor));
    shared_.reset(descriptor);
  }
  ucred peer{};
  socklen_t size = sizeof(peer);
  if (count == 0 || (count < 0 && errno == ECONNRESET) ||
      getsockopt(socket_.get(), SOL_SOCKET, SO_PEERCRED, &peer, &size) != 0 ||
      peer.uid != geteuid()) {
    throw Error(ErrorKind::kRead,
                "the owner of the pool at " + path_ +
                    " closed the connection: it is ending, or runs as another user",
                {-1, -1, path_, -1}, ECONNRESET);
  }
  if (count != sizeof(welcome_) || welcome_.magic != lending::kMagic) {
    throw Error(
        ErrorKind::kInvalid,
        "what answers at " + path_ +
            " is no torch-mesh share of this version; run the same torch_mesh on both sides");
  }
}

void Loan::map() {
  struct stat about {};
  const bool sound = welcome_.places > 0 && welcome_.places <= welcome_.slots &&
                     welcome_.pool_bytes == welcome_.slots * welcome_.record_bytes &&
                     fstat(shared_.get(), &about) == 0 && about.st_size == welcome_.pool_bytes;
  if (!sound) {
    throw Error(ErrorKind::kInvalid, "what answers at " + path_ + " lends no memory of its pool");
  }
  lent_.assign(static_cast<size_t>(places()), nullptr);
  // All of it at once: the first use of a record would pay for its page faults.
  void* mapped = mmap(nullptr, static_cast<size_t>(welcome_.pool_bytes), PROT_READ,
                      MAP_SHARED | MAP_POPULATE, shared_.get(), 0);
  void* tickets = mmap(nullptr, static_cast<size_t>(places()) * kRecordAlignment, PROT_NONE,
                       MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (mapped != MAP_FAILED) begin_ = static_cast<std::byte*>(mapped);
  if (tickets != MAP_FAILED) tickets_ = static_cast<std::byte*>(tickets);
  if (begin_ == nullptr || tickets_ == nullptr) {
    const int error = errno;
    if (begin_ != nullptr) munmap(begin_, static_cast<size_t>(welcome_.pool_bytes));
    throw Error(ErrorKind::kMemory, "cannot map the pool at " + path_ + ": " + strerror(error), {},
                error);
  }
  madvise(begin_, static_cast<size_t>(welcome_.pool_bytes), MADV_DONTFORK);
}

// Reads of whole records, each a request for a place.
class LentBackend final : public Backend {
 public:
  LentBackend(std::shared_ptr<Loan> loan, const Source& source)
      : loan_(std::move(loan)), wake_up_(eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK)) {
    if (wake_up_.get() < 0) {
      throw Error(ErrorKind::kMemory, std::string("cannot make an event: ") + strerror(errno), {},
                  errno);
    }
    reads_.resize(static_cast<size_t>(loan_->places()));
    failed_.reserve(kUnderWay);
    for (int32_t id = 0; id < source.layers * source.experts; ++id) {
      const Extent& extent = *source.expert(id / source.experts, id % source.experts);
      experts_[{extent.file, extent.offset}] = {0, id / source.experts, id % source.experts};
    }
  }

  void start() override {}

  void submit(const ChunkRead& read) override {
    Request request = experts_.at({read.file, read.offset});
    request.place = static_cast<int32_t>((read.to - loan_->tickets_) / kRecordAlignment);
    loan_->lent_[request.place] = nullptr;
    reads_[request.place] = {read.chunk, read.bytes};
    int error = lost_ ? ECONNRESET : 0;
    if (error == 0) {
      const ssize_t sent =
          send(loan_->socket_.get(), &request, sizeof(request), MSG_DONTWAIT | MSG_NOSIGNAL);
      if (sent != sizeof(request)) error = errno == EPIPE ? ECONNRESET : errno;
    }
    if (error != 0) end(request.place, -error, failed_);
  }

  int32_t wait(std::chrono::microseconds timeout, std::span<ChunkResult> results) override {
    std::vector<ChunkResult>& ended = failed_;
    if (ended.empty()) {
      std::array<pollfd, 2> polled{
          {{wake_up_.get(), POLLIN, 0}, {lost_ ? -1 : loan_->socket_.get(), POLLIN, 0}}};
      const auto milliseconds = static_cast<int>((timeout.count() + 999) / 1000);
      if (poll(polled.data(), polled.size(), milliseconds) > 0) {
        uint64_t count;
        if (polled[0].revents != 0) {
          static_cast<void>(!::read(wake_up_.get(), &count, sizeof(count)));
        }
        if (polled[1].revents != 0) receive(ended);
      }
    }
    const size_t count = std::min(ended.size(), results.size());
    std::copy_n(ended.begin(), count, results.begin());
    ended.erase(ended.begin(), ended.begin() + static_cast<ptrdiff_t>(count));
    return static_cast<int32_t>(count);
  }

  void wake() override {
    const uint64_t one = 1;
    static_cast<void>(!write(wake_up_.get(), &one, sizeof(one)));
  }

  void stop() override {}
  const char* name() const override { return "shared"; }
  int32_t capacity() const override { return kUnderWay; }
  std::vector<std::string> notes() const override { return {}; }

 private:
  struct UnderWay {
    int32_t chunk = -1;  // -1: none
    int64_t bytes = 0;
  };
  struct Where {
    int32_t file;
    int64_t offset;
    bool operator==(const Where&) const = default;
  };
  struct Hash {
    size_t operator()(const Where& where) const {
      return std::hash<int64_t>()(where.offset ^ (int64_t{where.file} << 48));
    }
  };

  void end(int32_t place, int64_t result, std::vector<ChunkResult>& ended) {
    UnderWay& read = reads_[place];
    ended.push_back({std::exchange(read.chunk, -1), result});
  }

  void receive(std::vector<ChunkResult>& ended) {
    while (ended.size() < kUnderWay) {
      Answer answer;
      const ssize_t count =
          recv(loan_->socket_.get(), &answer, sizeof(answer), MSG_DONTWAIT | MSG_TRUNC);
      if (count < 0 && errno == EINTR) continue;
      if (count < 0 && errno == EAGAIN) return;
      if (count != sizeof(answer) || !take(answer, ended)) return lose(ended);
    }
  }

  // False for what no owner says.
  bool take(const Answer& answer, std::vector<ChunkResult>& ended) {
    const Welcome& welcome = loan_->welcome_;
    if (answer.place < 0 || answer.place >= welcome.places || reads_[answer.place].chunk < 0) {
      return false;
    }
    if (answer.error != 0) {
      if (answer.error < 0 || answer.error > 4095) return false;
      end(answer.place, -answer.error, ended);
      return true;
    }
    if (answer.offset < 0 || answer.offset % kRecordAlignment != 0 ||
        answer.offset > welcome.pool_bytes - welcome.record_bytes) {
      return false;
    }
    loan_->lent_[answer.place] = loan_->begin_ + answer.offset;
    end(answer.place, reads_[answer.place].bytes, ended);
    return true;
  }

  // What was lent stays: the owner has gone, or ends loans with the connection only.
  void lose(std::vector<ChunkResult>& ended) {
    lost_ = true;
    for (int32_t place = 0; place < loan_->places(); ++place) {
      if (reads_[place].chunk >= 0) end(place, -ECONNRESET, ended);
    }
  }

  const std::shared_ptr<Loan> loan_;
  const Descriptor wake_up_;
  std::unordered_map<Where, Request, Hash> experts_;
  std::vector<UnderWay> reads_;      // by place
  std::vector<ChunkResult> failed_;  // and others that have ended, to be told by wait()
  bool lost_ = false;
};

class LentMemory final : public SlotMemory {
 public:
  LentMemory(std::shared_ptr<Loan> loan, const Source& source)
      : loan_(std::move(loan)), source_(source) {}

  std::byte* record(int32_t slot, ExpertId) const override { return loan_->lent_[slot]; }
  std::byte* destination(int32_t slot, ExpertId) const override {
    return loan_->tickets_ + slot * kRecordAlignment;
  }
  int32_t node(int32_t) const override { return -1; }
  std::unique_ptr<Reader> open_reader(const ReaderOptions& options, std::span<const MemoryRegion>,
                                      Reader::Done done) const override {
    ReaderOptions whole = options;
    whole.chunk_bytes = loan_->welcome_.record_bytes;
    const auto files = std::make_shared<const FileTable>(source_.files, /*direct=*/false);
    return open_reader_over(std::make_unique<LentBackend>(loan_, source_), whole, files,
                            std::move(done));
  }

 private:
  const std::shared_ptr<Loan> loan_;
  const Source& source_;
};

std::unique_ptr<SlotMemory> make_lent_memory(std::shared_ptr<Loan> loan, const Source& source) {
  return std::make_unique<LentMemory>(std::move(loan), source);
}

}  // namespace torch_mesh
