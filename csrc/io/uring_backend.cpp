// Reads by io_uring. The ring belongs to the I/O thread alone: it is made, fed and taken down
// there.
#include "io/backend.h"

#ifndef TORCH_MESH_WITH_URING

#include "base/error.h"

namespace torch_mesh {

std::string uring_unavailable() {
  return "built without liburing; install liburing-dev and build again";
}

std::unique_ptr<Backend> make_uring_backend(std::shared_ptr<const FileTable>,
                                            std::span<const MemoryRegion>, int32_t) {
  throw_invalid("io_uring cannot be used: ", uring_unavailable());
}

}  // namespace torch_mesh

#else

#include <liburing.h>
#include <poll.h>
#include <sys/uio.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <cstring>
#include <new>
#include <utility>

#include "base/descriptor.h"
#include "base/error.h"

namespace torch_mesh {

namespace {

// The kernel takes no more in one iovec, and no more iovecs than this.
constexpr size_t kMaxBuffer = size_t{1} << 30;
constexpr size_t kMaxBuffers = 1 << 14;
// The user data of the poll that wakes the ring; chunks are 0 and up.
constexpr uint64_t kWakeUp = ~uint64_t{0};
// The pause before a ring that answered with an unexpected error is asked again.
constexpr std::chrono::microseconds kCoolDown{1000};
// The time limit of a request that does nothing, which returns within microseconds.
constexpr std::chrono::seconds kMaxNop{5};

constexpr const char* kSetup = "io_uring_setup";

// Why no ring works here: the call that the kernel refused, and its errno.
struct Refusal {
  std::string call;
  int error = 0;

  explicit operator bool() const { return error != 0; }
};

std::string unsupported_reason(const Refusal& refusal) {
  const std::string reason = std::strerror(refusal.error);
  switch (refusal.error) {
    case EPERM:
    case EACCES:
      return refusal.call + " is forbidden (" + reason +
             "): by the seccomp profile of the container, or by sysctl kernel.io_uring_disabled";
    case ENOSYS:
      return "this kernel has no io_uring (" + reason + " from " + refusal.call + ")";
    case ENOMEM:
      if (refusal.call != kSetup) break;  // of these calls only setup counts against memlock
      return "no memory for a ring (" + reason + "): raise the memlock limit (ulimit -l)";
    case EMFILE:
    case ENFILE:
      return "no file descriptor left for a ring (" + reason + "): raise ulimit -n";
    default:
      break;
  }
  return refusal.call + " failed (" + reason + ")";
}

// Errors that may pass: no memory for requests, or completions must be reaped first.
bool may_pass(int error) { return error == EAGAIN || error == EBUSY || error == ENOMEM; }

// Passes a request that does nothing; returns 0 or a positive errno. A seccomp profile may allow
// making a ring and forbid submitting to it: reads would never end.
int submit_nop(io_uring* ring) {
  io_uring_prep_nop(io_uring_get_sqe(ring));
  const auto deadline = std::chrono::steady_clock::now() + kMaxNop;
  io_uring_cqe* completion = nullptr;
  int last = ETIMEDOUT;
  while (std::chrono::steady_clock::now() < deadline) {
    __kernel_timespec span{.tv_sec = 0, .tv_nsec = 100'000'000};
    const int status = io_uring_submit_and_wait_timeout(ring, &completion, 1, &span, nullptr);
    if (status >= 0 && completion != nullptr) {
      const int result = completion->res;
      io_uring_cqe_seen(ring, completion);
      return -result;
    }
    if (status >= 0 || status == -EINTR || status == -ETIME) continue;
    last = -status;
    if (!may_pass(last)) break;
    ::usleep(static_cast<useconds_t>(kCoolDown.count()));
  }
  return last;
}

// Tries each set of flags on the kernel itself: versions tell little, because distributions
// backport.
Refusal make_ring(unsigned entries, io_uring* ring) {
  constexpr std::array<unsigned, 3> kFlags = {
      IORING_SETUP_SINGLE_ISSUER | IORING_SETUP_DEFER_TASKRUN, IORING_SETUP_COOP_TASKRUN, 0};
  int error = 0;
  for (const unsigned flags : kFlags) {
    error = -io_uring_queue_init(entries, ring, flags);
    if (error != EINVAL) break;  // the kernel knows these flags
  }
  if (error != 0) return {kSetup, error};
  // Without this feature a wait with a time-out would be a request of its own.
  if ((ring->features & IORING_FEAT_EXT_ARG) == 0) {
    io_uring_queue_exit(ring);
    return {kSetup, ENOSYS};
  }
  if (const int refused = submit_nop(ring); refused != 0) {
    io_uring_queue_exit(ring);
    return {"io_uring_enter", refused};
  }
  return {};
}

class UringBackend final : public Backend {
 public:
  UringBackend(std::shared_ptr<const FileTable> files, std::span<const MemoryRegion> buffers,
               int32_t depth)
      : files_(std::move(files)), depth_(depth) {
    for (const MemoryRegion& buffer : buffers) add_buffer(buffer);
    std::sort(buffers_.begin(), buffers_.end(),
              [](const iovec& left, const iovec& right) { return left.iov_base < right.iov_base; });
    registrations_.assign(buffers_.size(), Registration::kUsed);
    if (wake_up_.get() < 0) {
      throw Error(ErrorKind::kInvalid,
                  concat("io_uring cannot be used: no eventfd: ", std::strerror(errno)), {}, errno);
    }
  }

  ~UringBackend() override { stop(); }

  void start() override {
    // One entry more for the poll: at most depth_ + 1 completions exist, so neither queue
    // overflows.
    if (const Refusal refusal = make_ring(static_cast<unsigned>(depth_) + 1, &ring_)) {
      throw Error(ErrorKind::kInvalid,
                  concat("io_uring cannot be used: ", unsupported_reason(refusal)), {},
                  refusal.error);
    }
    made_ = true;
    if ((ring_.flags & IORING_SETUP_DEFER_TASKRUN) == 0) {
      note("this kernel's io_uring does not know DEFER_TASKRUN, so completions cost more CPU time");
    }
    register_files();
    register_buffers();
    arm_wake_up();
  }

  void submit(const ChunkRead& read) override {
    io_uring_sqe* entry = io_uring_get_sqe(&ring_);
    const int file = files_registered_ ? read.descriptor : files_->descriptors()[read.descriptor];
    const int buffer = buffer_of(read);
    const unsigned bytes = static_cast<unsigned>(read.bytes);
    if (buffer >= 0) {
      io_uring_prep_read_fixed(entry, file, read.to, bytes, read.offset, buffer);
    } else {
      io_uring_prep_read(entry, file, read.to, bytes, read.offset);
    }
    if (files_registered_) entry->flags |= IOSQE_FIXED_FILE;
    io_uring_sqe_set_data64(entry, static_cast<uint64_t>(read.chunk));
  }

  int32_t wait(std::chrono::microseconds timeout, std::span<ChunkResult> results) override {
    io_uring_cqe* first = nullptr;
    __kernel_timespec span{.tv_sec = timeout.count() / 1'000'000,
                           .tv_nsec = timeout.count() % 1'000'000 * 1000};
    const int status = io_uring_submit_and_wait_timeout(&ring_, &first, 1, &span, nullptr);
    recover(status < 0 ? -status : 0);
    return reap(results);
  }

  void change_buffer(const MemoryRegion& region, bool attached) override {
    for (size_t index = 0; buffers_registered_ && index < buffers_.size(); ++index) {
      const auto* data = static_cast<const std::byte*>(buffers_[index].iov_base);
      const bool inside = data >= region.data && data < region.data + region.bytes;
      if (inside && attached != (registrations_[index] == Registration::kUsed)) {
        change(index, attached);
      } else if (!inside && registrations_[index] == Registration::kStuck) {
        change(index, false);
      }
    }
  }

  void wake() override { wake_up_.wake(); }

  void stop() override {
    if (!std::exchange(made_, false)) return;
    // Unregistered here, since io_uring_queue_exit() gives the pages back only some time later.
    if (buffers_registered_) io_uring_unregister_buffers(&ring_);
    if (files_registered_) io_uring_unregister_files(&ring_);
    io_uring_queue_exit(&ring_);
  }

  const char* name() const override { return "uring"; }
  int32_t capacity() const override { return depth_; }
  std::vector<std::string> notes() const override { return notes_; }

 private:
  // The state of one buffer, while buffers_registered_.
  enum class Registration : uint8_t {
    kUsed,
    kStuck,  // the ring keeps pages that the pool has freed, and not the present ones
    kNone,
  };

  void add_buffer(MemoryRegion rest) {
    while (rest.bytes > 0) {
      const size_t bytes = std::min(rest.bytes, kMaxBuffer);
      buffers_.push_back({.iov_base = rest.data, .iov_len = bytes});
      rest = {.data = rest.data + bytes, .bytes = rest.bytes - bytes};
    }
  }

  void register_files() {
    const std::span<const int> files = files_->descriptors();
    const int error =
        -io_uring_register_files(&ring_, files.data(), static_cast<unsigned>(files.size()));
    files_registered_ = error == 0;
    if (files_registered_) return;
    note("io_uring did not register ", files.size(), " files (", std::strerror(error),
         "); naming them in every read");
  }

  void register_buffers() {
    if (buffers_.empty()) return;
    size_t bytes = 0;
    for (const iovec& buffer : buffers_) bytes += buffer.iov_len;
    const int error = buffers_.size() > kMaxBuffers
                          ? E2BIG
                          : -io_uring_register_buffers(&ring_, buffers_.data(),
                                                       static_cast<unsigned>(buffers_.size()));
    buffers_registered_ = error == 0;
    if (buffers_registered_) return;
    // A kernel returns either when the limit of locked memory is too low.
    const bool locked = error == ENOMEM || error == EPERM;
    note("io_uring did not register ", bytes, " bytes of buffers (", std::strerror(error),
         "), so reads cost more CPU time",
         locked ? "; raise the memlock limit (ulimit -l, LimitMEMLOCK) above that size" : "");
  }

  // A buffer keeps its index, which is empty while the buffer is not registered.
  void change(size_t index, bool attached) {
    const iovec buffer = attached ? buffers_[index] : iovec{.iov_base = nullptr, .iov_len = 0};
    // Returns how many buffers it changed. Without tags it does what IORING_REGISTER_BUFFERS_UPDATE
    // does.
    const __u64 no_tag = 0;
    const int changed = io_uring_register_buffers_update_tag(&ring_, static_cast<unsigned>(index),
                                                             &buffer, &no_tag, 1);
    if (changed == 1) {
      registrations_[index] = attached ? Registration::kUsed : Registration::kNone;
    } else if (attached) {  // reads go on as into memory that is not registered
      note("io_uring did not register ", buffers_[index].iov_len,
           " bytes that have come back to the pool (", strerror(-changed),
           "), so reads into them cost more CPU time");
    } else if (changed == -EINVAL) {  // the call is unknown
      unregister_all(changed);
    } else {  // such as ENOMEM; tried again with the next change
      registrations_[index] = Registration::kStuck;
      note("io_uring did not unregister ", buffers_[index].iov_len,
           " bytes that the pool has freed (", strerror(-changed), "), so they stay locked");
    }
  }

  // For kernels that cannot unregister one buffer (before 5.13): no page that the pool has freed
  // may stay pinned.
  void unregister_all(int error) {
    // Prepared reads name their buffer by index, so they are submitted before the indices go.
    while (io_uring_sq_ready(&ring_) > 0) {
      if (io_uring_submit(&ring_) < 0) ::usleep(static_cast<useconds_t>(kCoolDown.count()));
    }
    io_uring_unregister_buffers(&ring_);
    buffers_registered_ = false;
    note("io_uring cannot unregister one buffer (", strerror(-error),
         "), so all were when the pool shrank, and reads cost more CPU time");
  }

  // A note is lost if there is no memory for it, so that the operation it describes is not
  // interrupted.
  template <typename... Parts>
  void note(const Parts&... parts) {
    try {
      const std::string words = concat(parts...);
      if (std::ranges::find(notes_, words) == notes_.end()) notes_.push_back(words);
    } catch (const std::bad_alloc&) {
    }
  }

  // The registered buffer that holds all of the chunk; -1 when there is none.
  int buffer_of(const ChunkRead& read) const {
    if (!buffers_registered_) return -1;
    const auto after = std::upper_bound(
        buffers_.begin(), buffers_.end(), read.to, [](const std::byte* to, const iovec& buffer) {
          return to < static_cast<const std::byte*>(buffer.iov_base);
        });
    if (after == buffers_.begin()) return -1;
    const iovec& buffer = *std::prev(after);
    const std::byte* end = static_cast<const std::byte*>(buffer.iov_base) + buffer.iov_len;
    const bool inside = read.to < end && read.bytes <= end - read.to;
    const auto index = static_cast<int>(std::prev(after) - buffers_.begin());
    return inside && registrations_[index] == Registration::kUsed ? index : -1;
  }

  // A poll and not a read, so that the kernel holds no buffer of ours when the ring is taken down.
  void arm_wake_up() {
    io_uring_sqe* entry = io_uring_get_sqe(&ring_);
    io_uring_prep_poll_add(entry, wake_up_.get(), POLLIN);
    io_uring_sqe_set_data64(entry, kWakeUp);
  }

  // Entries that were not submitted stay in the queue for the next call. Reads under way may not be
  // dropped, whatever the error, because their buffers would be reused. So the ring is asked again
  // after a pause, and the caller's own time-outs limit the damage.
  void recover(int error) {
    if (error == 0 || error == ETIME || error == EINTR) return;
    if (io_uring_cq_ready(&ring_) == 0) ::usleep(static_cast<useconds_t>(kCoolDown.count()));
  }

  int32_t reap(std::span<ChunkResult> results) {
    int32_t count = 0;
    io_uring_cqe* completion = nullptr;
    while (count < std::ssize(results) && io_uring_peek_cqe(&ring_, &completion) == 0) {
      const uint64_t data = io_uring_cqe_get_data64(completion);
      const int result = completion->res;
      io_uring_cqe_seen(&ring_, completion);
      if (data == kWakeUp) {
        wake_up_.clear();
        arm_wake_up();
      } else {
        results[count++] = {.chunk = static_cast<int32_t>(data), .result = result};
      }
    }
    return count;
  }

  const std::shared_ptr<const FileTable> files_;
  const int32_t depth_;
  std::vector<iovec> buffers_;               // by address
  std::vector<Registration> registrations_;  // by buffer
  const WakeUp wake_up_;
  io_uring ring_{};
  bool made_ = false;  // the ring
  bool files_registered_ = false;
  bool buffers_registered_ = false;
  std::vector<std::string> notes_;
};

}  // namespace

std::string uring_unavailable() {
  io_uring ring;
  if (const Refusal refusal = make_ring(2, &ring)) return unsupported_reason(refusal);
  io_uring_queue_exit(&ring);
  return "";
}

std::unique_ptr<Backend> make_uring_backend(std::shared_ptr<const FileTable> files,
                                            std::span<const MemoryRegion> buffers, int32_t depth) {
  return std::make_unique<UringBackend>(std::move(files), buffers, depth);
}

}  // namespace torch_mesh

#endif  // TORCH_MESH_WITH_URING
