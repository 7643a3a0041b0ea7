#include "base/freeing.h"

#include <pthread.h>

#include <exception>
#include <string>
#include <utility>

#include "base/error.h"
#include "base/interrupts.h"
#include "base/start_thread.h"

namespace torch_mesh {

Freeing::~Freeing() {
  if (thread_.joinable()) thread_.detach();  // no thread waited for it, or it is this one
}

void Freeing::begin(void* last, void (*free)(void*)) noexcept {
  if (owner_.forked()) return;
  try {
    const std::lock_guard lock(mutex_);
    stage_ = Stage::kFreeing;
    changed_.notify_all();
    thread_ = start_thread("the thread that frees", [self = shared_from_this(), last, free] {
      pthread_setname_np(pthread_self(), "mesh-free");
      free(last);
      self->end(Stage::kFreed);
    });
    return;
  } catch (const std::exception&) {  // no thread, or no memory for one
  }
  end(Stage::kKept);
}

void Freeing::end(Stage stage) {
  const std::lock_guard lock(mutex_);
  stage_ = stage;
  changed_.notify_all();
}

void Freeing::wait(std::chrono::milliseconds timeout, const Runtime& runtime) {
  owner_.check("what this call waits for");
  std::unique_lock lock(mutex_);
  const auto ends = [&](Stage stage) {
    return wait_interruptibly(lock, changed_, std::chrono::steady_clock::now() + timeout, runtime,
                              "a closed engine is freed", [&] { return stage_ > stage; });
  };
  const std::string milliseconds = std::to_string(timeout.count());
  if (!ends(Stage::kUsed)) {
    throw Error(ErrorKind::kTimeout,
                "forwards have not ended in the " + milliseconds +
                    " ms since their engine was closed; the last of them frees it");
  }
  if (!ends(Stage::kFreeing)) {
    throw Error(ErrorKind::kTimeout,
                "reads of a closed engine take longer than the time-out of " + milliseconds +
                    " ms; what they read into is freed when they end. Is the disk healthy and is "
                    "the file on a local disk?");
  }
  if (stage_ == Stage::kKept) {
    throw Error(ErrorKind::kMemory,
                "the system has no thread left to free a closed engine with, so its memory and "
                "its files are kept until the process ends; raise the limit of processes "
                "(ulimit -u, or pids.max of the cgroup)");
  }
  std::thread ended = std::move(thread_);
  lock.unlock();
  // The thread has ended when this returns, but for another call that waits at the same time.
  if (ended.joinable()) ended.join();
}

}  // namespace torch_mesh
