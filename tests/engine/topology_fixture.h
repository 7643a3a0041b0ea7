// Made-up machines, as the kernel would describe them.
#pragma once

#include <stdlib.h>

#include <cstdint>
#include <filesystem>
#include <fstream>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

namespace torch_mesh::testing {

// /sys/devices/system/node of a made-up machine.
class NodeFolder {
 public:
  NodeFolder(const std::string& online, const std::vector<std::pair<int32_t, std::string>>& nodes) {
    std::string name = (std::filesystem::temp_directory_path() / "topology-XXXXXX").string();
    if (mkdtemp(name.data()) == nullptr) throw std::runtime_error("mkdtemp");
    path_ = name;
    std::ofstream(path_ / "online") << online << "\n";
    for (const auto& [node, cpus] : nodes) {
      const auto folder = path_ / ("node" + std::to_string(node));
      std::filesystem::create_directory(folder);
      std::ofstream(folder / "cpulist") << cpus << "\n";
    }
  }
  static NodeFolder with_one_cpu_each(int32_t nodes) {
    std::vector<std::pair<int32_t, std::string>> cpus;
    for (int32_t node = 0; node < nodes; ++node) cpus.emplace_back(node, std::to_string(node));
    return {"0-" + std::to_string(nodes - 1), cpus};
  }
  ~NodeFolder() { std::filesystem::remove_all(path_); }
  NodeFolder(const NodeFolder&) = delete;
  NodeFolder& operator=(const NodeFolder&) = delete;
  std::string path() const { return path_.string(); }

 private:
  std::filesystem::path path_;
};

}  // namespace torch_mesh::testing
