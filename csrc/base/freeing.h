// Frees an object that reads files and that several threads use: an engine, or tables.
//
// The disk may still write into its buffers, however long that takes, so nothing is freed before
// the last read has returned. The last user cannot wait for that: it may be any thread, with any
// lock held, at the end of the process. So a separate thread waits and frees. A caller of wait()
// can be interrupted, and waits for a limited time. If a read never ends, neither does that thread,
// and the memory is kept until the process ends.
#pragma once

#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <memory>
#include <mutex>
#include <thread>

#include "base/owner_process.h"
#include "base/runtime.h"

namespace torch_mesh {

class Freeing : public std::enable_shared_from_this<Freeing> {
 public:
  ~Freeing();

  // Called once, by the last user; returns at once. If the system has no thread left, `last` is
  // never freed. In a child of the process that opened it, `last` is leaked.
  template <typename T>
  void begin(std::unique_ptr<T> last) noexcept {
    begin(last.release(), [](void* object) { delete static_cast<T*>(object); });
  }

  // Waits until the last user has gone and all is freed. Throws Error(kTimeout) when users take
  // longer than `timeout`, or the reads after them, and Error(kInterrupted); freeing goes on either
  // way. Throws Error(kMemory) if nothing will be freed, and Error(kForked) in a child.
  void wait(std::chrono::milliseconds timeout, const Runtime& runtime);

 private:
  enum class Stage : uint8_t { kUsed, kFreeing, kFreed, kKept };  // in this order

  void begin(void* last, void (*free)(void*)) noexcept;
  void end(Stage stage);

  const OwnerProcess owner_;
  std::mutex mutex_;
  std::condition_variable changed_;
  Stage stage_ = Stage::kUsed;
  std::thread thread_;
};

}  // namespace torch_mesh
