// What torch and Python lend to the engine.
#pragma once

#include <string>

#include "base/runtime.h"

namespace torch_mesh {

const Runtime& torch_runtime();

// Why torch's brgemm cannot be used here for a kind of product, or "" if it can. Found out by
// multiplying.
const std::string& brgemm_bf16_unavailable();
const std::string& brgemm_int8_unavailable();

// Whether this thread runs Python's signal handlers from within the wait of a forward.
bool in_signal_handler();

// What a signal handler raised while a forward waited (KeyboardInterrupt as a rule), restored into
// the thread that called. False if there is nothing to restore. Needs the GIL.
bool restore_interrupt();

}  // namespace torch_mesh
