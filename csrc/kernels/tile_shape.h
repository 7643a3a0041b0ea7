// How much a target sums in registers.
#pragma once

#include <cstdint>

namespace torch_mesh {

struct TileShape {
  int32_t rows;                // at once
  int32_t vectors;             // of columns, for each of them
  int32_t single_row_vectors;  // with one row: all that there is room for, so that sums do not wait
                               // for one another
  int32_t single_row_blocks;   // whose sums of one row there is room for
};

}  // namespace torch_mesh
