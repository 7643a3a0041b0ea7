// Squares of weights in fp32, and their products with rows in fp32, for gradients.
#pragma once

#include "kernels/panel_products-inl.h"
#include "kernels/trellis-inl.h"

namespace torch_mesh {
namespace {

template <int kByte>
inline Words byte_of(Words words) {
  return shift_right<8 * kByte>(words) & broadcast_word(0xff);
}

// The codes of a word as unsigned bytes, four k-values beside each other in each part.
struct SignedBytes {
  static constexpr int kParts = 1;
  static void operands(Words words, Words (&parts)[1]) {
    parts[0] = words ^ broadcast_word(0x80808080);
  }
  static Words zeros(const std::byte*) { return broadcast_word(128); }
};

template <typename Nibbles>
struct BytesOfNibbles {
  static constexpr int kParts = 2;
  static void operands(Words words, Words (&parts)[2]) {
    parts[0] = Nibbles::operands(low_nibbles(words));
    parts[1] = Nibbles::operands(low_nibbles(shift_right<4>(words)));
  }
  static Words zeros(const std::byte* scales) { return Nibbles::zeros(scales); }
};

// Loads scales and applies the block's factor, then its divisor, as unpack.cpp does.
template <typename Scales>
inline Floats scales_of_block(const std::byte* block, const std::byte* scales) {
  const Floats own = Scales::load(scales) * broadcast(Scales::kUnit);
  if constexpr (header_bytes<Scales>() > 0) {
    float factor[2];
    __builtin_memcpy(factor, block, sizeof(factor));
    return own * broadcast(factor[0]) / broadcast(factor[1]);
  } else {
    return own;
  }
}

template <int kByte>
inline void store_byte(Words part, Words zeros, Floats scale, float* to) {
  const Words value = subtract_words(byte_of<kByte>(part), zeros);
  store(to + kByte * kBlockColumns, words_to_floats(value) * scale);
}

// The four k-values of a part, one below the other.
inline void store_part(Words part, Words zeros, Floats scale, float* to) {
  store_byte<0>(part, zeros, scale, to);
  store_byte<1>(part, zeros, scale, to);
  store_byte<2>(part, zeros, scale, to);
  store_byte<3>(part, zeros, scale, to);
}

template <typename Codes, typename Scales>
inline void dequantize_integers(const SquareOfBlock& from, float* square) {
  constexpr int32_t kPerWord = 4 * Codes::kParts;
  const int32_t size = from.group_size;
  const int32_t deep = size < kSquare ? size : kSquare;
  const int64_t group_bytes = int64_t{kBlockColumns} * (Scales::kBytes + size / kPerWord * 4);
  for (int32_t first = 0; first < kSquare; first += deep) {
    const int32_t k = from.depth + first;
    const std::byte* scales = from.block + header_bytes<Scales>() + k / size * group_bytes;
    const std::byte* words =
        scales + kBlockColumns * Scales::kBytes + int64_t{k % size / kPerWord} * kBlockColumns * 4;
    for (int32_t c = 0; c < kBlockColumns; c += kLanes) {
      const std::byte* own = scales + c * Scales::kBytes;
      const Floats scale = scales_of_block<Scales>(from.block, own);
      const Words zeros = Codes::zeros(own);
      float* to = square + first * kBlockColumns + c;
      for (int32_t j = 0; j < deep / kPerWord; ++j) {
        Words parts[Codes::kParts];
        Codes::operands(load_words(words + (j * kBlockColumns + c) * 4), parts);
        for (int p = 0; p < Codes::kParts; ++p, to += 4 * kBlockColumns) {
          store_part(parts[p], zeros, scale, to);
        }
      }
    }
  }
}

template <typename Code>
inline void dequantize_trellis(const SquareOfBlock& from, float* square) {
  alignas(64) std::byte levels[kSquare * kBlockColumns];
  const TrellisBlock<Code> block(from.block, from.group_size, from.depth_padded);
  const int32_t deep = from.group_size < kSquare ? from.group_size : kSquare;
  for (int32_t first = 0; first < kSquare; first += deep) {
    const int32_t k = from.depth + first;
    expand_trellis(block, k, deep, levels);
    const std::byte* scales = block.scales(k / from.group_size);
    for (int32_t c = 0; c < kBlockColumns; c += kLanes) {
      const Floats scale = Bf16Scales::load(scales + c * Bf16Scales::kBytes);
      const Words zeros = broadcast_word(kTrellisZero);
      float* to = square + first * kBlockColumns + c;
      for (int32_t j = 0; j < deep / 4; ++j, to += 4 * kBlockColumns) {
        store_part(load_words(levels + (j * kBlockColumns + c) * 4), zeros, scale, to);
      }
    }
  }
}

inline void dequantize_bf16(const SquareOfBlock& from, float* square) {
  expand<ExpandedBf16Dot>(from.block + int64_t{from.depth} * kBlockColumns * 2, 1, kSquare, square);
}

inline void dequantize_fp8(const SquareOfBlock& from, float* square) {
  const std::byte* pairs =
      from.block + block_header_bytes(Format::kFp8, from.group_size, from.depth_padded);
  const uint32_t before = E4m3::count_subnormals();
  expand<ExpandedFp8Dot>(pairs + int64_t{from.depth} * kBlockColumns, E4m3::kUnit, kSquare, square);
  E4m3::restore_subnormals(before);
  const int32_t deep = fp8_step_depth(from.group_size);
  for (int32_t first = 0; first < kSquare; first += deep) {
    const Fp8Step step(from.block, from.group_size, from.depth + first, 1);
    for (int32_t c = 0; c < kBlockColumns; c += kLanes) {
      const Floats scale = step.scales_of(c);
      for (int32_t k = first; k < first + deep; ++k) {
        float* at = square + k * kBlockColumns + c;
        store(at, load(at) * scale);
      }
    }
  }
}

template <int kRows>
inline void square_tile(const float* square, const float* rows, float* sums) {
  constexpr int kVectors = vectors_at_once(kPanelTile, kRows);
  for (int32_t c = 0; c < kBlockColumns; c += kVectors * kLanes) {
    Floats tile[kRows][kVectors];
    for (int r = 0; r < kRows; ++r) {
      for (int v = 0; v < kVectors; ++v) tile[r][v] = load(sums + r * kSquare + c + v * kLanes);
    }
    for (int32_t k = 0; k < kSquare; k += kPanelUnroll) {
      add_panel_rows<kPanelUnroll>(square + k * kBlockColumns + c, rows + k, tile);
    }
    for (int r = 0; r < kRows; ++r) {
      for (int v = 0; v < kVectors; ++v) store(sums + r * kSquare + c + v * kLanes, tile[r][v]);
    }
  }
}

inline void multiply_square(const float* square, const SquareRows& rows, float* sums) {
  alignas(64) float gathered[kTileRows * kSquare];
  for (int32_t first = 0; first < rows.count; first += kTileRows) {
    const int32_t left = rows.count - first;
    const int32_t count = left < kTileRows ? left : kTileRows;
    for (int32_t r = 0; r < count; ++r) {
      float* to = gathered + r * kSquare;
      const auto bytes = static_cast<size_t>(rows.columns) * sizeof(float);
      __builtin_memcpy(to, rows.data + (first + r) * rows.stride, bytes);
      __builtin_memset(to + rows.columns, 0, kSquare * sizeof(float) - bytes);
    }
    for_each_tile<kPanelTile.rows>(count, [&](auto at_once, int32_t at) {
      square_tile<at_once.value>(square, gathered + at * kSquare, sums + (first + at) * kSquare);
    });
  }
}

}  // namespace
}  // namespace torch_mesh
