// Shared by pool.cpp and claim.cpp.
#pragma once

#include <chrono>
#include <condition_variable>
#include <memory>
#include <mutex>
#include <span>
#include <thread>
#include <vector>

#include "base/owner_process.h"
#include "residency/core/core.h"
#include "residency/loader.h"
#include "residency/memory/slot_memory.h"
#include "residency/pool.h"

namespace torch_mesh {

// Adds the time from its construction to its destruction.
class Stopwatch {
 public:
  explicit Stopwatch(int64_t& nanoseconds) : nanoseconds_(nanoseconds) {}
  ~Stopwatch() { nanoseconds_ += std::chrono::nanoseconds(Clock::now() - begin_).count(); }
  Stopwatch(const Stopwatch&) = delete;
  Stopwatch& operator=(const Stopwatch&) = delete;

 private:
  using Clock = std::chrono::steady_clock;
  int64_t& nanoseconds_;
  const Clock::time_point begin_ = Clock::now();
};

struct Pool::Impl {
  using Lock = std::unique_lock<std::mutex>;

  Impl(const PoolOptions& options, const Runtime& runtime, Source source, PackRecord pack);

  bool memory_only() const { return loader == nullptr; }
  void check_process() const { owner.check("this pool"); }
  void check_experts(int32_t layer, std::span<const int32_t> indices) const;
  [[noreturn]] static void throw_closed();
  void check_open() const {  // with the lock
    if (core.closed()) throw_closed();
  }
  LayerStats& stats_of(int32_t layer, Phase phase) { return core.statistics().of(layer, phase); }
  Lock locked() const {  // Error(kForked) in a child
    check_process();
    return Lock(mutex);
  }

  // The core for reading, with the lock held until the end of the expression.
  class LockedCore {
   public:
    explicit LockedCore(const Impl& impl) : lock_(impl.locked()), core_(impl.core) {}
    const Core* operator->() const { return &core_; }

   private:
    const Lock lock_;
    const Core& core_;
  };
  LockedCore locked_core() const { return LockedCore(*this); }

  // One call of the pool: holds the lock for an event of the core, and carries out its effects at
  // the end.
  class Event {
   public:
    explicit Event(Impl& impl) : impl_(impl), lock_(impl.locked()) {}
    ~Event() {
      impl_.carry_out();
      impl_.flush(lock_);
    }
    Event(const Event&) = delete;
    Event& operator=(const Event&) = delete;

   private:
    Impl& impl_;
    Lock lock_;
  };

  using HintOfCore = void (Core::*)(int32_t, std::span<const int32_t>, Phase);
  // Returns false after close().
  bool hint(HintOfCore hint, int32_t layer, std::span<const int32_t> experts, Phase phase);

  // The last forward that has ended, of any layer.
  struct LastForward {
    std::thread::id thread;
    int32_t layer = 0;
    Phase phase = Phase::kNone;
    std::chrono::steady_clock::time_point end;
  };

  // Called with the lock held, after every event of the core.
  void carry_out();
  // Releases the lock, then begins the queued reads: the thread that this wakes may take this very
  // processor core.
  void flush(Lock& lock);

  // How long a wait may last, and when to ask the interrupt hook next.
  struct Patience {
    std::chrono::steady_clock::time_point deadline;
    std::chrono::steady_clock::time_point ask;
  };
  Patience patience() const;
  // Waits on `condition` for 100 ms at most, asking the interrupt hook as often. False once the
  // deadline has passed. `queued`: the claim that waits for slots, if one does.
  bool wait(Lock& lock, std::condition_variable& condition, Patience& patience,
            ClaimState* queued = nullptr) const;

  // Attaches one segment that has to come back, without the lock while the kernel clears its pages.
  // False if there is none to attach now.
  bool grow(Lock& lock);
  int64_t present_bytes() const;

  const OwnerProcess owner;
  const PoolOptions options;
  const Runtime runtime;
  const Source source;
  const std::shared_ptr<SlotMemory> memory;

  mutable std::mutex mutex;
  Core core;
  std::condition_variable landed;  // see Effects, also for the others
  std::condition_variable freed;
  std::condition_variable idle;
  std::condition_variable resized;                // or the pool is closed
  mutable std::condition_variable forward_ended;  // or the pool is closed
  mutable int32_t forward_waiters = 0;
  std::function<void()> progress;
  LastForward last_forward;
  Timeline timeline;
  bool queued = false;           // there are queued reads since the last flush()
  std::vector<int64_t> leaving;  // segments

  std::unique_ptr<Loader> loader;  // last: its threads use all of the above; null: memory only

 private:
  void on_ended(Loader::Ended ended);
  bool detach(int64_t segment);
};

}  // namespace torch_mesh
