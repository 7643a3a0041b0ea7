// What one instruction set provides. Each table is filled by a translation unit of its own,
// compiled with that set's flags; nothing with external linkage but its table comes out of it, so
// that the linker cannot pick its copy of a shared inline function for a processor that lacks the
// instructions.
#pragma once

#include <cstddef>
#include <cstdint>

#include "base/runtime.h"
#include "kernels/activation.h"
#include "kernels/matrix_view.h"
#include "store/record.h"

namespace torch_mesh {

// Rows computed at once: their sums (64 columns, fp32) are 12 KiB and stay in L1 beside a group of
// weights, so that the block is streamed from memory once for all of them.
inline constexpr int32_t kTileRows = 48;
inline constexpr int32_t kMaxGroup = 128;
inline constexpr int32_t kNoRows = INT32_MAX;  // as a number from which on something is done: never

// Activations in the operand form of the products, one row after the other:
//   floats:   depth_padded values of bf16
//   integers: depth_padded signed bytes, the float scale of each group, the int32 sum of
//   each group
struct OperandShape {
  Format format;
  int32_t group_size;
  int32_t depth_padded;
  int64_t row_bytes;  // a multiple of 64
};

struct OperandRows {
  const std::byte* data;
  const int32_t* index;  // [count] which row each one is; nullptr: 0, 1, 2 ...
  int32_t count;
};

// sums[row][column] = rows · block, fp32, for 1 to kTileRows rows.
struct BlockProducts {
  const std::byte* block;
  OperandShape shape;
  OperandRows rows;
  const Runtime* gemm;  // whose gemm to call; nullptr: the table's own products
  float* sums;          // [rows][kBlockColumns]
};

// Weights of one block, kSquare k-values from `depth` on.
inline constexpr int32_t kSquare = kBlockColumns;
struct SquareOfBlock {
  const std::byte* block;
  int32_t group_size;
  int32_t depth_padded;
  int32_t depth;  // a multiple of kSquare
};

struct SquareRows {
  const float* data;
  int64_t stride;
  int32_t columns;  // that there are of kSquare; the others count as zero
  int32_t count;
};

// What one task of attention takes on: its scores are 16 KiB.
inline constexpr int32_t kAttentionKeys = 256;
inline constexpr int32_t kAttentionRows = 16;
inline constexpr int32_t kHeadDimStep = 16;
inline constexpr int32_t kMostHeadDim = 256;

// Query rows that share their keys, over a run of those.
struct AttentionPart {
  const float* queries;  // [rows][key_dim], times the scale
  int32_t rows;          // 1 to kAttentionRows
  ConstRows keys;        // [count][key_dim]
  ConstRows values;      // [count][value_dim]
  int32_t count;         // 1 to kAttentionKeys
  int32_t key_dim;       // a multiple of kHeadDimStep, kMostHeadDim at most, as is value_dim
  int32_t value_dim;
  const float* mask;    // added to the scores, a row for each; nullptr: none
  int32_t mask_stride;  // kAttentionKeys; 0: the same for all rows
  // A row to each lane, which adds up in another order than a row at a time.
  bool by_lane;
  // Results, for each row: the largest score, the sum of e^(score - largest), and that of
  // e^(score - largest) * value.
  float* largest;
  float* total;
  float* out;  // [rows][value_dim]
};

// Rows times weights in bf16 that nobody has packed.
struct PlainProducts {
  const std::byte* weights;  // [columns][depth]
  int64_t stride_bytes;      // from one output's to the next
  int32_t columns;           // kBlockColumns at most
  int32_t depth;
  const float* rows;  // [count][2][half]: the even inputs' values, then the odd ones'; then zeros
  int32_t half;       // a multiple of kBlockColumns / 2
  int32_t count;      // kTileRows at most
  float* sums;        // [count][kBlockColumns]
};

// A group of 64 columns while its codes are chosen, part by part. One object serves all groups of a
// block in turn, zeroed before the first: what has to go from a group to the next may stay in it.
struct QuantisedGroup {
  int32_t depth;
  const float* importance;                   // [depth] what the squared error of an input costs
  alignas(64) float scale[kBlockColumns];    // as it will be stored
  alignas(64) float inverse[kBlockColumns];  // 0 where the scale is
  alignas(64) float zero[kBlockColumns];     // of lut4
  alignas(64) float codes[kMaxGroup * kBlockColumns];
};

// Rounds groups to a format so that what one input's rounding got wrong can still change the
// targets of those behind it (pack_calibrated.h). Targets and values are [inputs][kBlockColumns].
struct GroupQuantiser {
  // Chooses the scales, for all targets of the group as they stand before its first input's codes.
  // nullptr: the format has no quantiser of this kind.
  void (*begin)(const float* targets, QuantisedGroup& group);
  // Chooses the codes of input k of the group, for its targets, and says what they stand for.
  void (*quantise)(const float* targets, int32_t k, QuantisedGroup& group, float* values);
  // Writes scales and words.
  void (*finish)(const QuantisedGroup& group, std::byte* to);
};

// What a squared distance of one level costs while codes of a trellis are chosen.
inline constexpr float kTrellisDistance = 4;

// One of the streams of a trellis in a block of 64 columns (store/trellis.h), with a code for each
// step.
struct TrellisStream {
  int32_t steps;          // those of padding included
  int32_t group_steps;    // that share a scale
  const float* targets;   // [steps][kBlockColumns]
  const float* units;     // [steps] what a squared distance of one level costs; 0: padding
  const float* scales;    // [steps / group_steps][kBlockColumns], as they are stored
  const float* inverses;  // of these; 0 where a scale is
  uint8_t* codes;         // of a step, 4 * kBlockColumns behind those of the step before
  float* values;          // [steps][kBlockColumns] what the codes stand for
  // States by column: before the first code, which is behind the last one, and behind those that
  // are chosen.
  uint16_t* ring;
  uint16_t* now;
  std::byte* scratch;  // PackTrellis::scratch_bytes
};

struct KernelTable {
  const char* name;

  // From this many rows of one expert on, the tiles below are used, or else the runtime's gemm, if
  // there is one of them. By Format.
  // benchmarks/row_thresholds.py measures these and panel_rows.
  int32_t gemm_rows[kFormats];
  // The table's own products of many rows, in the place of the runtime's gemm: AMX's tiles, or fp8
  // as bf16; nullptr: it has none. They run between begin() and end(), if these are not nullptr, on
  // one thread.
  struct Tiles {
    void (*begin)(const OperandShape& shape) = nullptr;
    void (*end)() = nullptr;
    void (*products[kFormats])(const BlockProducts& products) = {};  // by Format
  };
  Tiles tiles;
  // From this many rows at once on, formats of float products go by panels, which give the same
  // bits; nullptr: none. By Format.
  int32_t panel_rows;
  void (*panels[kFormats])(const BlockProducts& products);

  void (*products[kFormats])(const BlockProducts& products);  // by Format

  void (*plain)(const PlainProducts& products);

  void (*to_floats)(const void* values, ScalarType type, int32_t count, float* floats);
  // kBlockColumns lines that begin `stride` apart -> panel[count][kBlockColumns]; `count` is a
  // multiple of 16.
  void (*transpose)(const float* lines, int64_t stride, int32_t count, float* panel);
  // Writes columns [column, column + count) of one row; both multiples of max(64, group).
  void (*store_operands)(const float* values, int32_t column, int32_t count,
                         const OperandShape& shape, std::byte* row);

  // gate = gate and up combined; up is nullptr for experts without a gate. `count` is a multiple of
  // 64.
  void (*activate)(const Activation& activation, float* gate, const float* up, int32_t count);
  // sums = weight * (sums + bias) over kBlockColumns columns; bias may be nullptr.
  void (*finish)(float* sums, const float* bias, float weight);

  void (*attend)(const AttentionPart& part);

  // square[k][column], fp32. By Format.
  void (*unfold[kFormats])(const SquareOfBlock& from, float* square);
  // sums[row][kSquare] += row · square. A row's bits depend on itself and the square alone.
  void (*multiply_square)(const float* square, const SquareRows& rows, float* sums);

  // sums[j] += values · row j of a, over `count` values.
  void (*low_rank_in)(const float* values, int32_t count, const float* a, int64_t stride,
                      int32_t rank, float* sums);
  // sums += factors · b, over `columns` columns.
  void (*low_rank_out)(const float* factors, int32_t rank, const float* b, int64_t stride,
                       int32_t columns, float* sums);

  // panel[depth][kBlockColumns] -> one group of a block (the whole block for bf16, whose `depth` is
  // even). By Format; nullptr: it is made of codes, or of a trellis.
  void (*pack_group[kFormats])(const float* panel, int32_t depth, std::byte* group);

  // panel[depth_padded][kBlockColumns], of which `depth` rows count -> a block of a trellis, with
  // scratch_bytes(depth_padded) of scratch, aligned to 64. By format, from Format::kTcq2 on.
  struct PackTrellis {
    int64_t (*scratch_bytes)(int32_t depth_padded);
    void (*pack)(const float* panel, int32_t depth, const PackedMatrix& matrix, std::byte* scratch,
                 std::byte* block);
    // The same part by part, for targets that are changed by what has been chosen. A ring begins
    // where its two ends meet best for the targets as they stand.
    void (*begin)(const TrellisStream& stream);
    // Looks for the best path through steps [first, first + count) and keeps the codes of the
    // first `kept`. Steps have to be kept in turn, the last ones with the stream's end in sight.
    void (*choose)(const TrellisStream& stream, int32_t first, int32_t count, int32_t kept);
    // codes[depth_padded][kBlockColumns] -> the block's words; its scales stay.
    void (*store)(const uint8_t* codes, const PackedMatrix& matrix, std::byte* block);
  };
  PackTrellis pack_trellis[kFormats - static_cast<int>(Format::kTcq2)];

  GroupQuantiser quantisers[kFormats];  // by Format
  // targets[row] += sum of feedback[row * stride + i] * errors[i] over `count` errors; rows of
  // kBlockColumns.
  void (*feed_forward)(const float* errors, int32_t count, const float* feedback, int64_t stride,
                       int32_t rows, float* targets);
};

extern const KernelTable kScalarTable;
#if defined(__x86_64__)
extern const KernelTable kAvx2Table;
extern const KernelTable kAvxVnniTable;
extern const KernelTable kAvx512Table;
extern const KernelTable kAvx512VnniTable;
extern const KernelTable kAvx512Bf16Table;
extern const KernelTable kAmxTable;
extern const KernelTable kIntelBf16Table;  // the same bits, for cores that gain by prefetching
#endif

}  // namespace torch_mesh
