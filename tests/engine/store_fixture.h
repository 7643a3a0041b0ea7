// A file of records that is removed at the end of the test.
#pragma once

#include <fcntl.h>
#include <gtest/gtest.h>
#include <unistd.h>

#include <cstdlib>
#include <filesystem>
#include <functional>
#include <span>
#include <string>
#include <vector>

#include "store/source.h"
#include "testing/faults.h"

namespace torch_mesh::testing {

class RecordFile {
 public:
  using MakeRecord = std::function<std::vector<std::byte>(int32_t layer, int32_t expert)>;

  RecordFile(int32_t layers, int32_t experts, const MakeRecord& make_record) {
    path_ = (std::filesystem::temp_directory_path() / "torch_mesh_records_XXXXXX").string();
    descriptor_ = mkstemp(path_.data());
    source_.layers = layers;
    source_.experts = experts;
    int64_t end = 0;
    for (int32_t id = 0; id < layers * experts; ++id) {
      const auto record = make_record(id / experts, id % experts);
      const auto bytes = static_cast<int64_t>(record.size());
      put(end, record);
      source_.extents.push_back({0, end, bytes});
      source_.checksums.push_back(
          record_checksum(source_.store_id, id / experts, id % experts, record.data(), bytes));
      end += bytes;
    }
    source_.files = {{path_, end}};
    EXPECT_EQ(fsync(descriptor_), 0);
  }
  ~RecordFile() {
    ::close(descriptor_);
    ::unlink(path_.c_str());
  }
  RecordFile(const RecordFile&) = delete;
  RecordFile& operator=(const RecordFile&) = delete;

  void write(int64_t offset, std::span<const std::byte> bytes) const {
    put(offset, bytes);
    ASSERT_EQ(fsync(descriptor_), 0);
  }
  void truncate(int64_t bytes) const { ASSERT_EQ(ftruncate(descriptor_, bytes), 0); }
  const Source& source() const { return source_; }
  const std::string& path() const { return path_; }

 private:
  void put(int64_t offset, std::span<const std::byte> bytes) const {
    ASSERT_EQ(pwrite(descriptor_, bytes.data(), bytes.size(), offset),
              static_cast<ssize_t>(bytes.size()));
  }

  std::string path_;
  int descriptor_ = -1;
  Source source_;
};

}  // namespace torch_mesh::testing
