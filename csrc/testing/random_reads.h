// Raw random reads, with which reads of table rows are compared.
#pragma once

#include <cstdint>
#include <span>
#include <string>

namespace torch_mesh {

// Returns the seconds for direct reads of `bytes` bytes at `offsets`, in their order, by one
// io_uring with at most `depth` in flight. If `batch` is not 0, each batch of so many reads ends
// before the next one begins. Throws Error: kInvalid for numbers that direct I/O refuses and
// without io_uring, kRead for a file that cannot be read.
double random_read_seconds(const std::string& path, std::span<const int64_t> offsets, int32_t bytes,
                           int32_t depth, int32_t batch);

}  // namespace torch_mesh
