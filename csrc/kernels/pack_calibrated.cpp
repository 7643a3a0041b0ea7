#include "kernels/pack_calibrated.h"

#include <algorithm>
#include <memory>
#include <vector>

#include "kernels/kernel_table.h"
#include "kernels/small_floats.h"
#include "kernels/weight_panel.h"
#include "store/trellis.h"

namespace torch_mesh {
namespace {

// Packs one block of 64 columns in runs of inputs, each of whole groups and whole squares. An
// input's errors are fed to later inputs of its run at once, and beyond the run square by square.
class Block {
 public:
  Block(const KernelTable& table, const PackedMatrix& matrix, const MatrixView& view,
        const InputMoments& moments, int32_t first_row)
      : table_(table),
        quantizer_(table.of(matrix.format).quantizer),
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
    std::fill(importance_, importance_ + run, 0.0f);  // of padding
    std::copy_n(moments_.importance + first, inputs, importance_);
  }

  // Packs the group that begins at input k of the run.
  void pack_group(int32_t first, int32_t run, int32_t k, std::byte* to) {
    group_.depth = matrix_.group_size;
    group_.importance = importance_ + k;
    quantizer_.begin(targets_ + k * kBlockColumns, group_);
    for (int32_t input = 0; input < matrix_.group_size; ++input) {
      quantize_input(first, run, k + input, input);
    }
    quantizer_.finish(group_, to);
  }

  // `k` counts from the run's first input, `in_group` from the group's.
  void quantize_input(int32_t first, int32_t run, int32_t k, int32_t in_group) {
    float* errors = errors_ + k * kBlockColumns;
    quantizer_.quantize(targets_ + k * kBlockColumns, in_group, group_, errors);
    const float* weights = weights_ + k * kBlockColumns;
    for (int32_t i = 0; i < kBlockColumns; ++i) errors[i] = weights[i] - errors[i];
    const int32_t here = first + k, behind = here + 1;
    const int32_t rows = std::min(first + run, matrix_.depth) - behind;
    if (rows <= 0) return;
    table_.feed_forward(errors, 1, feedback(behind, here), matrix_.depth, rows,
                        targets_ + (k + 1) * kBlockColumns);
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
  const GroupQuantizer& quantizer_;
  const PackedMatrix& matrix_;
  const MatrixView& view_;
  const InputMoments& moments_;
  const int32_t first_row_, rows_;
  std::vector<float> fed_;  // [depth_padded][kBlockColumns] fed by earlier runs' errors
  QuantizedGroup group_;
  alignas(64) float weights_[kRun * kBlockColumns];
  alignas(64) float targets_[kRun * kBlockColumns];
  alignas(64) float errors_[kRun * kBlockColumns];
  alignas(64) float importance_[kRun];
};

// Codes of a stream that are chosen together, and how many later ones a path looks ahead at. The
// errors of the chosen codes then change the targets of the later ones.
constexpr int32_t kTrellisStep = 16;
constexpr int32_t kTrellisSight = 16;
// Bounds of an input's importance relative to the median of its stream: within them the integer
// costs can tell distances apart.
constexpr float kMinWeight = 0.125f;
constexpr float kMaxWeight = 4.0f;

// Packs one block of a trellis, stream by stream. Viterbi's algorithm sees a stream's present
// targets; a stream's errors change the targets of all later streams. Scales are those of plain
// packing.
class TrellisBlockPacker {
 public:
  TrellisBlockPacker(const KernelTable& table, const PackedMatrix& matrix,
                     const InputMoments& moments)
      : table_(table),
        trellis_(table.of(matrix.format).pack_trellis),
        matrix_(matrix),
        moments_(moments),
        steps_(matrix.depth_padded / kTrellisStreams),
        weights_(block_floats(matrix.depth_padded)),
        targets_(weights_.size()),
        errors_(block_floats(static_cast<int32_t>(round_up(steps_, kSquare)))),
        values_(block_floats(steps_)),
        scales_(block_floats(matrix.groups())),
        inverses_(scales_.size()),
        codes_(weights_.size()),
        units_(static_cast<size_t>(steps_)),
        scratch_(static_cast<size_t>(trellis_.scratch_bytes(matrix.depth_padded)) + 64) {}

  void pack(const MatrixView& view, int32_t first_row, std::byte* block) {
    load(view, first_row);
    pack_plain(block);
    for (int32_t s = 0, first = 0; s < kTrellisStreams; ++s) {
      const int32_t inputs = inputs_of(s);
      quantize(s, first, inputs);
      first += inputs;
    }
    trellis_.store(codes_.data(), matrix_, block);
  }

 private:
  static size_t block_floats(int32_t rows) { return static_cast<size_t>(rows) * kBlockColumns; }
  int32_t inputs_of(int32_t stream) const {
    return std::max(matrix_.depth - stream + kTrellisStreams - 1, 0) / kTrellisStreams;
  }
  static float* row(std::vector<float>& panel, int64_t k) {
    return panel.data() + k * kBlockColumns;
  }
  float* target(int32_t stream, int32_t step) {
    return row(targets_, int64_t{stream} * steps_ + step);
  }
  float* weight(int32_t stream, int32_t step) {
    return row(weights_, int64_t{step} * kTrellisStreams + stream);
  }
  const float* feedback(int32_t to, int32_t from) const {
    return moments_.feedback + int64_t{to} * matrix_.depth + from;
  }

  void load(const MatrixView& view, int32_t first_row) {
    const int32_t rows = std::min(matrix_.columns - first_row, kBlockColumns);
    for (int32_t k = 0; k < matrix_.depth_padded; k += kSquare) {
      const int32_t inputs = std::clamp(matrix_.depth - k, 0, kSquare);
      load_panel(table_, view, first_row, rows, k, inputs, kSquare, row(weights_, k));
    }
    for (int32_t s = 0; s < kTrellisStreams; ++s) {
      for (int32_t j = 0; j < steps_; ++j) std::copy_n(weight(s, j), kBlockColumns, target(s, j));
    }
  }

  // Packs without moments, for the scales.
  void pack_plain(std::byte* block) {
    void* scratch = scratch_.data();
    size_t room = scratch_.size();
    aligned_ = static_cast<std::byte*>(std::align(64, room - 64, scratch, room));
    trellis_.pack(weights_.data(), matrix_.depth, matrix_, aligned_, block);
    for (int32_t g = 0; g < matrix_.groups(); ++g) {
      const std::byte* of_group = block + g * matrix_.group_bytes;
      for (int32_t c = 0; c < kBlockColumns; ++c) {
        const float scale = bf16_at(of_group + c * 2);
        row(scales_, g)[c] = scale;
        row(inverses_, g)[c] = scale > 0 ? 1 / scale : 0;
      }
    }
  }

  // Chooses the codes of stream `s`, whose inputs are [first, first + inputs) in the order of the
  // moments.
  void quantize(int32_t s, int32_t first, int32_t inputs) {
    weigh(moments_.importance + first, inputs);
    uint16_t ring[kBlockColumns], now[kBlockColumns];
    const TrellisStream stream{steps_,
                               matrix_.group_size / kTrellisStreams,
                               target(s, 0),
                               units_.data(),
                               scales_.data(),
                               inverses_.data(),
                               codes_.data() + s * kBlockColumns,
                               values_.data(),
                               ring,
                               now,
                               aligned_};
    trellis_.begin(stream);
    for (int32_t j = 0; j < steps_; j += kTrellisStep) {
      const int32_t left = steps_ - j;
      trellis_.choose(stream, j, std::min(left, kTrellisStep + kTrellisSight),
                      std::min(left, kTrellisStep));
      const int32_t count = std::min(inputs - j, kTrellisStep);
      if (count <= 0) continue;
      for (int32_t i = j; i < j + count; ++i) {
        for (int32_t c = 0; c < kBlockColumns; ++c) {
          row(errors_, i)[c] = weight(s, i)[c] - row(values_, i)[c];
        }
      }
      const int32_t behind = j + count;
      if (behind == inputs) continue;
      table_.feed_forward(row(errors_, j), count, feedback(first + behind, first + j),
                          matrix_.depth, inputs - behind, target(s, behind));
    }
    feed_beyond(s, first, inputs);
  }

  void feed_beyond(int32_t s, int32_t first, int32_t inputs) {
    int32_t to = first + inputs;
    for (int32_t t = s + 1; t < kTrellisStreams; to += inputs_of(t), ++t) {
      for (int32_t j = 0; j < inputs; j += kSquare) {
        const SquareRows rows{feedback(to, first + j), matrix_.depth, std::min(inputs - j, kSquare),
                              inputs_of(t)};
        if (rows.count > 0) table_.multiply_square(row(errors_, j), rows, target(t, 0));
      }
    }
  }

  void weigh(const float* importance, int32_t inputs) {
    std::fill(units_.begin(), units_.end(), 0.0f);
    if (inputs == 0) return;
    std::vector<float> sorted(importance, importance + inputs);
    std::nth_element(sorted.begin(), sorted.begin() + inputs / 2, sorted.end());
    const float median = sorted[static_cast<size_t>(inputs / 2)];
    for (int32_t j = 0; j < inputs; ++j) {
      const float weight = std::clamp(importance[j] / median, kMinWeight, kMaxWeight);
      units_[static_cast<size_t>(j)] = kTrellisDistance * weight;
    }
  }

  const KernelTable& table_;
  const TrellisPacking trellis_;
  const PackedMatrix& matrix_;
  const InputMoments& moments_;
  const int32_t steps_;          // of each stream
  std::vector<float> weights_;   // [depth_padded][kBlockColumns]
  std::vector<float> targets_;   // [stream][step][kBlockColumns]
  std::vector<float> errors_;    // of a stream, padded to whole squares
  std::vector<float> values_;    // of a stream
  std::vector<float> scales_;    // [group][kBlockColumns]
  std::vector<float> inverses_;  // of these; 0 where a scale is
  std::vector<uint8_t> codes_;   // [depth_padded][kBlockColumns]
  std::vector<float> units_;     // of a stream's inputs
  std::vector<std::byte> scratch_;
  std::byte* aligned_ = nullptr;
};

}  // namespace

CalibrationOrder calibration_order(Format format) {
  if (is_trellis(format)) return {kTrellisStreams, kTrellisStep};
  return {1, kernel_table().of(format).quantizer.begin != nullptr ? 1 : 0};
}

void pack_calibrated_block(const KernelTable& table, const PackedMatrix& matrix,
                           const MatrixView& view, const InputMoments& moments, int32_t first_row,
                           std::byte* block) {
  if (is_trellis(matrix.format)) {
    return TrellisBlockPacker(table, matrix, moments).pack(view, first_row, block);
  }
  Block(table, matrix, view, moments, first_row).pack(block + matrix.header_bytes);
}

}  // namespace torch_mesh
