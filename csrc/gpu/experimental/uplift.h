// Experimental: streams a prompt's experts to the device. Outside of this folder only
// bindings/device.cpp needs it.
//
// A prompt computes experts on the device that have no slot there. Their records are copied, in a
// separate stream, to two buffers in turn: copies to one run in parallel with products from the
// other.
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
  // `stream`, which may still use the former contents of that memory: the first copies wait for it.
  Uplift(std::shared_ptr<Driver> driver, std::weak_ptr<Engine> engine,
         std::array<DeviceAddress, 2> buffers, int32_t batch, Stream stream);
  ~Uplift();
  Uplift(const Uplift&) = delete;
  Uplift& operator=(const Uplift&) = delete;

  int32_t batch() const { return batch_; }
  int64_t bytes_up() const { return bytes_up_.load(std::memory_order_relaxed); }

  // A prompt's use of the buffers, by one thread at a time. It ends when the prompt's last product
  // is enqueued in `compute`. A signal handler may run another prompt within it, on the same
  // thread. Each of the two then has one buffer, and a third prompt none.
  class Turn {
   public:
    // Waits for the turns of other threads. Throws Error(kInterrupted).
    Turn(Uplift& uplift, Stream compute);
    ~Turn();  // on any thread
    Turn(const Turn&) = delete;
    Turn& operator=(const Turn&) = delete;

    // Reads up to batch() experts of a layer, cold ones from disk, and copies each to the device as
    // it arrives. Work enqueued in `compute` from now to the next call finds the i-th one at index
    // i of the buffer whose number is returned. Waits for the disk, and for copies of two calls
    // before. Throws Error(kInvalid) if turns around this one have both buffers.
    int32_t bring(int32_t layer, std::span<const int32_t> experts);

   private:
    Uplift& uplift_;
    Stream compute_;
    int32_t last_ = -1;  // the buffer that `compute` reads
  };

 private:
  // Device memory for a batch of records, and its events.
  struct Side {
    Side(Driver& driver, DeviceAddress records) : records(records), copied(driver), used(driver) {}
    DeviceAddress records;
    OwnedEvent copied;   // all records have been copied from staging
    OwnedEvent used;     // products have read the records
    bool taken = false;  // by a turn: being filled, or not all its products are enqueued
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

  // Held only briefly, since the interrupt hook may begin a turn within one.
  std::mutex mutex_;
  std::condition_variable turn_ended_;
  std::thread::id owner_;  // of the turns under way
  int32_t turns_ = 0;
  int32_t next_ = 0;  // the side that comes next, unless it is taken
  std::atomic<int64_t> bytes_up_ = 0;
};

}  // namespace torch_mesh
