// What torch_mesh asks of a GPU: little, and all of it in the order of a stream. Everything else in
// this room is built on this table alone, so that it runs the same over CUDA's driver and over one
// that is in process, for tests (testing/simulated_device.h).
#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <string>

#include "base/runtime.h"

namespace torch_mesh {

using DeviceAddress = uint64_t;

// torch's own streams come in as they are; null is the default stream.
struct Stream {
  void* handle = nullptr;
};

struct Event {
  void* handle = nullptr;
};

// One device. Every call is safe from any thread, whatever device that thread uses otherwise and
// whatever other threads capture. What can fail throws Error(kDevice), which names the call and
// gives the driver's words.
class Driver {
 public:
  virtual ~Driver() = default;

  virtual std::string description() const = 0;
  // Its number of CUDA's; none: the host's memory is the device's.
  virtual std::optional<int32_t> device() const = 0;

  virtual Stream create_stream() = 0;
  // `timed`: seconds_between() may ask for it.
  virtual Event create_event(bool timed) = 0;
  virtual void destroy(Stream stream) noexcept = 0;
  virtual void destroy(Event event) noexcept = 0;

  // `event` stands for all that `stream` has been given so far.
  virtual void record(Event event, Stream stream) = 0;
  // What `stream` is given from now on begins after `event` as it was last recorded.
  virtual void wait(Stream stream, Event event) = 0;
  virtual bool done(Event event) = 0;
  // The calling thread waits for all that `stream` has been given.
  virtual void synchronize(Stream stream) = 0;
  // Nothing where either is not done yet, or was never recorded.
  virtual std::optional<double> seconds_between(Event from, Event to) = 0;

  virtual void copy_down(void* to, DeviceAddress from, int64_t bytes, Stream stream) = 0;
  virtual void copy_up(DeviceAddress to, const void* from, int64_t bytes, Stream stream) = 0;
  // `function` runs on a thread of the driver's. It must not call the driver, nor throw.
  virtual void launch_host(Stream stream, void (*function)(void*), void* argument) = 0;

  // Memory that copies can run to and from while the host goes on.
  virtual void* allocate_pinned(int64_t bytes) = 0;
  virtual void free_pinned(void* memory) noexcept = 0;

  // Whether `stream` is being captured into a graph: nothing of it runs before the graph is
  // launched, and no thread may be waited for, nor anything allocated.
  virtual bool capturing(Stream stream) = 0;
};

// CUDA's driver, loaded when it is asked for. Throws Error(kDevice) where there is none, where it
// is too old, and for a device that does not exist. `library`: another file, for tests.
std::shared_ptr<Driver> open_cuda_driver(int32_t device, const char* library = nullptr);
// "CUDA driver 12.8", or why there is none. Initialises the driver, after which no child of this
// process can use CUDA; touches no device.
std::string describe_cuda_driver(const char* library = nullptr);

// Polls until `event` is done, without the driver's locks, which a host node may be behind. Asks
// the interrupt hook meanwhile, so the caller holds no lock: Error(kInterrupted) says what `what`
// was waited for.
void wait_for(Driver& driver, Event event, const Runtime& runtime, const char* what);
// All that `stream` has been given. A device that is lost has nothing under way.
void drain(Driver& driver, Stream stream) noexcept;

// Those that are given back when they go.
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
