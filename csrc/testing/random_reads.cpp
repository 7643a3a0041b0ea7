#include "testing/random_reads.h"

#include "base/error.h"

#ifndef TORCH_MESH_WITH_URING

namespace torch_mesh {

double random_read_seconds(const std::string&, std::span<const int64_t>, int32_t, int32_t,
                           int32_t) {
  throw_invalid("raw reads go through io_uring; install liburing-dev and build again");
}

}  // namespace torch_mesh

#else

#include <fcntl.h>
#include <liburing.h>

#include <algorithm>
#include <cerrno>
#include <chrono>
#include <cstddef>
#include <cstring>
#include <memory>
#include <new>
#include <vector>

#include "base/aligned_memory.h"
#include "base/descriptor.h"

namespace torch_mesh {
namespace {

constexpr int32_t kBlock = 4096;

[[noreturn]] void refuse(const std::string& path, const char* call, int error) {
  throw Error(ErrorKind::kRead, concat(path, ": ", call, ": ", std::strerror(error)), {}, error);
}

class Ring {
 public:
  explicit Ring(int32_t depth) {
    const int error = -io_uring_queue_init(static_cast<unsigned>(depth), &ring_,
                                           IORING_SETUP_SINGLE_ISSUER | IORING_SETUP_DEFER_TASKRUN);
    if (error != 0) throw_invalid("io_uring cannot be used: ", std::strerror(error));
  }
  ~Ring() { io_uring_queue_exit(&ring_); }
  Ring(const Ring&) = delete;
  Ring& operator=(const Ring&) = delete;

  void read(int file, std::byte* to, int32_t bytes, int64_t offset, int32_t buffer) {
    io_uring_sqe* entry = io_uring_get_sqe(&ring_);
    io_uring_prep_read(entry, file, to, static_cast<unsigned>(bytes),
                       static_cast<uint64_t>(offset));
    io_uring_sqe_set_data64(entry, static_cast<uint64_t>(buffer));
  }

  // Appends the buffers of one or more reads that have ended.
  void wait(int32_t bytes, std::vector<int32_t>& ended) {
    io_uring_submit_and_wait(&ring_, 1);  // an error: it is called again
    io_uring_cqe* completion = nullptr;
    while (io_uring_peek_cqe(&ring_, &completion) == 0) {
      const int result = completion->res;
      ended.push_back(static_cast<int32_t>(io_uring_cqe_get_data64(completion)));
      io_uring_cqe_seen(&ring_, completion);
      if (result != bytes) error_ = result < 0 ? -result : ENODATA;
    }
  }

  int error() const { return error_; }  // of a read

 private:
  io_uring ring_{};
  int error_ = 0;
};

}  // namespace

double random_read_seconds(const std::string& path, std::span<const int64_t> offsets, int32_t bytes,
                           int32_t depth, int32_t batch) {
  if (bytes < 1 || depth < 1 || batch < 0) {
    throw_invalid("reads of ", bytes, " bytes, ", depth, " under way, in batches of ", batch,
                  "; there are 1 or more of each, or no batches: 0");
  }
  const Descriptor file(::open(path.c_str(), O_RDONLY | O_DIRECT | O_CLOEXEC));
  if (file.get() < 0) refuse(path, "open", errno);
  const int64_t stride = (int64_t{bytes} + kBlock - 1) / kBlock * kBlock;
  const auto memory = static_cast<size_t>(stride * depth);
  const AlignedMemory buffers = aligned_memory(kBlock, memory);
  if (buffers == nullptr) throw std::bad_alloc();
  std::memset(buffers.get(), 0, memory);  // faulted in
  Ring ring(depth);
  std::vector<int32_t> free;
  for (int32_t buffer = 0; buffer < depth; ++buffer) free.push_back(buffer);

  const auto begin = std::chrono::steady_clock::now();
  const auto count = std::ssize(offsets);
  int64_t next = 0, batch_end = batch > 0 ? std::min<int64_t>(batch, count) : count;
  // Reads in flight are waited for after an error too, since they write to the buffers.
  while (std::ssize(free) < depth || (next < count && ring.error() == 0)) {
    for (; next < batch_end && !free.empty() && ring.error() == 0; ++next) {
      const int32_t buffer = free.back();
      free.pop_back();
      ring.read(file.get(), buffers.get() + buffer * stride, bytes, offsets[next], buffer);
    }
    ring.wait(bytes, free);
    if (next == batch_end && std::ssize(free) == depth) {
      batch_end = std::min<int64_t>(next + batch, count);
    }
  }
  const auto end = std::chrono::steady_clock::now();
  if (ring.error() != 0) refuse(path, "read", ring.error());
  return std::chrono::duration<double>(end - begin).count();
}

}  // namespace torch_mesh

#endif  // TORCH_MESH_WITH_URING
