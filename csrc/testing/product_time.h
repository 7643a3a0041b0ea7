// Times one way of multiplying, to set the thresholds between them by.
#pragma once

#include <cstdint>
#include <map>
#include <string>

#include "base/runtime.h"

namespace torch_mesh {

// The ways that a product of a format may go on this machine, "few", "panels" and "gemm" or
// "tiles", with the rows from which on the table of `isa` goes it. Throws Error(kInvalid) for what
// this machine has not.
std::map<std::string, int32_t> product_ways(const Runtime& runtime, const std::string& isa,
                                            const std::string& format);

// What one thread takes for `rows` rows times one matrix by one way. Throws Error(kInvalid) for a
// way that this machine has not.
double product_seconds(const Runtime& runtime, const std::string& isa, const std::string& format,
                       int32_t group_size, int32_t in_features, int32_t out_features, int32_t rows,
                       const std::string& way);

}  // namespace torch_mesh
