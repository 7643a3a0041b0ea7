// The engine's Runtime: torch's threads and Python's signals.
#pragma once

#include <string>

#include "base/runtime.h"

namespace torch_mesh {

const Runtime& torch_runtime();

// Whether this thread runs Python's signal handlers from within the wait of a forward.
bool in_signal_handler();

// Restores, in the calling thread, the exception that a signal handler raised while a forward
// waited (usually KeyboardInterrupt). Returns false if there is none. Needs the GIL.
bool restore_interrupt();

}  // namespace torch_mesh
