// The source of a model's records: files, extents and checksums.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <span>
#include <string>
#include <vector>

#include "store/extent.h"

namespace torch_mesh {

// An expert among those of all layers: layer * experts per layer + its index.
using ExpertId = int32_t;
inline constexpr ExpertId kNoExpert = -1;

// The most pieces of an expert: gate, up, down and their biases; of quantized ones codes, scales,
// zero points and order of each.
inline constexpr int32_t kMaxPieces = 16;

struct Source {
  std::vector<File> files = {};
  int32_t layers = 0;
  int32_t experts = 0;  // per layer
  // The number of the first expert in the model, and how many experts the model's routers choose
  // among. A rank of several has a range of the model's experts, and counts its own from 0.
  // Checksums and errors have the model's numbers. Both 0: the source has all of them.
  int32_t first_expert = 0;
  int32_t routed_experts = 0;
  int32_t pieces = 1;  // extents per expert: 1 in a store, 2 to kMaxPieces in a raw checkpoint

  // [layers][experts][pieces], row-major.
  std::vector<Extent> extents = {};

  // Whether records are raw weights. These are read into a staging buffer, piece by piece, and
  // packed from there. A packed record is read into its slot and used as it is.
  bool raw = false;

  // [layers][experts]; empty: the source has none, and the first read of each record sets its own.
  std::vector<uint64_t> checksums = {};
  // Hashed before each record's bytes together with layer and the model's expert, so that the right
  // bytes in the wrong place do not pass.
  std::array<uint8_t, 16> store_id{};

  ExpertId id_of(int32_t layer, int32_t index) const { return layer * experts + index; }
  int32_t layer_of(ExpertId id) const { return id / experts; }
  int32_t index_of(ExpertId id) const { return id % experts; }
  int32_t drives() const { return drives_of(files); }
  // The model's number of the expert `index` of a layer.
  int32_t number(int32_t index) const { return first_expert + index; }
  int32_t number_of(ExpertId id) const { return number(index_of(id)); }
  std::span<const Extent> extents_of(ExpertId id) const {
    const auto count = static_cast<size_t>(pieces);
    return std::span(extents).subspan(static_cast<size_t>(id) * count, count);
  }
};

// XXH3-64 over store id, layer, expert (both little-endian int32) and the record's bytes.
uint64_t record_checksum(const std::array<uint8_t, 16>& store_id, int32_t layer, int32_t expert,
                         const std::byte* record, int64_t bytes);
// The message for a record or row, `what`, whose checksum is wrong.
std::string wrong_checksum(const std::string& what, const std::string& file, int64_t offset);

// Throws Error(kInvalid) unless every extent lies within its file, nothing overflows, and counts
// agree.
void validate(const Source& source);

}  // namespace torch_mesh
