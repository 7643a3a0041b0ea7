// Packs tiles of bf16 into those of bf12.
#pragma once

#include <cstddef>
#include <cstdint>

#include "kernels/kernel_table.h"
#include "store/bf12.h"

namespace torch_mesh {

// Writes tiles [0, tiles) of a block in order, and their part of its header.
class Bf12Packer {
 public:
  Bf12Packer(const KernelTable& kernels, std::byte* block, int32_t tiles);

  // Adds the next tile, words of bf16 [kBf12Rows][64]. Throws Error(kInvalid) if the block has no
  // room for all exceptions.
  void add(const std::byte* words);

 private:
  void add_exception(uint32_t place, std::byte upper);

  const KernelTable& kernels_;
  Bf12Block<std::byte> block_;
  int32_t tile_ = 0;
  uint32_t exceptions_ = 0;
};

}  // namespace torch_mesh
