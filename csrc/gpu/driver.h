// The operations that torch_mesh needs of a GPU, all in the order of a stream. Everything else in
// this folder uses only this interface. So it runs the same over CUDA's driver and over a simulated
// one in this process, for tests (testing/simulated_device.h).
#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <string>

#include "base/runtime.h"

namespace torch_mesh {

using DeviceAddress = uint64_t;

// A stream of torch is used as it is; null is the default stream.
struct Stream {
  void* handle = nullptr;
};

struct Event {
  void* handle = nullptr;
};

// One device. Every call is safe from any thread, whatever device is current there and whatever
// other threads capture. A call that fails throws Error(kDevice) with its name and the driver's
// message.
class Driver {
 public:
  virtual ~Driver() = default;

  virtual std::string description() const = 0;
  // The CUDA index; none: the device's memory is the host's.
  virtual std::optional<int32_t> device() const = 0;

  virtual Stream create_stream() = 0;
  // `timed`: for seconds_between().
  virtual Event create_event(bool timed) = 0;
  virtual void destroy(Stream stream) noexcept = 0;
  virtual void destroy(Event event) noexcept = 0;

  // `event` completes when all work enqueued in `stream` so far has completed.
  virtual void record(Event event, Stream stream) = 0;
  // Work enqueued in `stream` from now on begins after `event`, as it was last recorded.
  virtual void wait(Stream stream, Event event) = 0;
  virtual bool done(Event event) = 0;
  // The calling thread waits for all work enqueued in `stream`.
  virtual void synchronize(Stream stream) = 0;
  // None if either has not completed yet, or was never recorded.
  virtual std::optional<double> seconds_between(Event from, Event to) = 0;

  virtual void copy_down(void* to, DeviceAddress from, int64_t bytes, Stream stream) = 0;
  virtual void copy_up(DeviceAddress to, const void* from, int64_t bytes, Stream stream) = 0;
  // `function` runs on a thread of the driver's. It must not call the driver, nor throw.
  virtual void launch_host(Stream stream, void (*function)(void*), void* argument) = 0;

  // Page-locked host memory, for asynchronous copies.
  virtual void* allocate_pinned(int64_t bytes) = 0;
  virtual void free_pinned(void* memory) noexcept = 0;

  // Whether `stream` is being captured into a graph. Then nothing of it runs before the graph is
  // launched, and the capturing thread may neither wait nor allocate.
  virtual bool capturing(Stream stream) = 0;
};

// Loads CUDA's driver. Throws Error(kDevice) if it is missing or too old, and for a device that
// does not exist. `library`: another file, for tests.
std::shared_ptr<Driver> open_cuda_driver(int32_t device, const char* library = nullptr);
// Returns "CUDA driver 12.8", or why there is none. Initializes the driver, after which no forked
// child of this process can use CUDA; touches no device.
std::string describe_cuda_driver(const char* library = nullptr);

// Polls until `event` is done. It does not block in the driver, whose locks a host node may need.
// It calls the interrupt hook, so the caller must hold no lock. Error(kInterrupted) says `what` was
// waited for.
void wait_for(Driver& driver, Event event, const Runtime& runtime, const char* what);
// Waits for all work enqueued in `stream`. On a lost device nothing runs, and it returns.
void drain(Driver& driver, Stream stream) noexcept;

// A stream, an event and pinned memory, which their destructors release.
class OwnedStream {
 public:
  explicit OwnedStream(Driver& driver) : driver_(driver), stream_(driver.create_stream()) {}
  ~OwnedStream() { driver_.destroy(stream_); }
  OwnedStream(const OwnedStream&) = delete;
  OwnedStream& operator=(const OwnedStream&) = delete;
  operator Stream() const { return stream_; }

 private:
  Driver& driver_;
  Stream stream_;
};

class OwnedEvent {
 public:
  explicit OwnedEvent(Driver& driver, bool timed = false)
      : driver_(driver), event_(driver.create_event(timed)) {}
  ~OwnedEvent() { driver_.destroy(event_); }
  OwnedEvent(const OwnedEvent&) = delete;
  OwnedEvent& operator=(const OwnedEvent&) = delete;
  operator Event() const { return event_; }

 private:
  Driver& driver_;
  Event event_;
};

class PinnedMemory {
 public:
  PinnedMemory(Driver& driver, int64_t bytes)
      : driver_(driver), data_(static_cast<std::byte*>(driver.allocate_pinned(bytes))) {}
  ~PinnedMemory() { driver_.free_pinned(data_); }
  PinnedMemory(const PinnedMemory&) = delete;
  PinnedMemory& operator=(const PinnedMemory&) = delete;
  std::byte* data() const { return data_; }

 private:
  Driver& driver_;
  std::byte* data_;
};

}  // namespace torch_mesh
