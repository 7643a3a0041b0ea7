#include "kernels/pack_codes.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <string>

#include "base/error.h"
#include "kernels/kernel_table.h"
#include "kernels/small_floats.h"

namespace torch_mesh {
namespace {

[[noreturn]] void refuse(Format format, const std::string& what) {
  throw Error(ErrorKind::kInvalid, std::string(format_name(format)) + " cannot hold " + what);
}

const std::byte* scale_at(const CodesView& view, int32_t row, int32_t column) {
  const ScalesView& scales = view.scales;
  return scales.data + (int64_t{view.first_row} + row) / scales.rows * scales.row_bytes +
         column / scales.columns * scales.column_bytes;
}

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

// One scale into the record's own type.
void put_scale(const PackedMatrix& matrix, const CodesView& view, const std::byte* from,
               std::byte* to) {
  const ScaleType type = view.scales.type;
  if (!is_number(type, from)) refuse(matrix.format, "a scale that is not a finite number");
  if (matrix.scale_type() == ScaleType::kFp32) {
    const float value = scale_value(type, from);
    std::memcpy(to, &value, sizeof(value));
    return;
  }
  if (type == ScaleType::kE4m3 && (*from & std::byte{0x80}) != std::byte{0}) {
    refuse(matrix.format, "a scale below zero");
  }
  std::memcpy(to, from, static_cast<size_t>(scale_bytes(type)));
}

void check_scales(const PackedMatrix& matrix, const CodesView& view) {
  const ScalesView& scales = view.scales;
  if (scales.data == nullptr || scales.rows < 1 || scales.columns < 1) {
    refuse(matrix.format, "codes without scales");
  }
  if (matrix.scale_type() != ScaleType::kFp32 && scales.type != matrix.scale_type()) {
    refuse(matrix.format, "scales of another type");
  }
  // Of fp8 a group's scale is that of all columns of its block.
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
  const bool bytes = matrix.format == Format::kInt8 || matrix.format == Format::kInt8Fp16 ||
                     matrix.format == Format::kFp8;
  if ((view.order == CodeOrder::kBytes) != bytes || (!bytes && view.flip != 0)) {
    refuse(matrix.format, "codes of another number of bits");
  }
  if (!bytes && view.run % 8 != 0) {
    refuse(matrix.format, "nibbles in runs of " + std::to_string(view.run));
  }
}

// `count` codes of one row, a byte each, from k-value `first` on, which begins a run of nibbles or
// lies on a whole byte of pairs.
void load_codes(const CodesView& view, int32_t row, int32_t first, int32_t count, uint8_t* codes) {
  const std::byte* data = view.data + row * view.row_bytes;
  while (count > 0) {
    const int32_t within = first % view.run;
    const int32_t part = std::min(count, view.run - within);
    const std::byte* run = data + first / view.run * view.run_bytes;
    switch (view.order) {
      case CodeOrder::kBytes:
        for (int32_t i = 0; i < part; ++i) {
          codes[i] = static_cast<uint8_t>(run[within + i]) ^ view.flip;
        }
        break;
      case CodeOrder::kPairs:
        for (int32_t i = 0; i + 1 < part; i += 2) {
          const auto pair = static_cast<uint8_t>(run[(within + i) / 2]);
          codes[i] = pair & 15;
          codes[i + 1] = pair >> 4;
        }
        if (part % 2 != 0) codes[part - 1] = static_cast<uint8_t>(run[(within + part) / 2]) & 15;
        break;
      case CodeOrder::kHalves: {
        const int32_t half = view.run / 2;
        if (part == view.run) {
          for (int32_t i = 0; i < half; ++i) {
            const auto pair = static_cast<uint8_t>(run[i]);
            codes[i] = pair & 15;
            codes[half + i] = pair >> 4;
          }
          break;
        }
        for (int32_t i = 0; i < part; ++i) {
          const auto pair = static_cast<uint8_t>(run[(within + i) % half]);
          codes[i] = within + i < half ? pair & 15 : pair >> 4;
        }
        break;
      }
    }
    codes += part;
    first += part;
    count -= part;
  }
}

// The codes of one row of a step, filled up with zeros.
struct Line {
  alignas(64) uint8_t codes[kMaxGroup];

  void load(const PackedMatrix& matrix, const CodesView& view, int32_t row, int32_t first,
            int32_t depth) {
    const int32_t count = std::clamp(matrix.depth - first, 0, depth);
    load_codes(view, row, first, count, codes);
    const bool offset = matrix.format == Format::kInt4 || matrix.format == Format::kInt4Fp16;
    std::memset(codes + count, offset ? 8 : 0, static_cast<size_t>(depth - count));
  }
};

// Words of four bytes, or of eight nibbles, into a column of a group.
void put_words(const PackedMatrix& matrix, const Line& line, int32_t column, std::byte* words) {
  const bool bytes = matrix.format == Format::kInt8 || matrix.format == Format::kInt8Fp16;
  const int32_t step = bytes ? 4 : 8;
  std::byte* to = words + column * 4;
  for (int32_t k = 0; k < matrix.group_size; k += step, to += kBlockColumns * 4) {
    auto word = read_as<uint32_t>(reinterpret_cast<const std::byte*>(line.codes + k));
    if (!bytes) {
      word |= read_as<uint32_t>(reinterpret_cast<const std::byte*>(line.codes + k + 4)) << 4;
    }
    std::memcpy(to, &word, sizeof(word));
  }
}

void pack_groups(const PackedMatrix& matrix, const CodesView& view, int32_t first_row, int32_t rows,
                 std::byte* block) {
  const int64_t each = scale_bytes(matrix.scale_type());
  std::memset(block, 0, static_cast<size_t>(matrix.block_bytes));
  if (matrix.header_bytes > 0) {
    const float factor = view.factor == nullptr ? 1.0f : read_as<float>(view.factor);
    const float divisor = view.divisor == nullptr ? 1.0f : read_as<float>(view.divisor);
    if (!std::isfinite(factor) || !std::isfinite(divisor) || !std::isfinite(factor / divisor))
      refuse(matrix.format, "a factor that is no finite number");
    std::memcpy(block, &factor, sizeof(factor));
    std::memcpy(block + sizeof(factor), &divisor, sizeof(divisor));
  }
  std::byte* group = block + matrix.header_bytes;
  Line line;
  for (int32_t k = 0; k < matrix.depth_padded; k += matrix.group_size) {
    std::byte* words = group + matrix.scales_bytes();
    for (int32_t column = 0; column < rows; ++column) {
      const int32_t row = first_row + column;
      if (k < matrix.depth) {
        put_scale(matrix, view, scale_at(view, row, k), group + column * each);
      }
      line.load(matrix, view, row, k, matrix.group_size);
      put_words(matrix, line, column, words);
    }
    group += matrix.group_bytes;
  }
}

bool holds_nan(const uint8_t* codes, int32_t count) {
  bool found = false;
  for (int32_t i = 0; i < count; ++i) found |= (codes[i] & 0x7f) == 0x7f;
  return found;
}

void pack_fp8_scales(const PackedMatrix& matrix, const CodesView& view, int32_t first_row,
                     int32_t rows, std::byte* header) {
  const int64_t each = scale_bytes(matrix.scale_type());
  for (int32_t k = 0; k < matrix.depth; k += matrix.group_size) {
    for (int32_t column = 0; column < rows; ++column) {
      put_scale(matrix, view, scale_at(view, first_row + column, k), header);
      header += each;
      if (matrix.group_size == 128) break;
    }
    if (matrix.group_size == 0) return;
    if (matrix.group_size == 32) header += (kBlockColumns - rows) * each;
  }
}

void pack_fp8(const PackedMatrix& matrix, const CodesView& view, int32_t first_row, int32_t rows,
              std::byte* block) {
  std::memset(block, 0, static_cast<size_t>(matrix.block_bytes));
  pack_fp8_scales(matrix, view, first_row, rows, block);
  Line line;
  for (int32_t k = 0; k < matrix.depth_padded; k += kBlockColumns) {
    for (int32_t column = 0; column < rows; ++column) {
      line.load(matrix, view, first_row + column, k, kBlockColumns);
      if (holds_nan(line.codes, kBlockColumns)) {
        refuse(matrix.format, "a weight that is not a number");
      }
      std::byte* to = block + matrix.header_bytes + int64_t{k} * kBlockColumns + column * 2;
      for (int32_t i = 0; i < kBlockColumns; i += 2, to += kBlockColumns * 2) {
        std::memcpy(to, line.codes + i, 2);
      }
    }
  }
}

}  // namespace

void check_codes(const PackedMatrix& matrix, const CodesView& view) {
  if (matrix.format == Format::kBf16 || matrix.format == Format::kLut4) {
    refuse(matrix.format, "the codes of another format");
  }
  check_scales(matrix, view);
  for (int64_t i = 0; view.zeros != nullptr && i < view.zeros_bytes; ++i) {
    if (static_cast<uint8_t>(view.zeros[i]) != view.zero)
      refuse(matrix.format, "zero points; weights=\"int8\" or \"bf16\" takes them");
  }
  for (int32_t k = 0; view.in_turn != nullptr && k < matrix.depth; ++k) {
    if (read_as<int32_t>(view.in_turn + int64_t{4} * k) != k / view.scales.columns) {
      refuse(matrix.format,
             "groups in an order of their own; weights=\"int8\" or \"bf16\" takes them");
    }
  }
}

void pack_codes(const PackedMatrix& matrix, const CodesView& view, int32_t first_row,
                std::byte* block) {
  const int32_t rows = std::min(matrix.columns - first_row, kBlockColumns);
  if (matrix.format == Format::kFp8) {
    pack_fp8(matrix, view, first_row, rows, block);
  } else {
    pack_groups(matrix, view, first_row, rows, block);
  }
}

}  // namespace torch_mesh
