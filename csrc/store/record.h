// The packed layout of one expert, the unit that a promotion reads with a single request.
//
// A record is   gate_up | down | gate_up bias | down bias | zeros up to 4 KiB.
// A projection is a row of blocks; a block is 64 output columns, contiguous along depth (K), so
// that one thread streams it front to back. A block is a row of groups; a group of an integer
// format is
//   64 bf16 scales | its words,
// and a bf16 block is words alone. A word is 32 bits and holds the next k-values of one column:
//   bf16: 2 values                        [K/2][64] words
//   int8: 4 signed bytes                  [group/4][64] words
//   int4: k0..3 in the low nibbles of its bytes, k4..7 in the high ones, each value + 8
//                                         [group/8][64] words
//   lut4: as int4, but a nibble names one of 16 unevenly spaced levels, and the lowest mantissa
//   bits of the group's scale (which is a bf16 number all the same) say which point among them is
//   zero:
//     weight = scale * (kLut4Levels[nibble] - lut4_zero(scale's bits))
//   The scale's sign matters: it mirrors the levels.
// which is the operand order of VNNI, AVX512-BF16, AMX and torch's brgemm. In a gated record gate
// block j stands beside up block j: blocks are g0 u0 g1 u1 ... Columns are zero-padded to 64 and
// depth to max(64, group).
#pragma once

#include <cstddef>
#include <cstdint>
#include <string_view>

namespace torch_mesh {

enum class Format : uint8_t { kBf16 = 0, kInt8 = 1, kInt4 = 2, kLut4 = 3 };

inline constexpr int kFormats = 4;

inline constexpr int32_t kBlockColumns = 64;
inline constexpr int64_t kRecordAlignment = 4096;

constexpr int64_t round_up(int64_t value, int64_t multiple) {
  return (value + multiple - 1) / multiple * multiple;
}

// Minimise the error of Gaussian weights in groups of 32 (docs/decisions/0010). None exceeds 64, so
// that four products with an activation of at most 127 fit 16 bits.
alignas(16) inline constexpr uint8_t kLut4Levels[16] = {0,  7,  12, 16, 20, 23, 26, 29,
                                                        32, 35, 38, 42, 46, 51, 56, 63};
inline constexpr uint32_t kLut4Zeros = 4;  // a power of two: the scale's lowest bits choose
constexpr uint32_t lut4_zero(uint32_t scale_bits) { return 32 - 2 * (scale_bits % kLut4Zeros); }

struct PackedMatrix {
  Format format;
  int32_t group_size;    // 0 for bf16
  int32_t columns;       // output features, without padding; of one half in a gated gate_up
  int32_t depth;         // input features, without padding
  int32_t blocks;        // 64-column blocks, gate and up counted both
  int32_t depth_padded;  // a multiple of max(64, group_size)
  int64_t group_bytes;   // scales and words of one group; the whole block for bf16
  int64_t block_bytes;

  int32_t groups() const { return group_size == 0 ? 1 : depth_padded / group_size; }
  int64_t scales_bytes() const { return format == Format::kBf16 ? 0 : kBlockColumns * 2; }
  int64_t bytes() const { return blocks * block_bytes; }

  // `halves` matrices of `columns` x `depth` side by side, block by block. Throws Error(kInvalid)
  // for a size or group that the format does not know: group_size is one of 32, 64, 128 for
  // integers and ignored for bf16; sizes are in [1, 2^20].
  static PackedMatrix make(Format format, int32_t group_size, int32_t columns, int32_t depth,
                           int32_t halves = 1);
};

struct RecordLayout {
  Format format;
  int32_t group_size;
  int32_t hidden;
  int32_t intermediate;
  bool gated;
  bool bias;
  PackedMatrix gate_up;
  PackedMatrix down;
  int64_t gate_up_offset;
  int64_t down_offset;
  int64_t gate_up_bias_offset;  // float[(gated ? 2 : 1) * intermediate], gate first; -1: none
  int64_t down_bias_offset;     // float[hidden]; -1: none
  int64_t bytes;                // a multiple of kRecordAlignment

  int32_t halves() const { return gated ? 2 : 1; }

  // Throws what PackedMatrix::make throws.
  static RecordLayout make(Format format, int32_t group_size, int32_t hidden, int32_t intermediate,
                           bool gated, bool bias);
};

Format format_from_name(
    std::string_view name);  // "bf16", "int8", "int4", "lut4"; else Error(kInvalid)
const char* format_name(Format format);

}  // namespace torch_mesh
