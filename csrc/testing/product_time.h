// Times one way of multiplying, to set the thresholds between the ways.
#pragma once

#include <cstdint>
#include <map>
#include <string>

#include "base/runtime.h"

namespace torch_mesh {

// Returns the ways in which a product of a format may be computed on this machine: "few", "panels",
// and "tiles". Each comes with the number of rows from which the table of `isa` uses it.
// Throws Error(kInvalid) for an unknown format, and for an `isa` that this machine does not have.
std::map<std::string, int32_t> product_ways(const std::string& isa, const std::string& format);

// Returns the seconds that one thread takes for `rows` rows times one matrix by one way. Throws
// Error(kInvalid) for a way that this machine does not have.
double product_seconds(const Runtime& runtime, const std::string& isa, const std::string& format,
                       int32_t group_size, int32_t in_features, int32_t out_features, int32_t rows,
                       const std::string& way);

}  // namespace torch_mesh
