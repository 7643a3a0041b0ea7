// The kernels of one instruction set. Each table is filled by a translation unit of its own,
// compiled with that set's flags. The table is its only symbol with external linkage. Otherwise the
// linker could pick its copy of a shared inline function for a processor that lacks the
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
// weights, so the block is streamed from memory once for all.
inline constexpr int32_t kTileRows = 48;
inline constexpr int32_t kMaxGroup = 128;
inline constexpr int32_t kNoRows = INT32_MAX;  // threshold for "never"

// Activations in the operand form of the products, one row after the other:
//   floats:   depth_padded values of bf16
//   integers: depth_padded signed bytes, the float scale of each group, then the int32 sum of
//   each group or, for types of GGUF with mins, the float factor of its min: minus the scale
//   times the sum
struct OperandShape {
  Format format;
  int32_t group_size;
  int32_t depth_padded;
  int64_t row_bytes;    // a multiple of 64
  int64_t block_bytes;  // from a block to the next one
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
  float* sums;  // [rows][kBlockColumns]
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
  int32_t columns;  // kSquare at most; the rest counts as zero
  int32_t count;
};

// The name of a weight of bf12 whose upper byte is not in the table.
inline constexpr uint8_t kBf12NoName = 0xff;

// The most keys and rows of one task of attention: its scores are 16 KiB.
inline constexpr int32_t kAttentionKeys = 256;
inline constexpr int32_t kAttentionRows = 16;
inline constexpr int32_t kHeadDimStep = 16;
inline constexpr int32_t kMaxHeadDim = 256;

// Query rows that share their keys, over a run of keys.
struct AttentionPart {
  const float* queries;  // [rows][key_dim], times the scale
  int32_t rows;          // 1 to kAttentionRows
  ConstRows keys;        // [count][key_dim]
  ConstRows values;      // [count][value_dim]
  int32_t count;         // 1 to kAttentionKeys
  int32_t key_dim;       // a multiple of kHeadDimStep, kMaxHeadDim at most, as is value_dim
  int32_t value_dim;
  const float* mask;    // added to the scores, a row for each; nullptr: none
  int32_t mask_stride;  // kAttentionKeys; 0: the same for all rows
  // One row per lane: sums are added in another order than one row at a time.
  bool by_lane;
  // Results, for each row: the largest score, the sum of e^(score - largest), and that of
  // e^(score - largest) * value.
  float* largest;
  float* total;
  float* out;  // [rows][value_dim]
};

// Rows times weights in bf16 that are not packed.
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

// A group of 64 columns while its codes are chosen, input by input. One object serves all groups of
// a block in turn. It is zeroed before the first, and may carry state from a group to the next.
struct QuantizedGroup {
  int32_t depth;
  const float* importance;                   // [depth] weights of the inputs' squared errors
  alignas(64) float scale[kBlockColumns];    // as it will be stored
  alignas(64) float inverse[kBlockColumns];  // 0 where the scale is
  alignas(64) float zero[kBlockColumns];     // of lut4
  alignas(64) float codes[kMaxGroup * kBlockColumns];
};

// Rounds groups to a format input by input, so that an input's rounding error can change the
// targets of later inputs (pack_calibrated.h). Targets and values are [inputs][kBlockColumns].
struct GroupQuantizer {
  // Chooses the scales from all targets of the group, before its first input's codes. nullptr: the
  // format has no quantizer of this kind.
  void (*begin)(const float* targets, QuantizedGroup& group) = nullptr;
  // Chooses the codes of input k of the group for its targets, and writes their values.
  void (*quantize)(const float* targets, int32_t k, QuantizedGroup& group, float* values) = nullptr;
  // Writes scales and words.
  void (*finish)(const QuantizedGroup& group, std::byte* to) = nullptr;
};

// The cost of a squared distance of one level while codes of a trellis are chosen.
inline constexpr float kTrellisDistance = 4;

// One of the streams of a trellis in a block of 64 columns (store/trellis.h), with a code for each
// step.
struct TrellisStream {
  int32_t steps;          // including padding
  int32_t group_steps;    // steps that share a scale
  const float* targets;   // [steps][kBlockColumns]
  const float* units;     // [steps] cost of a squared distance of one level; 0: padding
  const float* scales;    // [steps / group_steps][kBlockColumns], as they are stored
  const float* inverses;  // of these; 0 where a scale is
  uint8_t* codes;         // a step's are 4 * kBlockColumns after those of the one before
  float* values;          // [steps][kBlockColumns] of the codes
  // States by column: `ring` before the first code, which is also that after the last one; `now`
  // after the codes that are chosen.
  uint16_t* ring;
  uint16_t* now;
  std::byte* scratch;  // TrellisPacking::scratch_bytes
};

// Packs blocks of a trellis, whose codes depend on their whole stream. Needs
// scratch_bytes(depth_padded) bytes of scratch, aligned to 64.
struct TrellisPacking {
  int64_t (*scratch_bytes)(int32_t depth_padded) = nullptr;
  // panel[depth_padded][kBlockColumns], of which `depth` rows count -> a block.
  void (*pack)(const float* panel, int32_t depth, const PackedMatrix& matrix, std::byte* scratch,
               std::byte* block) = nullptr;
  // The same in parts, for targets that depend on the codes chosen before. begin() chooses the
  // state in which a ring's two ends meet best for the present targets.
  void (*begin)(const TrellisStream& stream) = nullptr;
  // Finds the best path through steps [first, first + count) and keeps the codes of the first
  // `kept`. Calls keep the steps in order, up to the stream's end.
  void (*choose)(const TrellisStream& stream, int32_t first, int32_t count, int32_t kept) = nullptr;
  // codes[depth_padded][kBlockColumns] -> the block's words; its scales stay.
  void (*store)(const uint8_t* codes, const PackedMatrix& matrix, std::byte* block) = nullptr;
};

// A format's kernels, which its FormatTrait names (table-inl.h).
struct FormatKernels {
  // From this many rows of one expert on, `tiles` are used. benchmarks/row_thresholds.py measures
  // tile_rows and panel_rows.
  int32_t tile_rows;
  void (*products)(const BlockProducts& products);
  // Products of many rows in AMX's tiles, or of fp8 as bf16. nullptr: none.
  void (*tiles)(const BlockProducts& products);
  // Products of panel_rows or more rows at once, which give the same bits. nullptr: none.
  void (*panels)(const BlockProducts& products) = nullptr;
  // Products of one row with two blocks, read at once, which give the same bits. nullptr: none.
  void (*pair)(const BlockProducts& first, const BlockProducts& second) = nullptr;

  // square[k][column], fp32.
  void (*dequantize)(const SquareOfBlock& from, float* square);

  // panel[depth][kBlockColumns] -> one group of a block; for bf16 and bf12 words of bf16, where
  // depth is even. nullptr: a format of codes, or a trellis.
  void (*pack_group)(const float* panel, int32_t depth, std::byte* group) = nullptr;
  TrellisPacking pack_trellis = {};
  GroupQuantizer quantizer = {};
};

struct KernelTable {
  const char* name;

  FormatKernels formats[kFormats];  // by Format
  const FormatKernels& of(Format format) const { return formats[static_cast<int>(format)]; }

  // Called before and after FormatKernels::tiles, on the same thread, if not nullptr.
  struct Tiles {
    void (*begin)(const OperandShape& shape);
    void (*end)();
  };
  Tiles tiles;
  // From this many rows at once on, formats of float products use panels.
  int32_t panel_rows;

  void (*plain)(const PlainProducts& products);

  void (*to_floats)(const void* values, ScalarType type, int32_t count, float* floats);
  // kBlockColumns lines that begin `stride` apart -> panel[count][kBlockColumns]; `count` is a
  // multiple of 16.
  void (*transpose)(const float* lines, int64_t stride, int32_t count, float* panel);
  // Packs a row of a tile of bf12: kBf12RowWeights weights in bf16, to their lower bytes and
  // nibbles. A weight's name is the index of its upper byte among the first `named` of `table`, or
  // kBf12NoName. Writes `names` in the order of the record's lower bytes. Returns whether any is
  // kBf12NoName.
  bool (*pack_bf12_row)(const uint8_t* words, const uint8_t* table, int32_t named, uint8_t* to,
                        uint8_t* names);
  // Writes columns [column, column + count) of one row; both multiples of max(64, group).
  void (*store_operands)(const float* values, int32_t column, int32_t count,
                         const OperandShape& shape, std::byte* row);

  // gate = gate and up combined; up is nullptr for experts without a gate. `count` is a multiple of
  // 64.
  void (*activate)(const Activation& activation, float* gate, const float* up, int32_t count);
  // sums = weight * (sums + bias) over kBlockColumns columns; bias may be nullptr.
  void (*finish)(float* sums, const float* bias, float weight);

  void (*attend)(const AttentionPart& part);

  // sums[row][kSquare] += row · square. A row's bits depend on itself and the square alone.
  void (*multiply_square)(const float* square, const SquareRows& rows, float* sums);

  // sums[j] += values · row j of a, over `count` values.
  void (*low_rank_in)(const float* values, int32_t count, const float* a, int64_t stride,
                      int32_t rank, float* sums);
  // sums += factors · b, over `columns` columns.
  void (*low_rank_out)(const float* factors, int32_t rank, const float* b, int64_t stride,
                       int32_t columns, float* sums);

  // targets[row] += sum of feedback[row * stride + i] * errors[i] over `count` errors; rows of
  // kBlockColumns.
  void (*feed_forward)(const float* errors, int32_t count, const float* feedback, int64_t stride,
                       int32_t rows, float* targets);
};

extern const KernelTable kScalarTable;
#if defined(__x86_64__)
extern const KernelTable kAvx2Table;
extern const KernelTable kAmdAvx2Table;  // the same bits, prefetched for AMD's cores
extern const KernelTable kAvxVnniTable;
extern const KernelTable kAvx512Table;
extern const KernelTable kAvx512VnniTable;
extern const KernelTable kAvx512Bf16Table;
extern const KernelTable kZen4Bf16Table;  // the same bits, prefetched for Zen 4
extern const KernelTable kAmxTable;
#endif

}  // namespace torch_mesh
