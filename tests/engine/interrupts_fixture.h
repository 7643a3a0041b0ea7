// An interrupt hook that a test defines, with helpers: slots held by a forward, a blocked stream,
// and calls on other threads.
#pragma once

#include <gtest/gtest.h>

#include <chrono>
#include <functional>
#include <future>
#include <latch>
#include <memory>
#include <numeric>
#include <optional>
#include <thread>
#include <utility>
#include <vector>

#include "engine_fixture.h"
#include "gpu/driver.h"

namespace torch_mesh::testing {

// Sets what the hook of hooked_runtime() does, for as long as this object lives.
class Hook {
 public:
  explicit Hook(std::function<bool()> call) { current_ = std::move(call); }
  ~Hook() { current_ = nullptr; }
  Hook(const Hook&) = delete;
  Hook& operator=(const Hook&) = delete;

  static bool ask() { return current_ && current_(); }

 private:
  static inline std::function<bool()> current_;
};

inline Runtime hooked_runtime() {
  Runtime runtime = thread_runtime();
  runtime.interrupted = Hook::ask;
  return runtime;
}

// Runs calls on other threads, to detect a lock that the calling thread holds.
class Beside {
 public:
  Beside() = default;
  ~Beside() {
    for (std::thread& thread : threads_) thread.join();
  }
  Beside(const Beside&) = delete;
  Beside& operator=(const Beside&) = delete;

  // Whether `call` returns within 10 s, while this thread waits for it.
  bool ends(std::function<void()> call) {
    std::packaged_task<void()> task(std::move(call));
    const auto ended = task.get_future();
    threads_.emplace_back(std::move(task));
    return ended.wait_for(std::chrono::seconds(10)) == std::future_status::ready;
  }

 private:
  std::vector<std::thread> threads_;
};

// Pins all slots of a pool (`count`) by a claim of layer 0.
class HeldSlots {
 public:
  HeldSlots(Pool& pool, int32_t count) : experts_(count), entries_(count) {
    std::iota(experts_.begin(), experts_.end(), 0);
    claim_.emplace(pool, 0, experts_, entries_);
    std::vector<ReadyExpert> ready(experts_.size());
    for (int32_t held = 0; held < count;) held += claim_->next(ready);
  }
  void release() { claim_.reset(); }

 private:
  std::vector<int32_t> experts_;
  std::vector<Claim::Entry> entries_;
  std::optional<Claim> claim_;
};

// Blocks the stream's later work until open().
class Gate {
 public:
  Gate(Driver& device, Stream stream) {
    device.launch_host(
        stream,
        [](void* argument) {
          const std::unique_ptr<Shared> opened(static_cast<Shared*>(argument));
          (*opened)->wait();
        },
        new Shared(opened_));
  }
  ~Gate() { open(); }
  Gate(const Gate&) = delete;
  Gate& operator=(const Gate&) = delete;

  void open() {
    if (!std::exchange(is_open_, true)) opened_->count_down();
  }

 private:
  using Shared = std::shared_ptr<std::latch>;  // shared with a callback that may outlive this
  const Shared opened_ = std::make_shared<std::latch>(1);
  bool is_open_ = false;
};

}  // namespace torch_mesh::testing
