#include "store/source.h"

#include <algorithm>
#include <limits>
#include <string>
#include <utility>

#ifdef TORCH_MESH_WITH_XXH_DISPATCH
#define XXH_STATIC_LINKING_ONLY
#include <xxh_x86dispatch.h>
#else
#define XXH_INLINE_ALL
#include <xxhash.h>
#endif

#include "base/error.h"
#include "store/record.h"

namespace torch_mesh {

namespace {

void put_little_endian(uint32_t value, uint8_t* to) {
  for (int32_t byte = 0; byte < 4; ++byte) to[byte] = static_cast<uint8_t>(value >> (8 * byte));
}

template <typename... Parts>
[[noreturn]] void refuse(ErrorPlace place, const Parts&... parts) {
  throw Error(ErrorKind::kInvalid, concat(parts...), std::move(place));
}

void validate_files(const Source& source) {
  if (source.files.empty()) throw_invalid("the source names no files; it needs at least one");
  if (source.files.size() > static_cast<size_t>(std::numeric_limits<int32_t>::max())) {
    throw_invalid("the source names ", source.files.size(),
                  " files; at most 2147483647 are allowed");
  }
  for (size_t index = 0; index < source.files.size(); ++index) {
    const File& file = source.files[index];
    if (file.path.empty()) throw_invalid("file ", index, " has an empty path");
    const auto has_nul = [](const std::string& path) { return path.find('\0') != path.npos; };
    if (has_nul(file.path) || std::ranges::any_of(file.copies, has_nul)) {
      throw_invalid("the path of file ", index, " contains a NUL byte");
    }
    if (std::ssize(file.copies) >= kMaxDrives) {
      throw_invalid("file ", index, " has ", file.copies.size(), " copies; at most ",
                    kMaxDrives - 1, " are allowed");
    }
    if (file.bytes < 0) {
      refuse({.file = file.path}, "the size of ", file.path, " is ", file.bytes,
             " bytes; it must be 0 or more");
    }
  }
}

// Checks the counts. Returns the number of experts of all layers.
size_t validate_counts(const Source& source) {
  if (source.layers < 1 || source.experts < 1) {
    throw_invalid("layers is ", source.layers, " and experts is ", source.experts,
                  "; both must be 1 or more");
  }
  const int64_t end = int64_t{source.first_expert} + source.experts;
  const bool all = source.first_expert == 0 && source.routed_experts == 0;
  if (!all && (source.first_expert < 0 || source.routed_experts < end)) {
    throw_invalid("the source has ", source.experts, " experts from number ", source.first_expert,
                  " on; its model has ", source.routed_experts);
  }
  const int32_t max_pieces = source.raw ? kMaxPieces : 1;
  if (source.pieces < 1 || source.pieces > max_pieces) {
    throw_invalid("an expert has ", source.pieces, " pieces; ",
                  source.raw ? "a raw checkpoint allows 1 to " : "a store allows exactly ",
                  max_pieces);
  }
  // Two 31-bit numbers: the product fits 64 bits, the number of extents may not.
  const size_t records = static_cast<size_t>(source.layers) * static_cast<size_t>(source.experts);
  const size_t pieces = static_cast<size_t>(source.pieces);
  if (records > std::numeric_limits<size_t>::max() / pieces ||
      source.extents.size() != records * pieces) {
    throw_invalid("there are ", source.extents.size(), " extents for ", source.layers,
                  " layers of ", source.experts, " experts in ", source.pieces,
                  " pieces; the counts must agree");
  }
  if (!source.checksums.empty() && source.checksums.size() != records) {
    throw_invalid("there are ", source.checksums.size(), " checksums for ", records,
                  " records; give one for each or none at all");
  }
  return records;
}

void validate_extent(const Source& source, const Extent& extent, int32_t layer, int32_t expert) {
  if (extent.file < 0 || static_cast<size_t>(extent.file) >= source.files.size()) {
    refuse({layer, expert, "", -1}, "an extent lies in file ", extent.file,
           "; the source has files 0 to ", source.files.size() - 1);
  }
  const File& file = source.files[extent.file];
  const auto refuse_it = [&](const char* kind, const auto&... why) {
    refuse({layer, expert, file.path, extent.offset}, kind, " has ", extent.bytes,
           " bytes at offset ", extent.offset, why...);
  };
  if (extent.offset < 0 || extent.bytes < 1) {
    refuse_it("an extent", "; an offset is 0 or more and a length 1 or more");
  }
  // Written as a difference, because the sum of two hostile numbers may overflow.
  if (extent.bytes > file.bytes || extent.offset > file.bytes - extent.bytes) {
    refuse_it("an extent", ", beyond the end of ", file.path, " with its ", file.bytes, " bytes");
  }
  // Direct I/O reads records straight into their slots, which have no room for a superset.
  if (!source.raw &&
      (extent.offset % kRecordAlignment != 0 || extent.bytes % kRecordAlignment != 0)) {
    refuse_it("a record", "; both must be multiples of ", kRecordAlignment);
  }
}

}  // namespace

uint64_t record_checksum(const std::array<uint8_t, 16>& store_id, int32_t layer, int32_t expert,
                         const std::byte* record, int64_t bytes) {
  std::array<uint8_t, 24> place;
  std::copy(store_id.begin(), store_id.end(), place.begin());
  put_little_endian(static_cast<uint32_t>(layer), place.data() + 16);
  put_little_endian(static_cast<uint32_t>(expert), place.data() + 20);
  XXH3_state_t state;
  XXH3_64bits_reset(&state);
  XXH3_64bits_update(&state, place.data(), place.size());
  XXH3_64bits_update(&state, record, static_cast<size_t>(bytes));
  return XXH3_64bits_digest(&state);
}

std::string wrong_checksum(const std::string& what, const std::string& file, int64_t offset) {
  return concat(what, " is not what was stored: its checksum is wrong in a second read, too (",
                file, ", offset ", offset,
                "); run torch-mesh inspect --verify on the store, then remove it or convert the "
                "model with --force");
}

void validate(const Source& source) {
  validate_files(source);
  const size_t records = validate_counts(source);
  for (size_t record = 0; record < records; ++record) {
    const auto layer = static_cast<int32_t>(record / source.experts);
    const int32_t expert = source.number(static_cast<int32_t>(record % source.experts));
    for (int32_t piece = 0; piece < source.pieces; ++piece) {
      validate_extent(source, source.extents[record * source.pieces + piece], layer, expert);
    }
  }
}

}  // namespace torch_mesh
