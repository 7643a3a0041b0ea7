#include "base/freeing.h"

#include <pthread.h>

#include <algorithm>
#include <exception>
#include <string>
#include <utility>

#include "base/error.h"
#include "base/interrupts.h"
#include "base/start_thread.h"

namespace torch_mesh {
namespace {

using Clock = std::chrono::steady_clock;

}  // namespace

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
  Stage seen = stage_;
  auto deadline = Clock::now() + timeout;
  while (stage_ != Stage::kFreed) {
    if (stage_ == Stage::kKept) {
      throw Error(ErrorKind::kMemory,
                  "the system has no thread left to free a closed engine with, so its memory and "
                  "its files are kept until the process ends; raise the limit of processes "
                  "(ulimit -u, or pids.max of the cgroup)");
    }
    const auto now = Clock::now();
    if (std::exchange(seen, stage_) != stage_) deadline = now + timeout;
    if (now >= deadline) {
      const std::string milliseconds = std::to_string(timeout.count());
      throw Error(ErrorKind::kTimeout,
                  seen == Stage::kUsed
                      ? "forwards have not ended in the " + milliseconds +
                            " ms since their engine was closed; the last of them frees it"
                      : "reads of a closed engine take longer than the time-out of " +
                            milliseconds +
                            " ms; what they read into is freed when they end. Is the disk healthy "
                            "and is the file on a local disk?");
    }
    changed_.wait_until(lock, std::min(deadline, now + kInterruptSlice));
    if (stage_ != Stage::kFreed) check_interrupted(runtime, "a closed engine is freed", lock);
  }
  std::thread ended = std::move(thread_);
  lock.unlock();
  // The thread has ended when this returns, but for another call that waits at the same time.
  if (ended.joinable()) ended.join();
}

}  // namespace torch_mesh
