// A backend between a reader and its real backend that injects faults.
#pragma once

#include <chrono>
#include <cstdint>

#include "io/reader.h"

namespace torch_mesh {

// Faults drawn per chunk from a seeded generator. Probabilities in [0, 1].
struct Faults {
  uint64_t seed = 0;
  double short_read = 0;
  double eintr = 0;
  double eagain = 0;
  double eio_once = 0;    // the chunk fails once, its repeat succeeds
  double eio_always = 0;  // the chunk fails whenever it is tried
  double delay = 0;       // completes up to max_delay later
  double reorder = 0;     // held back until others have completed
  double bit_flip = 0;
  double wrong_offset = 0;
  std::chrono::microseconds max_delay{2000};
};

// Returns nullptr if all probabilities are 0. Throws Error(kInvalid) for a probability outside of
// [0, 1] and a max_delay outside of [0, one day].
Interpose with_faults(const Faults& faults);

// Chunks that were submitted to backends with faults, in all of this process.
int64_t chunks_given();

}  // namespace torch_mesh
