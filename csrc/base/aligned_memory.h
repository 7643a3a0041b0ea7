// Memory that begins at a multiple of its alignment.
#pragma once

#include <cstddef>
#include <cstdlib>
#include <memory>

namespace torch_mesh {

struct FreeAligned {
  void operator()(std::byte* memory) const { std::free(memory); }
};
using AlignedMemory = std::unique_ptr<std::byte, FreeAligned>;

// Null if there is no memory. `bytes` is a multiple of `alignment`.
inline AlignedMemory aligned_memory(size_t alignment, size_t bytes) {
  return AlignedMemory(static_cast<std::byte*>(std::aligned_alloc(alignment, bytes)));
}

}  // namespace torch_mesh
