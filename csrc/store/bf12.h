// Blocks of bf12: bf16 weights in 12.1 bits, without loss.
//
// A weight's upper byte is the sign and seven of the exponent's eight bits; neighbouring weights
// have few different ones. A tile of 64 x 64 weights has a table of 16 upper bytes, and for each
// weight a nibble, which is an index in this table, and the lower byte. A weight whose upper byte
// is not in the table is an exception. A block is
//   [tiles][16] tables | [tiles] uint32, where the tile's exceptions end | uint32 exceptions |
//   [tiles] tiles
// with room for 11 exceptions for each tile, which any tile may use. A tile is [32] rows of 192
// bytes, each of two k-values: 64 lower bytes of 32 columns, 64 of the other columns, and 64 bytes
// with the nibbles of the former and, in their upper halves, of the latter. A column's two weights
// are beside each other. Columns are in the order that interleaving the bytes of each 16 puts
// right: 0-3, 16-19, 4-7, 20-23, 8-11, 24-27, 12-15, 28-31.
//
// An exception is  place << 8 | upper byte. Its place is the offset of this byte in the same tile
// of bf16. Exceptions are in the order of places.
#pragma once

#include <cstdint>

namespace torch_mesh {

inline constexpr int32_t kBf12Depth = 64;  // of a tile
inline constexpr int32_t kBf12Rows = kBf12Depth / 2;
inline constexpr int32_t kBf12RowWeights = 2 * 64;
inline constexpr int32_t kBf12RowBytes = 192;
inline constexpr int32_t kBf12NamesOffset = 128;  // of a row's nibbles
inline constexpr int32_t kBf12TileBytes = kBf12Rows * kBf12RowBytes;
inline constexpr int32_t kBf12WordsBytes = kBf12Depth * 64 * 2;  // of a tile as bf16
inline constexpr int32_t kBf12Names = 16;                        // in a table
inline constexpr int32_t kBf12Exceptions = 11;                   // docs/decisions/0073-bf12.md
// Bytes of a block's header for each tile.
inline constexpr int32_t kBf12HeaderBytes = kBf12Names + 4 + kBf12Exceptions * 4;
static_assert(kBf12HeaderBytes % 64 == 0);

// The offset in a row of the lower byte of a column's even k-value. The odd one's follows it.
constexpr int32_t bf12_place(int32_t column) {
  return column / 32 * 64 + column % 16 / 4 * 16 + column % 32 / 16 * 8 + column % 4 * 2;
}

// The parts of a block.
template <typename Byte>
struct Bf12Block {
  Byte* block;
  int32_t tiles;

  Byte* table(int32_t tile) const { return block + int64_t{tile} * kBf12Names; }
  Byte* end(int32_t tile) const { return block + int64_t{tiles} * kBf12Names + int64_t{tile} * 4; }
  Byte* exception(uint32_t index) const { return end(tiles) + int64_t{index} * 4; }
  Byte* tile(int32_t index) const {
    return block + int64_t{tiles} * kBf12HeaderBytes + int64_t{index} * kBf12TileBytes;
  }

  static uint32_t word(const Byte* at) {
    uint32_t value;
    __builtin_memcpy(&value, at, sizeof(value));
    return value;
  }
  // The tile's exceptions are [first, last), which are in the block even if the record is damaged.
  uint32_t first_of(int32_t tile) const { return tile == 0 ? 0 : last_of(tile - 1); }
  uint32_t last_of(int32_t tile) const {
    const uint32_t last = word(end(tile)), room = static_cast<uint32_t>(tiles) * kBf12Exceptions;
    return last < room ? last : room;
  }
  static uint32_t place_of(uint32_t exception) { return exception >> 8 & (kBf12WordsBytes - 1); }
};

}  // namespace torch_mesh
