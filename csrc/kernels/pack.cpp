#include "kernels/pack.h"

#include <algorithm>
#include <cstring>
#include <memory>
#include <string>
#include <vector>

#include "base/error.h"
#include "kernels/kernel_table.h"
#include "kernels/pack_bf12.h"
#include "kernels/pack_calibrated.h"
#include "kernels/pack_codes.h"
#include "kernels/weight_panel.h"

namespace torch_mesh {
namespace {

// Loads inputs [k, k + depth) of a block, zero-padded to panel[depth][kBlockColumns].
void load_inputs(const KernelTable& table, const PackedMatrix& matrix, const MatrixView& view,
                 int32_t first_row, int32_t k, int32_t depth, float* panel) {
  const int32_t rows = std::min(matrix.columns - first_row, kBlockColumns);
  const int32_t columns = std::min(matrix.depth - k, depth);
  load_panel(table, view, first_row, rows, k, columns > 0 ? columns : 0, depth, panel);
}

// Writes inputs [k, k + kBf12Depth) of a block as words of bf16 [kBf12Depth / 2][kBlockColumns].
void write_words(const KernelTable& table, const PackedMatrix& matrix, const MatrixView& view,
                 int32_t first_row, int32_t k, std::byte* to) {
  const bool is_whole =
      matrix.columns - first_row >= kBlockColumns && matrix.depth - k >= kBf12Depth;
  if (is_whole && has_pairs(view, first_row)) {
    return load_pairs(table, view, first_row, k, kBf12Depth, to);
  }
  alignas(64) float panel[kBf12Depth * kBlockColumns];
  load_inputs(table, matrix, view, first_row, k, kBf12Depth, panel);
  table.of(matrix.format).pack_group(panel, kBf12Depth, to);
}

void pack_groups(const KernelTable& table, const PackedMatrix& matrix, const MatrixView& view,
                 int32_t first_row, std::byte* block) {
  if (matrix.format == Format::kBf16) {
    for (int32_t k = 0; k < matrix.depth_padded; k += kBf12Depth, block += kBf12WordsBytes) {
      write_words(table, matrix, view, first_row, k, block);
    }
    return;
  }
  if (matrix.format == Format::kBf12) {
    Bf12Packer packer(table, block, matrix.depth_padded / kBf12Depth);
    alignas(64) std::byte words[kBf12WordsBytes];
    for (int32_t k = 0; k < matrix.depth_padded; k += kBf12Depth) {
      write_words(table, matrix, view, first_row, k, words);
      packer.add(words);
    }
    return;
  }
  const auto pack_group = table.of(matrix.format).pack_group;
  const int32_t depth = matrix.group_size;
  const int64_t step = matrix.block_bytes / (matrix.depth_padded / depth);
  alignas(64) float panel[kMaxGroup * kBlockColumns];
  for (int32_t k = 0; k < matrix.depth_padded; k += depth, block += step) {
    load_inputs(table, matrix, view, first_row, k, depth, panel);
    pack_group(panel, depth, block);
  }
}

// Loads the whole block first, since codes of a trellis depend on all of their stream.
class TrellisPacker {
 public:
  TrellisPacker(const KernelTable& table, const PackedMatrix& matrix)
      : table_(table),
        pack_(table.of(matrix.format).pack_trellis),
        panel_(static_cast<size_t>(matrix.depth_padded) * kBlockColumns),
        scratch_(static_cast<size_t>(pack_.scratch_bytes(matrix.depth_padded)) + 64) {}

  void pack(const PackedMatrix& matrix, const MatrixView& view, int32_t first_row,
            std::byte* block) {
    for (int32_t k = 0; k < matrix.depth_padded; k += matrix.group_size) {
      load_inputs(table_, matrix, view, first_row, k, matrix.group_size,
                  panel_.data() + int64_t{k} * kBlockColumns);
    }
    void* scratch = scratch_.data();
    size_t room = scratch_.size();
    std::align(64, room - 64, scratch, room);
    pack_.pack(panel_.data(), matrix.depth, matrix, static_cast<std::byte*>(scratch), block);
  }

 private:
  const KernelTable& table_;
  const TrellisPacking& pack_;
  std::vector<float> panel_;
  std::vector<std::byte> scratch_;
};

void pack_block(const KernelTable& table, const PackedMatrix& matrix, const MatrixView& view,
                int32_t first_row, std::byte* block) {
  if (!is_trellis(matrix.format)) return pack_groups(table, matrix, view, first_row, block);
  TrellisPacker(table, matrix).pack(matrix, view, first_row, block);
}

void pack_bias(const KernelTable& table, const MatrixView& view, int32_t count, std::byte* to) {
  for (int32_t i = 0; i < count; i += kMaxGroup) {
    float line[kMaxGroup];
    const int32_t part = std::min(count - i, kMaxGroup);
    load_column(table, view, i, 0, part, line);
    std::memcpy(to + int64_t{4} * i, line, sizeof(float) * static_cast<size_t>(part));
  }
}

template <typename View>
void check_present(const char* name, const View& view, bool wanted) {
  if ((view.data != nullptr) == wanted) return;
  throw_invalid("pack: ", name,
                wanted ? " is missing, and the record's layout has it"
                       : " was given, and the record's layout has none");
}

template <typename Views>
void check_views(const RecordLayout& layout, const Views& views) {
  check_present("gate", views.gate, layout.gated);
  check_present("up", views.up, true);
  check_present("down", views.down, true);
  check_present("gate_bias", views.gate_bias, layout.gated && layout.bias);
  check_present("up_bias", views.up_bias, layout.bias);
  check_present("down_bias", views.down_bias, layout.bias);
}

void check_rounds(Format format) {
  if (!is_made_of_codes(format)) return;
  throw_invalid("nothing is rounded to ", format_name(format),
                ", which holds the codes of a checkpoint as they are; allowed for other weights: "
                "bf16, bf12, int8, int4, lut4, tcq2, tcq3");
}

void check_calibrates(Format format) {
  check_rounds(format);
  if (calibration_order(format).step > 0) return;
  std::string allowed;
  for (int i = 0; i < kFormats; ++i) {
    if (calibration_order(static_cast<Format>(i)).step == 0) continue;
    allowed += (allowed.empty() ? "" : ", ") + std::string(format_name(static_cast<Format>(i)));
  }
  throw_invalid("there is no calibration for ", format_name(format), "; allowed: ", allowed);
}

// Packs each projection by pack_block(matrix, view, first row, block), then the biases.
template <typename Views, typename PackBlock>
void pack_projections(const RecordLayout& layout, const Views& views, std::byte* record,
                      const KernelTable& table, const PackBlock& pack_block) {
  const int32_t halves = layout.halves();
  std::byte* gate_up = record + layout.gate_up_offset;
  const auto pack_half = [&](const PackedMatrix& matrix, const auto& view, int32_t half,
                             int32_t all, std::byte* blocks) {
    for (int32_t b = half; b < matrix.blocks; b += all) {
      pack_block(matrix, view, b / all * kBlockColumns, blocks + b * matrix.block_bytes);
    }
  };
  if (layout.gated) pack_half(layout.gate_up, views.gate, 0, halves, gate_up);
  pack_half(layout.gate_up, views.up, halves - 1, halves, gate_up);
  pack_half(layout.down, views.down, 0, 1, record + layout.down_offset);

  int64_t end = layout.down_offset + layout.down.bytes();
  if (layout.bias) {
    std::byte* bias = record + layout.gate_up_bias_offset;
    const int64_t half_bytes = int64_t{4} * layout.intermediate;
    if (layout.gated) pack_bias(table, views.gate_bias, layout.intermediate, bias);
    pack_bias(table, views.up_bias, layout.intermediate, bias + (halves - 1) * half_bytes);
    pack_bias(table, views.down_bias, layout.hidden, record + layout.down_bias_offset);
    end = layout.down_bias_offset + int64_t{4} * layout.hidden;
  }
  std::memset(record + end, 0, static_cast<size_t>(layout.bytes - end));
}

}  // namespace

void pack_record(const RecordLayout& layout, const ExpertViews& views, std::byte* record,
                 const KernelTable& table) {
  check_rounds(layout.gate_up.format);
  check_rounds(layout.down.format);
  check_views(layout, views);
  pack_projections(layout, views, record, table,
                   [&](const PackedMatrix& matrix, const MatrixView& view, int32_t first_row,
                       std::byte* block) { pack_block(table, matrix, view, first_row, block); });
}

void pack_record(const RecordLayout& layout, const ExpertViews& views, const ExpertMoments& moments,
                 std::byte* record, const Runtime& runtime, int32_t threads,
                 const KernelTable& table) {
  check_calibrates(layout.gate_up.format);
  check_calibrates(layout.down.format);
  check_views(layout, views);
  struct Task {
    const PackedMatrix* matrix;
    const MatrixView* view;
    int32_t first_row;
    std::byte* block;
  };
  std::vector<Task> tasks;
  pack_projections(
      layout, views, record, table,
      [&](const PackedMatrix& matrix, const MatrixView& view, int32_t first_row, std::byte* block) {
        tasks.push_back({&matrix, &view, first_row, block});
      });
  parallel_for(runtime, static_cast<int64_t>(tasks.size()), threads,
               [&](int64_t begin, int64_t end) {
                 for (int64_t i = begin; i < end; ++i) {
                   const Task& task = tasks[static_cast<size_t>(i)];
                   const bool is_down = task.matrix == &layout.down;
                   pack_calibrated_block(table, *task.matrix, *task.view,
                                         is_down ? moments.intermediate : moments.hidden,
                                         task.first_row, task.block);
                 }
               });
}

void pack_record(const RecordLayout& layout, const ExpertCodes& codes, std::byte* record) {
  check_views(layout, codes);
  if (layout.gated) check_codes(layout.gate_up, codes.gate);
  check_codes(layout.gate_up, codes.up);
  check_codes(layout.down, codes.down);
  pack_projections(layout, codes, record, kernel_table(), pack_codes);
}

void pack_blocks(const PackedMatrix& matrix, const MatrixView& view, int32_t begin, int32_t end,
                 std::byte* blocks) {
  check_rounds(matrix.format);
  for (int32_t b = begin; b < end; ++b) {
    pack_block(kernel_table(), matrix, view, b * kBlockColumns, blocks + b * matrix.block_bytes);
  }
}

void pack_record(const RecordLayout& layout, const ExpertViews& views, std::byte* record) {
  pack_record(layout, views, record, kernel_table());
}

}  // namespace torch_mesh
