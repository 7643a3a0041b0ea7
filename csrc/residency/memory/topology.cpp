#include "residency/memory/topology.h"

#include <linux/mempolicy.h>
#include <sched.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cstdio>
#include <fstream>

namespace torch_mesh {
namespace {

constexpr int32_t kMaxCpus = 8192;  // as many as Linux is built for

std::string first_line(const std::string& path) {
  std::ifstream file(path);
  std::string line;
  std::getline(file, line);
  return line;
}

std::vector<int32_t> allowed_cpus() {
  std::array<cpu_set_t, kMaxCpus / CPU_SETSIZE> sets{};
  std::vector<int32_t> cpus;
  if (sched_getaffinity(0, sizeof(sets), sets.data()) != 0) return cpus;
  for (int32_t cpu = 0; cpu < kMaxCpus; ++cpu) {
    if (CPU_ISSET_S(cpu, sizeof(sets), sets.data())) cpus.push_back(cpu);
  }
  return cpus;
}

}  // namespace

std::vector<int32_t> memory_nodes() {
  std::array<unsigned long, 16> mask{};
  constexpr int32_t kBits = 8 * sizeof(unsigned long);
  std::vector<int32_t> nodes;
  if (syscall(SYS_get_mempolicy, nullptr, mask.data(), sizeof(mask) * 8, nullptr,
              MPOL_F_MEMS_ALLOWED) != 0) {
    return nodes;
  }
  for (int32_t node = 0; node < kBits * static_cast<int32_t>(mask.size()); ++node) {
    if (mask[node / kBits] >> node % kBits & 1) nodes.push_back(node);
  }
  return nodes;
}

std::vector<int32_t> parse_cpu_list(const std::string& text) {
  std::vector<int32_t> cpus;
  for (const char* at = text.c_str(); *at != '\0' && *at != '\n';) {
    int first = 0, last = 0, length = 0;
    if (std::sscanf(at, "%d%n", &first, &length) != 1) return {};
    at += length;
    last = first;
    if (*at == '-') {
      if (std::sscanf(++at, "%d%n", &last, &length) != 1) return {};
      at += length;
    }
    if (first < 0 || last < first || last >= kMaxCpus) return {};
    for (int cpu = first; cpu <= last; ++cpu) cpus.push_back(cpu);
    if (*at == ',') ++at;
  }
  return cpus;
}

Topology Topology::read(const std::string& folder, std::span<const int32_t> cpus,
                        std::span<const int32_t> memory, int32_t (*current_cpu)()) {
  Topology topology;
  topology.kernel_nodes_.clear();
  topology.current_cpu_ = current_cpu;
  for (const int32_t node : parse_cpu_list(first_line(folder + "/online"))) {
    if (std::ranges::find(memory, node) == memory.end()) continue;
    bool computes = false;
    const std::string file = folder + "/node" + std::to_string(node) + "/cpulist";
    for (const int32_t cpu : parse_cpu_list(first_line(file))) {
      if (std::ranges::find(cpus, cpu) == cpus.end()) continue;
      computes = true;
      auto& node_of_cpu = topology.node_of_cpu_;
      if (cpu >= std::ssize(node_of_cpu)) node_of_cpu.resize(cpu + 1, -1);
      node_of_cpu[cpu] = topology.nodes();
    }
    if (computes) topology.kernel_nodes_.push_back(node);
  }
  return topology.nodes() < 2 ? Topology() : topology;
}

const Topology& Topology::of_this_process() {
  static const Topology topology = read("/sys/devices/system/node", allowed_cpus(), memory_nodes(),
                                        [] { return static_cast<int32_t>(sched_getcpu()); });
  return topology;
}

int32_t Topology::current_node() const {
  if (nodes() == 1) return 0;
  const int32_t cpu = current_cpu_();
  if (cpu < 0 || cpu >= std::ssize(node_of_cpu_)) return 0;
  return std::max(node_of_cpu_[cpu], 0);
}

}  // namespace torch_mesh
