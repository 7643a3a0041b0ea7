#include "kernels/pack_calibrated.h"

#include <algorithm>
#include <cstring>
#include <vector>

#include "kernels/kernel_table.h"
#include "kernels/weight_panel.h"

namespace torch_mesh {
namespace {

// One block of 64 columns. Inputs go in runs of whole groups and whole squares: within a run each
// step's errors are fed to all inputs behind it at once, beyond it square by square.
class Block {
 public:
  Block(const KernelTable& table, const PackedMatrix& matrix, const MatrixView& view,
        const InputMoments& moments, int32_t first_row)
      : table_(table),
        quantiser_(table.quantisers[static_cast<int>(matrix.format)]),
        matrix_(matrix),
        view_(view),
        moments_(moments),
        first_row_(first_row),
        rows_(std::min(matrix.columns - first_row, kBlockColumns)),
        fed_(static_cast<size_t>(matrix.depth_padded) * kBlockColumns),
        group_{} {}

  void pack(std::byte* to) {
    const int32_t run = std::max(matrix_.group_size, kSquare);
    for (int32_t first = 0; first < matrix_.depth_padded; first += run) {
      load(first, run);
      for (int32_t k = 0; k < run; k += matrix_.group_size, to += matrix_.group_bytes) {
        pack_group(first, run, k, to);
      }
      feed_beyond(first, run);
    }
  }

 private:
  void load(int32_t first, int32_t run) {
    const int32_t inputs = std::clamp(matrix_.depth - first, 0, run);
    load_panel(table_, view_, first_row_, rows_, first, inputs, run, weights_);
    const float* fed = fed_.data() + int64_t{first} * kBlockColumns;
    for (int32_t i = 0; i < run * kBlockColumns; ++i) targets_[i] = weights_[i] + fed[i];
    std::fill(importance_, importance_ + run, 0.0f);  // of what pads
    std::copy_n(moments_.importance + first, inputs, importance_);
  }

  // The group that begins at input k of the run.
  void pack_group(int32_t first, int32_t run, int32_t k, std::byte* to) {
    group_.depth = matrix_.group_size;
    group_.importance = importance_ + k;
    quantiser_.begin(targets_ + k * kBlockColumns, group_);
    for (int32_t step = 0; step < matrix_.group_size; step += quantiser_.step) {
      quantise_step(first, run, k + step, step);
    }
    quantiser_.finish(group_, to);
  }

  // `k` counts from the run's first input, `in_group` from the group's.
  void quantise_step(int32_t first, int32_t run, int32_t k, int32_t in_group) {
    const int32_t count = quantiser_.step;
    float* errors = errors_ + k * kBlockColumns;
    quantiser_.quantise(targets_ + k * kBlockColumns, in_group, group_, errors);
    const float* weights = weights_ + k * kBlockColumns;
    for (int32_t i = 0; i < count * kBlockColumns; ++i) errors[i] = weights[i] - errors[i];
    const int32_t here = first + k, behind = here + count;
    const int32_t rows = std::min(first + run, matrix_.depth) - behind;
    if (rows <= 0) return;
    table_.feed_forward(errors, count, feedback(behind, here), matrix_.depth, rows,
                        targets_ + (k + count) * kBlockColumns);
  }

  void feed_beyond(int32_t first, int32_t run) {
    const int32_t behind = first + run;
    if (behind >= matrix_.depth) return;
    for (int32_t k = 0; k < run; k += kSquare) {
      const SquareRows rows{feedback(behind, first + k), matrix_.depth, kSquare,
                            matrix_.depth - behind};
      table_.multiply_square(errors_ + k * kBlockColumns, rows,
                             fed_.data() + int64_t{behind} * kBlockColumns);
    }
  }

  const float* feedback(int32_t to, int32_t from) const {
    return moments_.feedback + int64_t{to} * matrix_.depth + from;
  }

  static constexpr int32_t kRun = kMaxGroup > kSquare ? kMaxGroup : kSquare;

  const KernelTable& table_;
  const GroupQuantiser& quantiser_;
  const PackedMatrix& matrix_;
  const MatrixView& view_;
  const InputMoments& moments_;
  const int32_t first_row_, rows_;
  std::vector<float> fed_;  // [depth_padded][kBlockColumns] of earlier runs' errors, to each input
  QuantisedGroup group_;
  alignas(64) float weights_[kRun * kBlockColumns];
  alignas(64) float targets_[kRun * kBlockColumns];
  alignas(64) float errors_[kRun * kBlockColumns];
  alignas(64) float importance_[kRun];
};

}  // namespace

int32_t calibration_step(Format format) {
  return kernel_table().quantisers[static_cast<int>(format)].step;
}

void pack_calibrated_block(const KernelTable& table, const PackedMatrix& matrix,
                           const MatrixView& view, const InputMoments& moments, int32_t first_row,
                           std::byte* block) {
  Block(table, matrix, view, moments, first_row).pack(block + matrix.header_bytes);
}

}  // namespace torch_mesh
