// A device in process: its memory is the host's, each of its streams is a thread that works off
// what it was given in order, and streams wait for each other by events alone. What forgets to wait
// therefore shows, the more so with delays drawn from a seed, and as a data race under
// ThreadSanitizer.
#pragma once

#include <cstdint>
#include <memory>
#include <vector>

#include "gpu/driver.h"

namespace torch_mesh {

struct SimulatedDeviceOptions {
  uint64_t seed = 0;
  int32_t max_delay_us = 0;   // before each operation of a stream, drawn anew
  int64_t failing_call = -1;  // of the calls that can fail, counted from 0
  int64_t failures = 1;       // that many calls fail from there on
};

class SimulatedDevice : public Driver {
 public:
  // What a stream was given while it was captured. As on a device, work of other streams belongs to
  // it that waits for captured work, and has to be waited for before the capture ends; and the
  // thread that captures may neither wait nor allocate.
  class Graph;

  virtual void begin_capture(Stream stream) = 0;
  virtual std::shared_ptr<const Graph> end_capture(Stream stream) = 0;
  virtual void launch(std::shared_ptr<const Graph> graph, Stream stream) = 0;

  virtual int64_t calls() const = 0;  // that could have failed, so far
  virtual int64_t live() const = 0;   // streams, events and pinned memory that were not given back
};

std::shared_ptr<SimulatedDevice> make_simulated_device(const SimulatedDeviceOptions& options = {});

}  // namespace torch_mesh
