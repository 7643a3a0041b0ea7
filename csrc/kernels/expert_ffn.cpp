#include "kernels/expert_ffn.h"

#include <algorithm>
#include <array>
#include <cstring>
#include <optional>

#include "base/error.h"
#include "kernels/kernel_table.h"
#include "kernels/linear.h"
#include "kernels/task_products.h"

namespace torch_mesh {
namespace {

constexpr int32_t kMaxTaskColumns = kMaxGroup;

// A task covers whole groups of the hidden activations, so that it can quantize them itself.
int32_t task_columns(const RecordLayout& layout) { return operand_columns(layout.down); }

// One block's part of a bias, padded; nullptr where there is none.
class BlockBias {
 public:
  BlockBias(const std::byte* record, int64_t offset, int64_t first, int32_t columns) {
    if (offset < 0) return;
    std::memcpy(values_, record + offset + first * 4, sizeof(float) * static_cast<size_t>(columns));
    data_ = values_;
  }
  BlockBias(const BlockBias&) = delete;
  BlockBias& operator=(const BlockBias&) = delete;
  const float* data() const { return data_; }

 private:
  alignas(64) float values_[kBlockColumns] = {};
  const float* data_ = nullptr;
};

struct BlockOfHalf {
  int32_t index;    // of the block in the matrix
  int32_t half;     // 0, or 1 for up beside a gate
  int32_t first;    // its first column within its half
  int32_t columns;  // without padding
};

BlockOfHalf block_of_half(const PackedMatrix& matrix, int32_t halves, int32_t index) {
  const int32_t first = index / halves * kBlockColumns;
  return {index, index % halves, first, std::min(matrix.columns - first, kBlockColumns)};
}

// Adds the bias of gate or up.
void add_bias(const RecordLayout& layout, const KernelTable& table, const std::byte* record,
              const BlockOfHalf& block, const OperandRows& rows, float* sums) {
  const int64_t first = int64_t{block.half} * layout.intermediate + block.first;
  const BlockBias bias(record, layout.gate_up_bias_offset, first, block.columns);
  if (bias.data() == nullptr) return;
  for (int32_t r = 0; r < rows.count; ++r) {
    table.finish(sums + r * kBlockColumns, bias.data(), 1.0f);
  }
}

// scaling * x · a^T of the gate_up adapter, [rows][rank], from `row` on.
float* adapted_inputs(const ExpertRows& expert, int32_t row) {
  return expert.adapted + int64_t{row} * expert.gate_up_adapter.rank;
}

// h · a^T of the down adapter, where h are the hidden activations of one gate_up task,
// [tasks][rows][rank]; from `task` and `row` on.
float* adapted_hidden(const ExpertRows& expert, int32_t task, int32_t row) {
  return adapted_inputs(expert, expert.rows) +
         (int64_t{task} * expert.rows + row) * expert.down_adapter.rank;
}

}  // namespace

ExpertFfn::ExpertFfn(const RecordLayout& layout, const Activation& activation,
                     const Runtime& runtime, const KernelTable& table)
    : layout_(layout), activation_(activation), runtime_(runtime), table_(table) {
  if (activation.needs_gate() && !layout.gated) {
    throw_invalid(
        "\"swiglu\", \"swigluoai\" and \"softcap\" combine gate and up, and these experts "
        "have no gate; allowed there: \"silu\", \"gelu\", \"gelu_tanh\", \"relu2\"");
  }
}

int64_t ExpertFfn::prepared_bytes(int32_t rows) const {
  return rows * operand_shape(layout_.gate_up).row_bytes;
}

void ExpertFfn::prepare(const void* x, ScalarType type, int64_t row_stride, int32_t begin,
                        int32_t end, std::byte* prepared) const {
  prepare_rows(table_, layout_.gate_up, x, type, row_stride, begin, end, prepared);
}

int64_t ExpertFfn::prepared_hidden_bytes(int32_t rows) const {
  return rows * operand_shape(layout_.down).row_bytes;
}

void ExpertFfn::prepare_hidden(const void* x, ScalarType type, int64_t row_stride, int32_t begin,
                               int32_t end, std::byte* prepared) const {
  prepare_rows(table_, layout_.down, x, type, row_stride, begin, end, prepared);
}

int64_t ExpertFfn::scratch_bytes(int32_t rows) const { return prepared_hidden_bytes(rows); }

int64_t ExpertFfn::adapted_bytes(int32_t rows, int32_t gate_up_rank, int32_t down_rank) const {
  const int64_t floats = gate_up_rank + int64_t{gate_up_tasks()} * down_rank;
  return round_up(rows * floats * static_cast<int64_t>(sizeof(float)), 64);
}

int32_t ExpertFfn::adapter_tasks(int32_t rows) { return (rows + kTileRows - 1) / kTileRows; }

void ExpertFfn::adapt(int32_t task, ConstRows x, const ExpertRows& expert) const {
  constexpr int32_t kPiece = 512;
  const LowRank& adapter = expert.gate_up_adapter;
  alignas(64) float values[kPiece];
  const int32_t first = task * kTileRows;
  const int32_t end = std::min(first + kTileRows, expert.rows);
  std::fill(adapted_inputs(expert, first), adapted_inputs(expert, end), 0.0f);
  for (int32_t row = first; row < end; ++row) {
    const auto* from = static_cast<const std::byte*>(x.data) +
                       expert.tokens[row] * x.row_stride * scalar_bytes(x.type);
    float* sums = adapted_inputs(expert, row);
    for (int32_t k = 0; k < layout_.hidden; k += kPiece) {
      const int32_t count = std::min(layout_.hidden - k, kPiece);
      table_.to_floats(from + k * scalar_bytes(x.type), x.type, count, values);
      table_.low_rank_in(values, count, adapter.a + k, adapter.a_stride, adapter.rank, sums);
    }
    for (int32_t j = 0; j < adapter.rank; ++j) sums[j] *= adapter.scaling;
  }
}

int32_t ExpertFfn::gate_up_tasks() const {
  return layout_.down.depth_padded / task_columns(layout_);
}

int32_t ExpertFfn::down_tasks() const { return layout_.down.blocks; }

void ExpertFfn::gate_up(int32_t task, const std::byte* prepared, const ExpertRows& expert) const {
  const int32_t halves = layout_.halves();
  const int32_t columns = task_columns(layout_);
  const int32_t first = task * columns;
  const int32_t kept = std::min(layout_.intermediate - first, columns);
  const OperandShape shape = operand_shape(layout_.gate_up);
  const OperandShape hidden_shape = operand_shape(layout_.down);
  const TaskProducts products(table_, runtime_, layout_.gate_up, expert.rows);
  alignas(64) Tile gate;
  alignas(64) Tile up;
  alignas(64) float hidden[kTileRows][kMaxTaskColumns];

  for (int32_t row = 0; row < expert.rows; row += kTileRows) {
    const OperandRows rows{prepared, expert.tokens + row, std::min(expert.rows - row, kTileRows)};
    const auto adapt_half = [&](const BlockOfHalf& block, float* sums) {
      const LowRank& adapter = expert.gate_up_adapter;
      if (adapter.rank == 0) return;
      const float* b = adapter.b_of(block.half, block.first);
      for (int32_t r = 0; r < rows.count; ++r) {
        table_.low_rank_out(adapted_inputs(expert, row + r), adapter.rank, b, adapter.b_stride,
                            block.columns, sums + r * kBlockColumns);
      }
    };
    for (int32_t c = 0; c < kept; c += kBlockColumns) {
      const int32_t index = (first + c) / kBlockColumns * halves;
      const std::byte* weights =
          expert.record + layout_.gate_up_offset + index * layout_.gate_up.block_bytes;
      products({weights, weights + layout_.gate_up.block_bytes}, halves, shape, rows, {gate, up});
      for (int32_t half = 0; half < halves; ++half) {
        const BlockOfHalf block = block_of_half(layout_.gate_up, halves, index + half);
        float* sums = half == 0 ? gate : up;
        add_bias(layout_, table_, expert.record, block, rows, sums);
        adapt_half(block, sums);
      }
      table_.activate(activation_, gate, layout_.gated ? up : nullptr, rows.count * kBlockColumns);
      for (int32_t r = 0; r < rows.count; ++r) {
        std::memcpy(hidden[r] + c, gate + r * kBlockColumns, sizeof(float) * kBlockColumns);
      }
    }
    for (int32_t r = 0; r < rows.count; ++r) {
      // Padding columns hold NaN where the row does; they must not reach the group's scale.
      std::fill(hidden[r] + kept, hidden[r] + columns, 0.0f);
      table_.store_operands(hidden[r], first, columns, hidden_shape,
                            expert.scratch + (row + r) * hidden_shape.row_bytes);
      const LowRank& adapter = expert.down_adapter;
      if (adapter.rank == 0) continue;
      float* sums = adapted_hidden(expert, task, row + r);
      std::fill(sums, sums + adapter.rank, 0.0f);
      table_.low_rank_in(hidden[r], kept, adapter.a + first, adapter.a_stride, adapter.rank, sums);
    }
  }
}

void ExpertFfn::down(int32_t task, int32_t count, const ExpertRows& expert) const {
  const PackedMatrix& matrix = layout_.down;
  const OperandShape shape = operand_shape(matrix);
  const std::byte* weights = expert.record + layout_.down_offset + task * matrix.block_bytes;
  const TaskProducts products(table_, runtime_, matrix, expert.rows);
  const LowRank& adapter = expert.down_adapter;
  alignas(64) Tile sums[2];
  alignas(64) float adapted[kMaxRank];

  for (int32_t row = 0; row < expert.rows; row += kTileRows) {
    const OperandRows rows{expert.scratch + row * shape.row_bytes, nullptr,
                           std::min(expert.rows - row, kTileRows)};
    products({weights, weights + matrix.block_bytes}, count, shape, rows, {sums[0], sums[1]});
    for (int32_t i = 0; i < count; ++i) {
      const BlockOfHalf block = block_of_half(matrix, 1, task + i);
      const BlockBias bias(expert.record, layout_.down_bias_offset, block.first, block.columns);
      for (int32_t r = 0; r < rows.count; ++r) {
        float* from = sums[i] + r * kBlockColumns;
        if (adapter.rank > 0) {
          add_hidden(expert, row + r, adapted);
          table_.low_rank_out(adapted, adapter.rank, adapter.b_of(0, block.first), adapter.b_stride,
                              block.columns, from);
        }
        table_.finish(from, bias.data(), expert.weights[row + r]);
        const int64_t out_row = expert.out_rows[row + r];
        std::memcpy(expert.products + out_row * layout_.hidden + block.first, from,
                    sizeof(float) * static_cast<size_t>(block.columns));
      }
    }
  }
}

// Adds up in the order of the gate_up tasks, whichever ended first.
void ExpertFfn::add_hidden(const ExpertRows& expert, int32_t row, float* sums) const {
  const LowRank& adapter = expert.down_adapter;
  std::fill(sums, sums + adapter.rank, 0.0f);
  for (int32_t task = 0; task < gate_up_tasks(); ++task) {
    const float* part = adapted_hidden(expert, task, row);
    for (int32_t j = 0; j < adapter.rank; ++j) sums[j] += part[j];
  }
  for (int32_t j = 0; j < adapter.rank; ++j) sums[j] *= adapter.scaling;
}

int32_t ExpertFfn::linear_tasks(int32_t projection) const {
  return projection == 0 ? layout_.gate_up.blocks : layout_.down.blocks;
}

void ExpertFfn::linear(int32_t projection, int32_t task, int32_t count, const std::byte* prepared,
                       const std::byte* record, int32_t first, int32_t rows, float* out,
                       int64_t out_stride) const {
  const bool is_down = projection == 1;
  const PackedMatrix& matrix = is_down ? layout_.down : layout_.gate_up;
  const int64_t bytes_offset = is_down ? layout_.down_offset : layout_.gate_up_offset;
  const int64_t bias_offset = is_down ? layout_.down_bias_offset : layout_.gate_up_bias_offset;
  std::array<std::optional<BlockBias>, 2> bias;
  std::array<LinearBlock, 2> blocks;
  for (int32_t i = 0; i < count; ++i) {
    const BlockOfHalf block = block_of_half(matrix, is_down ? 1 : layout_.halves(), task + i);
    const int64_t out_column = int64_t{block.half} * layout_.intermediate + block.first;
    bias[i].emplace(record, bias_offset, out_column, block.columns);
    blocks[i] = {record + bytes_offset + block.index * matrix.block_bytes, block.columns,
                 bias[i]->data(), out + out_column};
  }
  linear_blocks(table_, runtime_, matrix, {blocks.data(), static_cast<size_t>(count)},
                prepared + first * operand_shape(matrix).row_bytes, rows, ScalarType::kFloat32,
                out_stride);
}

}  // namespace torch_mesh
