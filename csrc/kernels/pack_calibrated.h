// Packing that minimizes the errors of products rather than of weights: later inputs compensate the
// rounding error of an input's weights.
//
// With H the second moments of a projection's inputs, H = M D M^T with M unit upper triangular and
// D diagonal, the squared error of the product x (W - Q)^T summed over all inputs is, for each
// column,
//   sum over k of D[k] * (target[k] - q[k])^2,  target[k] = w[k] + sum over j < k of
//   M[j][k] * (w[j] - q[j])
// so that each q[k] in turn is rounded to its target (LDLQ, arXiv 2307.13304, which gives what GPTQ
// does, arXiv 2210.17323, without an inverse).
//
// A format that chooses the codes of several inputs together (CalibrationOrder::step) needs M with
// unit blocks of that size on its diagonal, and the diagonal of D's blocks.
#pragma once

#include <cstddef>
#include <cstdint>

#include "kernels/expert_ffn.h"
#include "kernels/matrix_view.h"
#include "store/record.h"

namespace torch_mesh {

struct InputMoments {
  const float* feedback;    // M^T, [depth][depth]; only the part left of its diagonal is read
  const float* importance;  // D, [depth]
};

struct ExpertMoments {
  InputMoments hidden;        // of the inputs of gate and up
  InputMoments intermediate;  // of the inputs of down
};

// The order in which a format chooses codes: for one stream of inputs (k, k + streams ...) after
// another, and in each for `step` inputs together. Moments are of the inputs in that order. A step
// of 0: the format cannot be calibrated.
struct CalibrationOrder {
  int32_t streams;
  int32_t step;
};
CalibrationOrder calibration_order(Format format);

// Packs one block of 64 columns, the first of which is row `first_row` of the view.
void pack_calibrated_block(const KernelTable& table, const PackedMatrix& matrix,
                           const MatrixView& view, const InputMoments& moments, int32_t first_row,
                           std::byte* block);

}  // namespace torch_mesh
