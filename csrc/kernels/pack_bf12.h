// Tiles of bf16 to those of bf12.
#pragma once

#include <cstddef>
#include <cstdint>

#include "store/bf12.h"

namespace torch_mesh {

// Writes tiles [0, tiles) of a block in turn, and what its header says of each.
class Bf12Packer {
 public:
  Bf12Packer(std::byte* block, int32_t tiles);

  // The next tile, of words of bf16 [kBf12Rows][64]. Throws Error(kInvalid) where the block has no
  // room for all exceptions.
  void add(const std::byte* words);

 private:
  void add_exception(uint32_t place, std::byte upper);

  Bf12Block<std::byte> block_;
  int32_t tile_ = 0;
  uint32_t exceptions_ = 0;
};

}  // namespace torch_mesh
