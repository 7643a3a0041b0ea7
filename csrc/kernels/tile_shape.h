// How much a target sums in registers.
#pragma once

#include <cstdint>

namespace torch_mesh {

struct TileShape {
  int32_t rows;                // at once
  int32_t vectors;             // of columns, for each of them
  int32_t single_row_vectors;  // with one row: all that there is room for, so that sums do not wait
                               // for one another
};

}  // namespace torch_mesh
