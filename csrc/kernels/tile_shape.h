// The sums that a target keeps in registers.
#pragma once

#include <cstdint>

namespace torch_mesh {

struct TileShape {
  int32_t rows;                // rows at once
  int32_t vectors;             // vectors of columns for each row
  int32_t single_row_vectors;  // vectors for one row: as many as fit, so that sums do not wait
                               // for one another
  int32_t single_row_blocks;   // blocks whose sums of one row fit
};

}  // namespace torch_mesh
