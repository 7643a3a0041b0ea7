// Lends a prompt the device for experts that have no slot there: their records come up a stream of
// their own into two buffers that take turns, the next one's copies beside the products of the
// last.
#pragma once

#include <array>
#include <atomic>
#include <cstdint>
#include <memory>
#include <mutex>
#include <span>

#include "engine/engine.h"
#include "gpu/driver.h"

namespace torch_mesh {

class Uplift {
 public:
  // Each of `buffers` is device memory for `batch` records.
  Uplift(std::shared_ptr<Driver> driver, std::weak_ptr<Engine> engine,
         std::array<DeviceAddress, 2> buffers, int32_t batch);
  ~Uplift();
  Uplift(const Uplift&) = delete;
  Uplift& operator=(const Uplift&) = delete;

  int32_t batch() const { return batch_; }

  // Reads up to batch() experts of a layer, cold ones from disk, and sends each up as it arrives.
  // What `compute` is given from here to the next call finds the i-th in place i of the buffer that
  // is returned. Waits for the disk, and for copies of two calls ago. One prompt at a time: hold a
  // Turn.
  int32_t bring(int32_t layer, std::span<const int32_t> experts, Stream compute);

  // A prompt's use of the buffers, from its first bring() until `compute` has been given its last
  // product.
  class Turn {
   public:
    explicit Turn(Uplift& uplift) : lock_(uplift.turn_) {}

   private:
    std::unique_lock<std::mutex> lock_;
  };

  int64_t bytes_up() const { return bytes_up_.load(std::memory_order_relaxed); }

 private:
  void wait_for(Event event, const Engine& engine) const;

  std::shared_ptr<Driver> driver_;
  std::weak_ptr<Engine> engine_;
  std::array<DeviceAddress, 2> buffers_;
  int32_t batch_;
  int64_t record_bytes_;
  OwnedStream copy_;
  std::array<std::unique_ptr<OwnedEvent>, 2> copied_;  // of each buffer, its last record
  OwnedEvent used_;                                    // by products
  PinnedMemory staging_;                               // as both buffers

  std::mutex turn_;
  int32_t next_ = 0;
  std::atomic<int64_t> bytes_up_ = 0;
};

}  // namespace torch_mesh
