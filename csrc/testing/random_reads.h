// The raw random reads that rows of tables are measured against.
#pragma once

#include <cstdint>
#include <span>
#include <string>

namespace torch_mesh {

// Seconds for direct reads of `bytes` bytes at `offsets`, in their order, by one io_uring with at
// most `depth` under way. With `batch` all of so many reads are waited for before the next begin.
// Throws Error: kInvalid for numbers that direct I/O refuses and without io_uring, kRead for a
// file that cannot be read.
double random_read_seconds(const std::string& path, std::span<const int64_t> offsets, int32_t bytes,
                           int32_t depth, int32_t batch);

}  // namespace torch_mesh
