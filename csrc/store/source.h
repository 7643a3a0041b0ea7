// Where the records of a model come from, and what turns the bytes read into a packed record.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <vector>

#include "store/extent.h"

namespace torch_mesh {

// Gate, up, down and their biases; of quantised ones codes, scales, zero points and order of each.
inline constexpr int32_t kMaxPieces = 16;

struct Source {
  std::vector<File> files = {};
  int32_t layers = 0;
  int32_t experts = 0;  // per layer
  // The first of them by the number that it has in the model, whose routers choose among
  // `routed_experts`: a rank of several has a range of the model's experts, and counts its own from
  // 0. Checksums and errors have the model's numbers. 0: the source has all of them.
  int32_t first_expert = 0;
  int32_t routed_experts = 0;
  int32_t pieces = 1;  // extents per expert: 1 in a store, 2 to kMaxPieces in a raw checkpoint

  // [layers][experts][pieces], row-major.
  std::vector<Extent> extents = {};

  // A record as stored lands in its slot and is used as it is. Raw weights land in a staging
  // buffer, piece by piece, and are packed from there.
  bool raw = false;

  // [layers][experts]; empty: the source has none, and the first read of each record sets its own.
  std::vector<uint64_t> checksums = {};
  // Hashed before each record's bytes together with layer and the model's expert, so that the right
  // bytes in the wrong place do not pass.
  std::array<uint8_t, 16> store_id{};

  const Extent* expert(int32_t layer, int32_t index) const {
    return &extents[(static_cast<size_t>(layer) * experts + index) * pieces];
  }
  // What the model calls the expert `index` of a layer.
  int32_t number(int32_t index) const { return first_expert + index; }
};

// XXH3-64 over store id, layer, expert (both little-endian int32) and the record's bytes.
uint64_t record_checksum(const std::array<uint8_t, 16>& store_id, int32_t layer, int32_t expert,
                         const std::byte* record, int64_t bytes);

// Throws Error(kInvalid) unless every extent lies within its file, nothing overflows, and counts
// agree.
void validate(const Source& source);

}  // namespace torch_mesh
