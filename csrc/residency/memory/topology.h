// The NUMA nodes that this process computes on. A resident expert lies on one of them, and the
// threads that run there are offered its tasks first.
#pragma once

#include <cstdint>
#include <span>
#include <string>
#include <vector>

namespace torch_mesh {

class Topology {
 public:
  // One node: where a thread runs makes no difference.
  Topology() = default;

  // Reads what the kernel says in `folder` (/sys/devices/system/node): the nodes that have one of
  // `cpus` and are among `memory`. Fewer than two such nodes, or a folder that cannot be read,
  // count as one node. `current_cpu` returns the processor that the calling thread runs on.
  static Topology read(const std::string& folder, std::span<const int32_t> cpus,
                       std::span<const int32_t> memory, int32_t (*current_cpu)());

  // The nodes that this process may use, by its affinity and its cgroup, as of the first call.
  static const Topology& of_this_process();

  int32_t nodes() const { return static_cast<int32_t>(kernel_nodes_.size()); }
  int32_t kernel_node(int32_t node) const { return kernel_nodes_[node]; }
  // The node that the calling thread runs on, in [0, nodes()). A hint: a thread may be moved at any
  // time.
  int32_t current_node() const;

 private:
  std::vector<int32_t> kernel_nodes_ = {0};
  std::vector<int32_t> node_of_cpu_;  // -1: none of them
  int32_t (*current_cpu_)() = nullptr;
};

// The nodes that this process may take memory from; none where the kernel does not say (seccomp, no
// NUMA).
std::vector<int32_t> memory_nodes();

// "0-3,8" as in the kernel's files; empty for any other text.
std::vector<int32_t> parse_cpu_list(const std::string& text);

}  // namespace torch_mesh
