// Packs blocks of a GGUF file into those of a record. No code, scale or min is changed.
#pragma once

#include <cstddef>
#include <cstdint>

#include "kernels/matrix_view.h"
#include "store/gguf_types.h"

namespace torch_mesh {

// Writes the whole block whose first column is output feature `first_row` of the view. Throws
// Error(kInvalid) for a scale that is not finite.
void pack_gguf(const PackedMatrix& matrix, const CodesView& view, int32_t first_row,
               std::byte* block);

}  // namespace torch_mesh
