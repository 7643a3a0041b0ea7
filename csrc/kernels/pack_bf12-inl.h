// Packs a row of a tile of bf12. The compiler vectorizes the loops for each target.
#pragma once

#include <cstdint>

#include "kernels/kernel_table.h"
#include "store/bf12.h"

namespace torch_mesh {
namespace {

inline bool pack_bf12_row(const uint8_t* words, const uint8_t* table, int32_t named, uint8_t* to,
                          uint8_t* names) {
  constexpr int32_t kWeights = kBf12RowWeights, kHalf = kWeights / 2;
  uint16_t weights[kWeights];
  __builtin_memcpy(weights, words, sizeof(weights));
  uint8_t bytes[2][kWeights];
  for (int32_t i = 0; i < kWeights; ++i) {
    bytes[0][i] = static_cast<uint8_t>(weights[i]);
    bytes[1][i] = static_cast<uint8_t>(weights[i] >> 8);
  }
  alignas(64) uint8_t upper[kWeights];  // in the order of the record's lower bytes, as are names
  for (int32_t column = 0; column < 64; column += 4) {
    __builtin_memcpy(to + bf12_place(column), bytes[0] + column * 2, 8);
    __builtin_memcpy(upper + bf12_place(column), bytes[1] + column * 2, 8);
  }
  alignas(64) uint8_t own[kWeights];
  __builtin_memset(own, kBf12NoName, sizeof(own));
  for (int32_t name = 0; name < named; ++name) {
    const uint8_t byte = table[name];
    for (int32_t i = 0; i < kWeights; ++i) {
      own[i] = upper[i] == byte ? static_cast<uint8_t>(name) : own[i];
    }
  }
  uint8_t largest = 0;
  for (int32_t i = 0; i < kWeights; ++i) largest = largest < own[i] ? own[i] : largest;
  for (int32_t i = 0; i < kHalf; ++i) {
    to[kBf12NamesOffset + i] = static_cast<uint8_t>((own[i] & 15) | own[kHalf + i] << 4);
  }
  __builtin_memcpy(names, own, sizeof(own));
  return largest == kBf12NoName;
}

}  // namespace
}  // namespace torch_mesh
