#include "kernels/pack_bf12.h"

#include <algorithm>
#include <cstring>
#include <functional>

#include "base/error.h"

namespace torch_mesh {
namespace {

// Fills the table with the most frequent upper bytes of a tile. Returns how many there are, up to
// kBf12Names; a table with fewer repeats its first one.
int32_t choose_names(const uint8_t* words, uint8_t* table) {
  // Counts neighbours apart: they are often alike, and an addition to the same count waits for the
  // one before.
  constexpr int32_t kApart = 4;
  uint32_t counts[kApart][256] = {};
  for (int32_t at = 1; at < kBf12WordsBytes; at += 2 * kApart) {
    for (int32_t i = 0; i < kApart; ++i) ++counts[i][words[at + 2 * i]];
  }
  uint32_t found[256];  // count << 8 | byte, so that no two are equal
  int32_t distinct = 0;
  for (uint32_t byte = 0; byte < 256; ++byte) {
    const uint32_t count = counts[0][byte] + counts[1][byte] + counts[2][byte] + counts[3][byte];
    if (count > 0) found[distinct++] = count << 8 | byte;
  }
  const int32_t named = std::min(distinct, kBf12Names);
  std::partial_sort(found, found + named, found + distinct, std::greater<>());
  for (int32_t i = 0; i < kBf12Names; ++i) {
    table[i] = static_cast<uint8_t>(found[i < named ? i : 0]);
  }
  return named;
}

void put_word(std::byte* to, uint32_t word) { std::memcpy(to, &word, sizeof(word)); }

}  // namespace

Bf12Packer::Bf12Packer(const KernelTable& kernels, std::byte* block, int32_t tiles)
    : kernels_(kernels), block_{block, tiles} {
  std::memset(block, 0, static_cast<size_t>(tiles) * kBf12HeaderBytes);
}

void Bf12Packer::add(const std::byte* words) {
  const auto* bytes = reinterpret_cast<const uint8_t*>(words);
  auto* table = reinterpret_cast<uint8_t*>(block_.table(tile_));
  auto* to = reinterpret_cast<uint8_t*>(block_.tile(tile_));
  const int32_t named = choose_names(bytes, table);
  for (int32_t j = 0; j < kBf12Rows; ++j, to += kBf12RowBytes) {
    uint8_t names[kBf12RowWeights];
    if (!kernels_.pack_bf12_row(bytes + j * kBf12RowWeights * 2, table, named, to, names)) continue;
    for (int32_t i = 0; i < kBf12RowWeights; ++i) {
      if (names[bf12_place(i / 2) + i % 2] != kBf12NoName) continue;
      const int32_t place = (j * kBf12RowWeights + i) * 2 + 1;
      add_exception(static_cast<uint32_t>(place), words[place]);
    }
  }
  put_word(block_.end(tile_), exceptions_);
  ++tile_;
}

void Bf12Packer::add_exception(uint32_t place, std::byte upper) {
  const auto room = static_cast<uint32_t>(block_.tiles) * kBf12Exceptions;
  if (exceptions_ == room) {
    throw_invalid("bf12 has room for ", room, " exceptions in 64 outputs of ",
                  block_.tiles * kBf12Depth,
                  " inputs, and these weights have more: their magnitudes differ too much. Use "
                  "bf16");
  }
  put_word(block_.exception(exceptions_++), place << 8 | static_cast<uint32_t>(upper));
}

}  // namespace torch_mesh
