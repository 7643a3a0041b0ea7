// The packed layout of one expert, the unit that a promotion reads with a single request.
//
// A record is   gate_up | down | gate_up bias | down bias | zeros up to 4 KiB.
// gate_up may be tcq2 beside a down of tcq3 (docs/decisions/0065), or of one type of GGUF beside a
// down of another; else they have one format.
// A projection is a row of blocks; a block is 64 output columns, contiguous along depth (K), so
// that one thread streams it front to back. A block is a row of groups; a group of an integer
// format is
//   64 bf16 scales | its words,
// and a bf16 block is words alone. A word is 32 bits and holds the next k-values of one column:
//   bf16: 2 values                        [K/2][64] words
//   bf12: the same in three quarters of the bytes, store/bf12.h
//   int8: 4 signed bytes                  [group/4][64] words
//   int4: k0..3 in the low nibbles of its bytes, k4..7 in the high ones, each value + 8
//                                         [group/8][64] words
//   lut4: as int4, but a nibble names one of 16 unevenly spaced levels, and the lowest mantissa
//   bits of the group's scale (which is a bf16 number all the same) say which point among them is
//   zero:
//     weight = scale * (kLut4Levels[nibble] - lut4_zero(scale's bits))
//   The scale's sign matters: it mirrors the levels.
// which is the operand order of VNNI, AVX512-BF16 and AMX. In a gated record gate
// block j stands beside up block j: blocks are g0 u0 g1 u1 ... Columns are zero-padded to 64 and
// depth to max(64, group).
//
// These hold the codes of a checkpoint that was quantized before (docs/decisions/0044):
//   int8_fp16, int4_fp16: as int8 and int4, with fp16 scales
//   mxfp4: words as int4's, a nibble being an E2M1 number; 64 E8M0 scales, a byte each, per 32.
//          Byte 0, 2^-127, counts as zero in products; 255 is in no record.
//   nvfp4: the same with 64 E4M3 scales, which have no sign, per 16. A block begins with 64 bytes:
//          a float that multiplies its scales, and one that divides them (1 where none does).
//   fp8:   E4M3 bytes, two k-values of a column beside each other: [K/2][64] pairs. A block begins
//          with its scales, filled up to 64 bytes:
//            group 128: a float for each 128 k-values of the block; group 0: one for each column;
//            group 32:  64 E8M0 bytes for each 32 k-values
//   q2_k to q6_k, iq1_s to iq4_xs, q4_1, q5_0, q5_1: GGUF's types of these names,
//          store/gguf_types.h
//
// These have codes of two and three bits, each of which determines a weight only with the codes
// before it (store/trellis.h), and the words of 16 columns beside each other:
//   tcq2:  [4][group/16][16] words; code j of stream s of 16 k-values is in bits 2j of byte s
//   tcq3:  [4][group/32][3][16] words: two with the codes' upper two bits, laid out as tcq2's, for
//          16 k-values each, and one with their lowest bits: code j of stream s of 32 k-values in
//          bit j of byte s
#pragma once

#include <cstdint>
#include <string_view>
#include <vector>

#include "store/bf12.h"

namespace torch_mesh {

enum class Format : uint8_t {
  kBf16,
  kBf12,
  kInt8,
  kInt4,
  kLut4,
  kInt8Fp16,
  kInt4Fp16,
  kMxfp4,
  kNvfp4,
  kFp8,
  kQ4_1,
  kQ5_0,
  kQ5_1,
  kQ2K,
  kQ3K,
  kQ4K,
  kQ5K,
  kQ6K,
  kIq4Nl,
  kIq4Xs,
  kIq3Xxs,
  kIq3S,
  kIq2Xxs,
  kIq2Xs,
  kIq2S,
  kIq1S,
  kIq1M,
  kTcq2,
  kTcq3,
};

inline constexpr int kFormats = 29;
inline constexpr Format kFirstGguf = Format::kQ4_1;
inline constexpr int kGgufTypes = 17;

enum class ScaleType : uint8_t { kBf16, kFp16, kFp32, kE8m0, kE4m3 };

constexpr int64_t scale_bytes(ScaleType type) {
  return type == ScaleType::kFp32                               ? 4
         : type == ScaleType::kE8m0 || type == ScaleType::kE4m3 ? 1
                                                                : 2;
}

// Formats that hold every number of bf16, with the same products.
constexpr bool is_bf16(Format format) { return format == Format::kBf16 || format == Format::kBf12; }
// Formats multiplied as floats, by activations in bf16; the others by activations in int8.
constexpr bool has_float_products(Format format) {
  return is_bf16(format) || format == Format::kFp8;
}
// Formats made of a checkpoint's own codes and scales: no weight is rounded to them.
constexpr bool is_made_of_codes(Format format) {
  return format > Format::kLut4 && format < Format::kTcq2;
}
constexpr bool is_trellis(Format format) { return format >= Format::kTcq2; }
// Blocks of GGUF with scales that are products: store/gguf_types.h.
constexpr bool is_gguf(Format format) { return format >= kFirstGguf && format < Format::kTcq2; }
// Whether records of this format hold the codes of a type of GGUF, in a layout of its own or not.
constexpr bool holds_gguf_codes(Format format) {
  return is_gguf(format) || format == Format::kInt4Fp16 || format == Format::kInt8Fp16 ||
         format == Format::kMxfp4;
}
static_assert(static_cast<int>(Format::kTcq2) - static_cast<int>(kFirstGguf) == kGgufTypes);
// Formats with a code for each weight, beside scales: their records can be made of a checkpoint's
// own codes.
constexpr bool has_codes_of_weights(Format format) {
  return format == Format::kInt8 || format == Format::kInt4 || is_made_of_codes(format);
}

inline constexpr int32_t kBlockColumns = 64;
inline constexpr int64_t kRecordAlignment = 4096;

constexpr int64_t round_up(int64_t value, int64_t multiple) {
  return (value + multiple - 1) / multiple * multiple;
}

// These levels minimize the error of Gaussian weights in groups of 32 (docs/decisions/0010). None
// exceeds 64, so that four products with an activation of at most 127 fit 16 bits.
alignas(16) inline constexpr uint8_t kLut4Levels[16] = {0,  7,  12, 16, 20, 23, 26, 29,
                                                        32, 35, 38, 42, 46, 51, 56, 63};
inline constexpr uint32_t kLut4Zeros = 4;  // a power of two: the scale's lowest bits choose
constexpr uint32_t lut4_zero(uint32_t scale_bits) { return 32 - 2 * (scale_bits % kLut4Zeros); }

// E2M1 in the same terms: twice each number, above kFp4Zero.
alignas(16) inline constexpr uint8_t kFp4Levels[16] = {12, 13, 14, 15, 16, 18, 20, 24,
                                                       12, 11, 10, 9,  8,  6,  4,  0};
inline constexpr uint32_t kFp4Zero = 12;

// Bytes before a block's first group.
constexpr int64_t block_header_bytes(Format format, int32_t group_size, int32_t depth_padded) {
  if (format == Format::kNvfp4) return 64;
  if (format == Format::kBf12) return depth_padded / kBf12Depth * int64_t{kBf12HeaderBytes};
  if (format != Format::kFp8) return 0;
  if (group_size == 0) return kBlockColumns * 4;
  const int64_t groups = (depth_padded + group_size - 1) / group_size;
  return round_up(groups * (group_size == 32 ? kBlockColumns : 4), 64);
}

struct PackedMatrix {
  Format format;
  int32_t group_size;    // k-values that share a scale; 0: bf16, bf12, fp8 with a scale per column
  int32_t columns;       // output features, without padding; of one half in a gated gate_up
  int32_t depth;         // input features, without padding
  int32_t blocks;        // 64-column blocks, gate and up counted both
  int32_t depth_padded;  // a multiple of 64, and of the group of an integer format
  int64_t header_bytes;  // of a block, before its first group
  // Scales and words of one group; all words of the block for bf16, bf12 and fp8; a stretch of
  // GGUF's.
  int64_t group_bytes;
  int64_t block_bytes;

  int32_t groups() const {
    return group_size == 0 ? 1 : (depth_padded + group_size - 1) / group_size;
  }
  // Bytes of a group's scales, which are before its words.
  int64_t scales_bytes() const {
    return has_float_products(format) ? 0 : kBlockColumns * scale_bytes(scale_type());
  }
  ScaleType scale_type() const;
  int64_t bytes() const { return blocks * block_bytes; }

  // `halves` matrices of `columns` x `depth` side by side, block by block. Throws Error(kInvalid)
  // for a size or group that the format does not know: group_size is one of 32, 64, 128 for
  // integers, of 0, 32, 128 for fp8, and ignored for bf16 and bf12 (0), mxfp4 (32), nvfp4 (16) and
  // GGUF's types (16 or 32), whose depth is a multiple of their blocks; sizes are in [1, 2^20].
  static PackedMatrix make(Format format, int32_t group_size, int32_t columns, int32_t depth,
                           int32_t halves = 1);
};

// The formats of a record's projections.
struct RecordFormats {
  Format gate_up;
  Format down;

  RecordFormats(Format both) : gate_up(both), down(both) {}  // NOLINT: a format is the usual case
  RecordFormats(Format gate_up, Format down) : gate_up(gate_up), down(down) {}

  // "tcq2", or "tcq2+tcq3" with gate_up's first. Throws Error(kInvalid) for others.
  static RecordFormats from_name(std::string_view name);

  bool operator==(const RecordFormats&) const = default;
};

// Parses the formats of a model whose layers differ, "q4_k+q6_k|q4_k:0110": up to ten names, and
// for each layer the digit of its own. Returns those of all layers, or a single one if the name is
// of one. Throws Error(kInvalid) for a name that is neither.
std::vector<RecordFormats> formats_of_layers(std::string_view name);

struct RecordLayout {
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
  static RecordLayout make(RecordFormats formats, int32_t group_size, int32_t hidden,
                           int32_t intermediate, bool gated, bool bias);
};

// The layouts of all layers, or a single one if all have the same. Throws what RecordLayout::make
// and formats_of_layers throw.
std::vector<RecordLayout> layouts_of_layers(std::string_view name, int32_t group_size,
                                            int32_t hidden, int32_t intermediate, bool gated,
                                            bool bias);
// The layout that a slot must have room for.
const RecordLayout& largest(const std::vector<RecordLayout>& layouts);

Format format_from_name(std::string_view name);  // throws Error(kInvalid) for others
const char* format_name(Format format);

}  // namespace torch_mesh
