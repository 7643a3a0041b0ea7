#include "kernels/pack_codes.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <string>

#include "base/error.h"
#include "kernels/kernel_table.h"
#include "kernels/pack_gguf.h"
#include "kernels/small_floats.h"

namespace torch_mesh {
namespace {

[[noreturn]] void refuse(Format format, const std::string& what) {
  throw_invalid(format_name(format), " cannot hold ", what);
}

// Whether codes are bytes, not nibbles.
bool has_byte_codes(Format format) {
  return format == Format::kInt8 || format == Format::kInt8Fp16 || format == Format::kFp8;
}

// Offsets of a block's rows, computed once: a division for each group would cost more than its
// codes.
struct RowOffsets {
  int32_t count;
  int64_t of_codes[kBlockColumns];
  int64_t of_scales[kBlockColumns];

  RowOffsets(const CodesView& view, int32_t first_row, int32_t rows) : count(rows) {
    for (int32_t i = 0; i < rows; ++i) {
      const int64_t row = int64_t{first_row} + i;
      of_codes[i] = row * view.row_bytes;
      of_scales[i] = (view.first_row + row) / view.scales.rows * view.scales.row_bytes;
    }
  }
};

bool is_number(ScaleType type, const std::byte* from) {
  switch (type) {
    case ScaleType::kBf16:
      return (read_as<uint16_t>(from) & 0x7f80) != 0x7f80;
    case ScaleType::kFp16:
      return (read_as<uint16_t>(from) & 0x7c00) != 0x7c00;
    case ScaleType::kFp32:
      return std::isfinite(read_as<float>(from));
    case ScaleType::kE8m0:
      return *from != std::byte{255};
    case ScaleType::kE4m3:
      return (*from & std::byte{0x7f}) != std::byte{0x7f};
  }
  return false;
}

// Whether a checkpoint's scales of `type` are rounded to the record's. Integers have bf16 or fp16
// scales, and only bf16 has the range of all others.
bool rounds_scales(const PackedMatrix& matrix, ScaleType type) {
  return matrix.scale_type() == ScaleType::kBf16 &&
         (type == ScaleType::kFp16 || type == ScaleType::kFp32);
}

// Writes the scales of a block's rows at k-value `column`, in the record's own type.
template <ScaleType kType>
void put_scales_of(const PackedMatrix& matrix, const CodesView& view, const RowOffsets& offsets,
                   int64_t column, std::byte* to) {
  constexpr auto kBytes = static_cast<size_t>(scale_bytes(kType));
  const std::byte* from =
      view.scales.data + column / view.scales.columns * view.scales.column_bytes;
  const bool widen = matrix.scale_type() == ScaleType::kFp32;
  const bool round = rounds_scales(matrix, kType);
  for (int32_t i = 0; i < offsets.count; ++i) {
    const std::byte* scale = from + offsets.of_scales[i];
    if (!is_number(kType, scale)) refuse(matrix.format, "a scale that is not a finite number");
    if (widen) {
      const float value = scale_value(kType, scale);
      std::memcpy(to, &value, sizeof(value));
      to += sizeof(value);
      continue;
    }
    if (round) {
      const uint16_t value = nearest_bf16(scale_value(kType, scale));
      std::memcpy(to, &value, sizeof(value));
      if (!is_number(ScaleType::kBf16, to)) refuse(matrix.format, "a scale beyond bf16's range");
      to += sizeof(value);
      continue;
    }
    if (kType == ScaleType::kE4m3 && (*scale & std::byte{0x80}) != std::byte{0}) {
      refuse(matrix.format, "a scale below zero");
    }
    std::memcpy(to, scale, kBytes);
    to += kBytes;
  }
}

void put_scales(const PackedMatrix& matrix, const CodesView& view, const RowOffsets& offsets,
                int64_t column, std::byte* to) {
  switch (view.scales.type) {
    case ScaleType::kBf16:
      return put_scales_of<ScaleType::kBf16>(matrix, view, offsets, column, to);
    case ScaleType::kFp16:
      return put_scales_of<ScaleType::kFp16>(matrix, view, offsets, column, to);
    case ScaleType::kFp32:
      return put_scales_of<ScaleType::kFp32>(matrix, view, offsets, column, to);
    case ScaleType::kE8m0:
      return put_scales_of<ScaleType::kE8m0>(matrix, view, offsets, column, to);
    case ScaleType::kE4m3:
      return put_scales_of<ScaleType::kE4m3>(matrix, view, offsets, column, to);
  }
}

void check_scales(const PackedMatrix& matrix, const CodesView& view) {
  const ScalesView& scales = view.scales;
  if (scales.data == nullptr || scales.rows < 1 || scales.columns < 1) {
    refuse(matrix.format, "codes without scales");
  }
  if (matrix.scale_type() != ScaleType::kFp32 && scales.type != matrix.scale_type() &&
      !rounds_scales(matrix, scales.type)) {
    refuse(matrix.format, "scales of another type");
  }
  // In fp8 with groups of 128 all columns of a block share a group's scale.
  const bool whole = matrix.format == Format::kFp8 && matrix.group_size == 128;
  const int32_t group = matrix.group_size == 0 ? matrix.depth : matrix.group_size;
  const bool alike =
      !whole || (scales.rows % kBlockColumns == 0 && view.first_row % kBlockColumns == 0) ||
      view.first_row / scales.rows == (int64_t{view.first_row} + matrix.columns - 1) / scales.rows;
  if (!alike || (scales.columns % group != 0 && scales.columns < matrix.depth)) {
    refuse(matrix.format, "a scale for " + std::to_string(scales.rows) + " x " +
                              std::to_string(scales.columns) + " weights in groups of " +
                              std::to_string(group));
  }
  const bool bytes = has_byte_codes(matrix.format);
  if ((view.order == CodeOrder::kBytes) != bytes || (!bytes && view.flip != 0)) {
    refuse(matrix.format, "codes of another number of bits");
  }
  if (!bytes && view.run % 8 != 0) {
    refuse(matrix.format, "nibbles in runs of " + std::to_string(view.run));
  }
}

// Loads codes of a run from the `within`-th on, a byte each.
void load_part(const CodesView& view, const std::byte* run, int32_t within, int32_t count,
               uint8_t* __restrict codes) {
  const auto* bytes = reinterpret_cast<const uint8_t*>(run);
  const int32_t half = view.run / 2;
  switch (view.order) {
    case CodeOrder::kBytes:
      for (int32_t i = 0; i < count; ++i) codes[i] = bytes[within + i] ^ view.flip;
      return;
    case CodeOrder::kPairs:
      bytes += within / 2;
      for (int32_t i = 0; i < count / 2; ++i) {
        const auto two = static_cast<uint16_t>((bytes[i] | bytes[i] << 4) & 0x0f0f);
        std::memcpy(codes + 2 * i, &two, sizeof(two));
      }
      if (count % 2 != 0) codes[count - 1] = bytes[count / 2] & 15;
      return;
    case CodeOrder::kHalves: {
      const int32_t low = std::clamp(half - within, 0, count);
      for (int32_t i = 0; i < low; ++i) codes[i] = bytes[within + i] & 15;
      for (int32_t i = low; i < count; ++i) codes[i] = bytes[within + i - half] >> 4;
      return;
    }
    case CodeOrder::kBlocks:  // pack_gguf.h
      return;
  }
}

// A step of k-values, and where it begins in every row.
struct Step {
  int64_t run;     // offset in bytes of the run that it begins in
  int32_t within;  // index of its first code in that run
  int32_t count;   // codes without padding
  int32_t depth;   // and with padding

  Step(const PackedMatrix& matrix, const CodesView& view, int32_t first, int32_t depth)
      : run(first / view.run * view.run_bytes),
        within(first % view.run),
        count(std::clamp(matrix.depth - first, 0, depth)),
        depth(depth) {}
};

// The codes of one row of a step, one or two cache lines, padded with the code of zero.
struct Line {
  alignas(64) uint8_t codes[kMaxGroup];

  void load(const PackedMatrix& matrix, const CodesView& view, const Step& step,
            const std::byte* row) {
    const std::byte* run = row + step.run;
    int32_t within = step.within;
    for (int32_t done = 0; done < step.count; run += view.run_bytes, within = 0) {
      const int32_t part = std::min(step.count - done, view.run - within);
      load_part(view, run, within, part, codes + done);
      done += part;
    }
    if (step.count == step.depth) return;
    const bool offset = matrix.format == Format::kInt4 || matrix.format == Format::kInt4Fp16;
    std::memset(codes + step.count, offset ? 8 : 0, static_cast<size_t>(step.depth - step.count));
  }
};

// Writes words of four bytes, or of eight nibbles, into a column of a group.
void put_words(const PackedMatrix& matrix, const uint8_t* line, int32_t column, std::byte* words) {
  const auto* codes = reinterpret_cast<const std::byte*>(line);
  std::byte* to = words + column * 4;
  if (has_byte_codes(matrix.format)) {
    for (int32_t k = 0; k < matrix.group_size; k += 4, to += kBlockColumns * 4) {
      std::memcpy(to, codes + k, 4);
    }
    return;
  }
  for (int32_t k = 0; k < matrix.group_size; k += 8, to += kBlockColumns * 4) {
    const auto eight = read_as<uint64_t>(codes + k);
    const auto word = static_cast<uint32_t>(eight | eight >> 28);
    std::memcpy(to, &word, sizeof(word));
  }
}

void put_factors(const PackedMatrix& matrix, const CodesView& view, std::byte* header) {
  const float factor = view.factor == nullptr ? 1.0f : read_as<float>(view.factor);
  const float divisor = view.divisor == nullptr ? 1.0f : read_as<float>(view.divisor);
  if (!std::isfinite(factor) || !std::isfinite(divisor) || !std::isfinite(factor / divisor))
    refuse(matrix.format, "a factor that is no finite number");
  std::memcpy(header, &factor, sizeof(factor));
  std::memcpy(header + sizeof(factor), &divisor, sizeof(divisor));
}

void pack_groups(const PackedMatrix& matrix, const CodesView& view, const RowOffsets& offsets,
                 std::byte* block) {
  std::byte* group = block + matrix.header_bytes;
  Line line;
  for (int32_t first = 0; first < matrix.depth_padded; first += kMaxGroup) {
    const Step step(matrix, view, first, std::min(kMaxGroup, matrix.depth_padded - first));
    const int32_t groups = step.depth / matrix.group_size;
    for (int32_t g = 0; g < groups; ++g) {
      const int32_t k = first + g * matrix.group_size;
      if (k < matrix.depth) put_scales(matrix, view, offsets, k, group + g * matrix.group_bytes);
    }
    std::byte* words = group + matrix.scales_bytes();
    for (int32_t column = 0; column < offsets.count; ++column) {
      line.load(matrix, view, step, view.data + offsets.of_codes[column]);
      for (int32_t g = 0; g < groups; ++g) {
        put_words(matrix, line.codes + g * matrix.group_size, column,
                  words + g * matrix.group_bytes);
      }
    }
    group += groups * matrix.group_bytes;
  }
}

// Whether one of eight codes of fp8 is not a number, which has seven ones below the sign.
bool holds_nan(uint64_t eight) {
  constexpr uint64_t kEachByte = 0x0101010101010101;
  return (((eight & 0x7f * kEachByte) + kEachByte) & 0x80 * kEachByte) != 0;
}

// Writes eight codes of each of four columns, in pairs: `rows` are the columns' codes.
void put_pairs(const uint64_t rows[4], std::byte* to) {
  constexpr uint64_t kEven = 0x0000ffff0000ffff;  // pairs 0 and 2
  constexpr uint64_t kFirst = 0xffffffff;         // pair 0 or 1 of two columns
  const auto even = [&](int32_t i) { return (rows[i] & kEven) | (rows[i + 1] & kEven) << 16; };
  const auto odd = [&](int32_t i) { return (rows[i] >> 16 & kEven) | (rows[i + 1] & ~kEven); };
  const uint64_t pairs[4] = {(even(0) & kFirst) | even(2) << 32, (odd(0) & kFirst) | odd(2) << 32,
                             even(0) >> 32 | (even(2) & ~kFirst),
                             odd(0) >> 32 | (odd(2) & ~kFirst)};
  for (const uint64_t four : pairs) {
    std::memcpy(to, &four, sizeof(four));
    to += kBlockColumns * 2;
  }
}

void pack_fp8_scales(const PackedMatrix& matrix, const CodesView& view, RowOffsets offsets,
                     std::byte* header) {
  if (matrix.group_size == 128) offsets.count = 1;  // one scale for all columns
  const int64_t each =
      matrix.group_size == 128 ? 4 : kBlockColumns * scale_bytes(matrix.scale_type());
  const int32_t deep = matrix.group_size == 0 ? matrix.depth : matrix.group_size;
  for (int32_t k = 0; k < matrix.depth; k += deep, header += each) {
    put_scales(matrix, view, offsets, k, header);
  }
}

void pack_fp8(const PackedMatrix& matrix, const CodesView& view, const RowOffsets& offsets,
              std::byte* block) {
  pack_fp8_scales(matrix, view, offsets, block);
  Line lines[4] = {};
  for (int32_t k = 0; k < matrix.depth_padded; k += kBlockColumns) {
    const Step step(matrix, view, k, kBlockColumns);
    std::byte* to = block + matrix.header_bytes + int64_t{k} * kBlockColumns;
    for (int32_t column = 0; column < offsets.count; column += 4) {
      const int32_t columns = std::min(offsets.count - column, 4);
      for (int32_t i = 0; i < columns; ++i) {
        lines[i].load(matrix, view, step, view.data + offsets.of_codes[column + i]);
      }
      for (int32_t i = columns; i < 4; ++i) lines[i] = {};
      for (int32_t i = 0; i < kBlockColumns; i += 8) {
        uint64_t rows[4];
        for (int32_t j = 0; j < 4; ++j) {
          std::memcpy(rows + j, lines[j].codes + i, sizeof(rows[j]));
          if (holds_nan(rows[j])) refuse(matrix.format, "a weight that is not a number");
        }
        put_pairs(rows, to + int64_t{i} * kBlockColumns + column * 2);
      }
    }
  }
}

// Throws Error(kInvalid) for a format whose records are not made of a code for each weight.
void check_has_codes(Format format) {
  if (has_codes_of_weights(format)) return;
  std::string allowed;
  for (int other = 0; other < kFormats; ++other) {
    if (!has_codes_of_weights(static_cast<Format>(other))) continue;
    allowed += (allowed.empty() ? "" : ", ") + std::string(format_name(static_cast<Format>(other)));
  }
  refuse(format, "the codes of another format; allowed for codes: " + allowed);
}

}  // namespace

void check_codes(const PackedMatrix& matrix, const CodesView& view) {
  check_has_codes(matrix.format);
  if (is_gguf(matrix.format) != (view.order == CodeOrder::kBlocks)) {
    refuse(matrix.format, is_gguf(matrix.format) ? "codes that are no blocks of its type"
                                                 : "blocks of GGUF whose scales are products");
  }
  if (is_gguf(matrix.format)) return;
  check_scales(matrix, view);
  for (int64_t i = 0; view.zeros != nullptr && i < view.zeros_bytes; ++i) {
    if (static_cast<uint8_t>(view.zeros[i]) != view.zero)
      refuse(matrix.format, "zero points; weights=\"int8\" or \"bf16\" takes them");
  }
  for (int32_t k = 0; view.group_index != nullptr && k < matrix.depth; ++k) {
    if (read_as<int32_t>(view.group_index + int64_t{4} * k) != k / view.scales.columns) {
      refuse(matrix.format,
             "groups in an order of their own; weights=\"int8\" or \"bf16\" takes them");
    }
  }
}

void pack_codes(const PackedMatrix& matrix, const CodesView& view, int32_t first_row,
                std::byte* block) {
  if (is_gguf(matrix.format)) return pack_gguf(matrix, view, first_row, block);
  const RowOffsets offsets(view, first_row, std::min(matrix.columns - first_row, kBlockColumns));
  const bool whole = offsets.count == kBlockColumns && matrix.depth == matrix.depth_padded;
  std::memset(block, 0, static_cast<size_t>(whole ? matrix.header_bytes : matrix.block_bytes));
  if (matrix.format == Format::kFp8) {
    pack_fp8(matrix, view, offsets, block);
    return;
  }
  if (matrix.header_bytes > 0) put_factors(matrix, view, block);
  pack_groups(matrix, view, offsets, block);
}

}  // namespace torch_mesh
