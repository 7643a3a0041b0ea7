// A simulated device in this process. Its memory is the host's. Each stream is a thread that runs
// its operations in order, and streams wait for each other only by events. So a missing wait shows,
// the more so with delays drawn from a seed, and as a data race under ThreadSanitizer.
#pragma once

#include <cstdint>
#include <memory>

#include "gpu/driver.h"

namespace torch_mesh {

struct SimulatedDeviceOptions {
  uint64_t seed = 0;
  int32_t max_delay_us = 0;   // before each operation of a stream, drawn anew
  int64_t failing_call = -1;  // index among the calls that can fail; -1: none
  int64_t failures = 1;       // that many calls fail from there on
};

class SimulatedDevice : public Driver {
 public:
  // The work of a stream while it was captured. As on a device, work of other streams that waits
  // for captured work belongs to it, and has to be waited for before the capture ends. The thread
  // that captures may neither wait nor allocate.
  class Graph;

  virtual void begin_capture(Stream stream) = 0;
  virtual std::shared_ptr<const Graph> end_capture(Stream stream) = 0;
  virtual void launch(std::shared_ptr<const Graph> graph, Stream stream) = 0;

  virtual int64_t calls() const = 0;  // those so far that could have failed
  virtual int64_t live() const = 0;   // streams, events and pinned memory not released
};

std::shared_ptr<SimulatedDevice> make_simulated_device(const SimulatedDeviceOptions& options = {});

}  // namespace torch_mesh
