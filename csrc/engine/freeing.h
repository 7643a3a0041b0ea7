// The end of an engine that several threads use.
//
// What the disk has been asked for it may still write, however long that takes, so nothing of an
// engine goes before its last read is back. Whoever lets go of the engine last cannot wait for
// that: it may be any thread, with any lock, at the end of the process. A thread of its own does,
// and who wants to know can be interrupted, and gives up after a while. Where reads never end
// neither does that thread, and the memory is kept until the process goes.
#pragma once

#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <memory>
#include <mutex>
#include <thread>

#include "base/owner_process.h"
#include "base/runtime.h"
#include "engine/engine.h"

namespace torch_mesh {

class Freeing : public std::enable_shared_from_this<Freeing> {
 public:
  ~Freeing();

  // Once, by the last user. Waits for nothing: where the system has no thread left, the engine is
  // never freed. In a child of the process that opened the engine it is left alone.
  void begin(std::unique_ptr<Engine> engine) noexcept;

  // Until the last user has gone and all is freed. Throws Error(kTimeout) when users take longer
  // than `timeout`, or reads after them, and Error(kInterrupted); either way what was begun goes
  // on. Throws Error(kMemory) where nothing will be freed.
  void wait(std::chrono::milliseconds timeout, const Runtime& runtime);

 private:
  enum class Stage : uint8_t { kUsed, kFreeing, kFreed, kKept };

  void end(Stage stage);

  const OwnerProcess owner_;
  std::mutex mutex_;
  std::condition_variable changed_;
  Stage stage_ = Stage::kUsed;
  std::thread thread_;
};

}  // namespace torch_mesh
