// A backend of threads that each read one chunk by pread: for containers that forbid io_uring and
// machines without it.
#include <pthread.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <condition_variable>
#include <mutex>
#include <thread>
#include <utility>

#include "base/start_thread.h"
#include "io/backend.h"

namespace torch_mesh {

namespace {

class ThreadsBackend final : public Backend {
 public:
  // Takes no more chunks than there are threads: others would queue here, where demand could not
  // overtake prefetch.
  ThreadsBackend(std::shared_ptr<const FileTable> files, int32_t threads, int32_t depth)
      : files_(std::move(files)), capacity_(std::min(threads, depth)) {
    waiting_.reserve(static_cast<size_t>(capacity_));
    completed_.reserve(static_cast<size_t>(capacity_));
  }
  ~ThreadsBackend() override { stop(); }

  void start() override {
    threads_.reserve(static_cast<size_t>(capacity_));
    for (int32_t thread = 0; thread < capacity_; ++thread) {
      threads_.push_back(start_thread("a reader thread", [this] { work(); }));
    }
  }

  void submit(const ChunkRead& read) override {
    {
      const std::lock_guard lock(mutex_);
      waiting_.push_back(read);
    }
    work_waits_.notify_one();
  }

  int32_t wait(std::chrono::microseconds timeout, std::span<ChunkResult> results) override {
    std::unique_lock lock(mutex_);
    something_happened_.wait_for(lock, timeout, [this] { return woken_ || !completed_.empty(); });
    woken_ = false;
    return take(completed_, results);
  }

  void wake() override {
    {
      const std::lock_guard lock(mutex_);
      woken_ = true;
    }
    something_happened_.notify_one();
  }

  void stop() override {
    {
      const std::lock_guard lock(mutex_);
      stopping_ = true;
    }
    work_waits_.notify_all();
    for (std::thread& thread : threads_) thread.join();
    threads_.clear();
  }

  const char* name() const override { return "threads"; }
  int32_t capacity() const override { return capacity_; }

 private:
  void work() {
    pthread_setname_np(pthread_self(), "mesh-read");
    std::unique_lock lock(mutex_);
    for (;;) {
      work_waits_.wait(lock, [this] { return stopping_ || !waiting_.empty(); });
      if (waiting_.empty()) return;
      const ChunkRead read = waiting_.back();
      waiting_.pop_back();
      lock.unlock();
      const ssize_t got =
          ::pread(files_->descriptors()[read.descriptor], read.to, read.bytes, read.offset);
      const int64_t result = got >= 0 ? int64_t{got} : -int64_t{errno};
      lock.lock();
      completed_.push_back({.chunk = read.chunk, .result = result});
      something_happened_.notify_one();
    }
  }

  const std::shared_ptr<const FileTable> files_;
  const int32_t capacity_;

  std::mutex mutex_;
  std::condition_variable work_waits_;
  std::condition_variable something_happened_;
  std::vector<ChunkRead> waiting_;  // in no order: a thread is free for each
  std::vector<ChunkResult> completed_;
  bool woken_ = false;
  bool stopping_ = false;

  std::vector<std::thread> threads_;
};

}  // namespace

std::unique_ptr<Backend> make_threads_backend(std::shared_ptr<const FileTable> files,
                                              int32_t threads, int32_t depth) {
  return std::make_unique<ThreadsBackend>(std::move(files), threads, depth);
}

}  // namespace torch_mesh
