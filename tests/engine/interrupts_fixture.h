// An interrupt hook that does what a test says, and what it may need: slots that a forward holds, a
// stream that stands still, and other threads.
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

// What the hook of hooked_runtime() does, for as long as this lives.
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

// Calls on other threads, which a lock that the calling thread holds would keep from ending.
class Beside {
 public:
  Beside() = default;
  ~Beside() {
    for (std::thread& thread : threads_) thread.join();
  }
  Beside(const Beside&) = delete;
  Beside& operator=(const Beside&) = delete;

  // Whether `call` ends while this thread waits for it.
  bool ends(std::function<void()> call) {
    std::packaged_task<void()> task(std::move(call));
    const auto ended = task.get_future();
    threads_.emplace_back(std::move(task));
    return ended.wait_for(std::chrono::seconds(10)) == std::future_status::ready;
  }

 private:
  std::vector<std::thread> threads_;
};

// As many slots as a pool has, all of them, held by a forward of layer 0.
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

// A stream does nothing that it is given from here on until this opens.
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
  using Shared = std::shared_ptr<std::latch>;  // with the stream, which leaves it later
  const Shared opened_ = std::make_shared<std::latch>(1);
  bool is_open_ = false;
};

}  // namespace torch_mesh::testing
