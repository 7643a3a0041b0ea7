// Locations of records: invalid numbers are refused, and checksums depend on layer and expert.
#include "store/source.h"

#include <gtest/gtest.h>

#include <cstdint>
#include <limits>
#include <random>
#include <string>

#include "base/error.h"

namespace torch_mesh {
namespace {

constexpr int64_t kRecord = 8192;

// Two layers of three experts in one file, record after record.
Source good_store() {
  Source source;
  source.files = {{"store.safetensors", 4096 + 6 * kRecord}};
  source.layers = 2;
  source.experts = 3;
  for (int64_t record = 0; record < 6; ++record) {
    source.extents.push_back({0, 4096 + record * kRecord, kRecord});
  }
  source.checksums.assign(6, 1);
  return source;
}

template <typename Spoil>
void expect_refused(const std::string& part, const Spoil& spoil) {
  Source source = good_store();
  spoil(source);
  try {
    validate(source);
    ADD_FAILURE() << "accepted; expected an error with \"" << part << "\"";
  } catch (const Error& error) {
    EXPECT_EQ(error.kind(), ErrorKind::kInvalid);
    EXPECT_NE(std::string(error.what()).find(part), std::string::npos) << error.what();
  }
}

TEST(Source, ValidStoreAndRawCheckpointPass) {
  EXPECT_NO_THROW(validate(good_store()));
  Source raw = good_store();
  raw.raw = true;
  raw.pieces = 2;
  raw.experts = 1;
  raw.layers = 3;
  raw.checksums.clear();
  raw.extents[1] = {0, 17, 1};
  EXPECT_NO_THROW(validate(raw));
}

TEST(Source, RangeOfTheModelsExperts) {
  Source source = good_store();
  source.first_expert = 5;
  source.routed_experts = 8;
  EXPECT_NO_THROW(validate(source));
  EXPECT_EQ(source.number(2), 7);
  const std::string range = "3 experts from number";
  expect_refused(range, [](Source& s) { s.first_expert = 1; });
  expect_refused(range, [](Source& s) { s.first_expert = -1, s.routed_experts = 8; });
  expect_refused(range, [](Source& s) { s.first_expert = 6, s.routed_experts = 8; });
  expect_refused(range, [](Source& s) { s.routed_experts = 2; });
  expect_refused(range, [](Source& s) {
    s.first_expert = std::numeric_limits<int32_t>::max();
    s.routed_experts = std::numeric_limits<int32_t>::max();
  });
}

TEST(Source, CountsThatDisagree) {
  expect_refused("no files", [](Source& s) { s.files.clear(); });
  expect_refused("layers is 0", [](Source& s) { s.layers = 0; });
  expect_refused("experts is -3", [](Source& s) { s.experts = -3; });
  expect_refused("pieces", [](Source& s) { s.pieces = 0; });
  expect_refused("pieces", [](Source& s) { s.pieces = 2; });
  expect_refused("pieces", [](Source& s) {
    s.raw = true;
    s.pieces = kMaxPieces + 1;
  });
  expect_refused("extents", [](Source& s) { s.extents.pop_back(); });
  expect_refused("checksums", [](Source& s) { s.checksums.pop_back(); });
}

TEST(Source, CountsWhoseProductOverflows) {
  expect_refused("extents", [](Source& s) {
    s.raw = true;
    s.layers = s.experts = std::numeric_limits<int32_t>::max();
    s.pieces = 5;
  });
}

TEST(Source, ExtentsOutsideTheirFile) {
  constexpr int64_t kMax = std::numeric_limits<int64_t>::max();
  expect_refused("file 1", [](Source& s) { s.extents[4].file = 1; });
  expect_refused("file -1", [](Source& s) { s.extents[4].file = -1; });
  expect_refused("offset", [](Source& s) { s.extents[4].offset = -4096; });
  expect_refused("length", [](Source& s) { s.extents[4].bytes = 0; });
  expect_refused("length", [](Source& s) { s.extents[4].bytes = -4096; });
  expect_refused("beyond", [](Source& s) { s.extents[5].offset += 4096; });
  expect_refused("beyond", [](Source& s) { s.extents[5].bytes = kMax - 4095; });
  expect_refused("beyond", [](Source& s) { s.extents[5].offset = kMax - 4095; });
  expect_refused("beyond", [](Source& s) { s.files[0].bytes -= 1; });
}

TEST(Source, RecordsThatDirectReadsCannotReach) {
  expect_refused("multiples of 4096", [](Source& s) { s.extents[2].offset -= 512; });
  expect_refused("multiples of 4096", [](Source& s) { s.extents[2].bytes -= 1; });
}

TEST(Source, FilesWithoutNameOrSize) {
  expect_refused("empty path", [](Source& s) { s.files[0].path = ""; });
  expect_refused("NUL", [](Source& s) { s.files[0].path = std::string("a\0b", 3); });
  expect_refused("0 or more", [](Source& s) { s.files[0].bytes = -1; });
}

TEST(Source, ErrorNamesLayerExpertFileAndOffset) {
  Source source = good_store();
  source.extents[4].offset += 1;
  try {
    validate(source);
    FAIL() << "accepted";
  } catch (const Error& error) {
    EXPECT_EQ(error.place().layer, 1);
    EXPECT_EQ(error.place().expert, 1);
    EXPECT_EQ(error.place().file, "store.safetensors");
    EXPECT_EQ(error.place().offset, source.extents[4].offset);
  }
}

TEST(RecordChecksum, DetectsFlippedBitsAndRecordsInTheWrongPlace) {
  std::mt19937_64 random(7);
  std::vector<std::byte> record(600);
  for (std::byte& value : record) value = static_cast<std::byte>(random());
  std::array<uint8_t, 16> id{1, 2, 3};
  const auto sum = [&](int32_t layer, int32_t expert) {
    return record_checksum(id, layer, expert, record.data(), std::ssize(record));
  };
  const uint64_t right = sum(3, 5);
  EXPECT_NE(sum(5, 3), right);
  EXPECT_NE(sum(3, 6), right);
  id[15] ^= 1;
  EXPECT_NE(sum(3, 5), right);
  id[15] ^= 1;
  for (size_t bit = 0; bit < record.size() * 8; ++bit) {
    record[bit / 8] ^= std::byte{1} << (bit % 8);
    EXPECT_NE(sum(3, 5), right) << "bit " << bit;
    record[bit / 8] ^= std::byte{1} << (bit % 8);
  }
  EXPECT_EQ(sum(3, 5), right);
}

// The expected values are from Python's xxhash, which computes the checksums in a store.
TEST(RecordChecksum, AgreesWithThePublishedAlgorithm) {
  std::array<uint8_t, 16> id;
  for (size_t index = 0; index < id.size(); ++index) id[index] = static_cast<uint8_t>(index);
  std::vector<std::byte> record(4096);
  for (size_t index = 0; index < record.size(); ++index) record[index] = std::byte(index * 7 & 255);
  EXPECT_EQ(record_checksum(id, 2, 258, record.data(), std::ssize(record)), 0x8477eb03102c7ac8u);
}

}  // namespace
}  // namespace torch_mesh
