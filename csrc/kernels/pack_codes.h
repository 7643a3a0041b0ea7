// Packs codes and scales of a checkpoint into a block. No code is changed; scales are rounded where
// the checkpoint has fp16 or fp32 and the record bf16.
#pragma once

#include <cstddef>
#include <cstdint>

#include "kernels/matrix_view.h"
#include "store/record.h"

namespace torch_mesh {

// Throws Error(kInvalid) for a view that the matrix's format cannot hold. Does not check single
// scales and codes.
void check_codes(const PackedMatrix& matrix, const CodesView& view);

// Writes the block whose first column is output feature `first_row` of the view. Throws
// Error(kInvalid) for scales and codes that the matrix's format cannot hold.
void pack_codes(const PackedMatrix& matrix, const CodesView& view, int32_t first_row,
                std::byte* block);

}  // namespace torch_mesh
