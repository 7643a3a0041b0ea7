#include "kernels/pack_bf12.h"

#include <algorithm>
#include <cstring>
#include <functional>

#include "base/error.h"

namespace torch_mesh {
namespace {

constexpr int32_t kWeights = 128;  // of a row
constexpr int32_t kHalf = kWeights / 2;
constexpr uint8_t kNoName = 0xff;

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

// Bytes and names of a row, in the order of the record's lower bytes. The compiler vectorises the
// loops.
struct Row {
  alignas(64) uint8_t lower[kWeights];
  alignas(64) uint8_t upper[kWeights];
  alignas(64) uint8_t names[kWeights];

  Row(const uint8_t* words, const uint8_t* table, int32_t named) {
    uint16_t weights[kWeights];
    std::memcpy(weights, words, sizeof(weights));
    uint8_t bytes[2][kWeights];
    for (int32_t i = 0; i < kWeights; ++i) {
      bytes[0][i] = static_cast<uint8_t>(weights[i]);
      bytes[1][i] = static_cast<uint8_t>(weights[i] >> 8);
    }
    for (int32_t column = 0; column < 64; column += 4) {
      std::memcpy(lower + bf12_place(column), bytes[0] + column * 2, 8);
      std::memcpy(upper + bf12_place(column), bytes[1] + column * 2, 8);
    }
    std::memset(names, kNoName, sizeof(names));
    for (int32_t name = 0; name < named; ++name) {
      const uint8_t own = table[name];
      for (int32_t i = 0; i < kWeights; ++i) {
        names[i] = upper[i] == own ? static_cast<uint8_t>(name) : names[i];
      }
    }
  }

  bool has_exceptions() const {
    uint8_t largest = 0;
    for (int32_t i = 0; i < kWeights; ++i) largest = std::max(largest, names[i]);
    return largest == kNoName;
  }

  void store(uint8_t* to) const {
    std::memcpy(to, lower, sizeof(lower));
    for (int32_t i = 0; i < kHalf; ++i) {
      to[kBf12NamesOffset + i] = static_cast<uint8_t>((names[i] & 15) | names[kHalf + i] << 4);
    }
  }
};

void put_word(std::byte* to, uint32_t word) { std::memcpy(to, &word, sizeof(word)); }

}  // namespace

Bf12Packer::Bf12Packer(std::byte* block, int32_t tiles) : block_{block, tiles} {
  std::memset(block, 0, static_cast<size_t>(tiles) * kBf12HeaderBytes);
}

void Bf12Packer::add(const std::byte* words) {
  const auto* bytes = reinterpret_cast<const uint8_t*>(words);
  auto* table = reinterpret_cast<uint8_t*>(block_.table(tile_));
  auto* to = reinterpret_cast<uint8_t*>(block_.tile(tile_));
  const int32_t named = choose_names(bytes, table);
  for (int32_t j = 0; j < kBf12Rows; ++j, to += kBf12RowBytes) {
    const Row row(bytes + j * kWeights * 2, table, named);
    row.store(to);
    if (!row.has_exceptions()) continue;
    for (int32_t i = 0; i < kWeights; ++i) {
      if (row.names[bf12_place(i / 2) + i % 2] != kNoName) continue;
      const int32_t place = (j * kWeights + i) * 2 + 1;
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
