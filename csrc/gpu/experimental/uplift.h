// Experimental: prompts that borrow the device. Nothing outside this folder needs it but
// bindings/device.cpp.
//
// Lends a prompt the device for experts that have no slot there: their records come up a stream of
// their own into two buffers that take turns, the next one's copies beside the products of the
// last.
#pragma once

#include <array>
#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <memory>
#include <mutex>
#include <span>
#include <thread>

#include "engine/engine.h"
#include "gpu/driver.h"

namespace torch_mesh {

class Uplift {
 public:
  // Each of `buffers` is device memory for `batch` records. They were allocated in the order of
  // `stream`, which may still use what that memory held before: the first copies wait for it.
  Uplift(std::shared_ptr<Driver> driver, std::weak_ptr<Engine> engine,
         std::array<DeviceAddress, 2> buffers, int32_t batch, Stream stream);
  ~Uplift();
  Uplift(const Uplift&) = delete;
  Uplift& operator=(const Uplift&) = delete;

  int32_t batch() const { return batch_; }
  int64_t bytes_up() const { return bytes_up_.load(std::memory_order_relaxed); }

  // A prompt's use of the buffers, one thread at a time: ends when `compute` has been given its
  // last product. A signal handler may run another prompt within it, on the same thread: each turn
  // then has one buffer for itself, and a third one none.
  class Turn {
   public:
    // Waits for the turns of other threads. Throws Error(kInterrupted).
    Turn(Uplift& uplift, Stream compute);
    ~Turn();  // on any thread
    Turn(const Turn&) = delete;
    Turn& operator=(const Turn&) = delete;

    // Reads up to batch() experts of a layer, cold ones from disk, and sends each up as it arrives.
    // What `compute` is given from here to the next call finds the i-th in place i of the buffer
    // whose number is returned. Waits for the disk, and for copies of two calls ago. Throws
    // Error(kInvalid) where turns around this one have both buffers.
    int32_t bring(int32_t layer, std::span<const int32_t> experts);

   private:
    Uplift& uplift_;
    Stream compute_;
    int32_t last_ = -1;  // the buffer that `compute` reads
  };

 private:
  // Device memory for a batch of records, and what it waits for.
  struct Side {
    Side(Driver& driver, DeviceAddress records) : records(records), copied(driver), used(driver) {}
    DeviceAddress records;
    OwnedEvent copied;   // the last record, out of staging
    OwnedEvent used;     // by products
    bool taken = false;  // by a turn: it is being filled, or its products are not all given yet
  };

  void begin_turn();
  void end_turn();
  int32_t take_side();
  void give_back(int32_t side);

  std::shared_ptr<Driver> driver_;
  std::weak_ptr<Engine> engine_;
  const Runtime runtime_;
  int32_t batch_;
  int64_t record_bytes_;
  OwnedStream copy_;
  std::array<Side, 2> sides_;
  PinnedMemory staging_;  // as both buffers

  // Never held for longer than a look: the interrupt hook may begin a turn within one.
  std::mutex mutex_;
  std::condition_variable turn_ended_;
  std::thread::id owner_;  // of the turns under way
  int32_t turns_ = 0;
  int32_t next_ = 0;  // the side that comes next, unless it is taken
  std::atomic<int64_t> bytes_up_ = 0;
};

}  // namespace torch_mesh
