// The nodes that a process computes on, in made-up machines, and the placement of memory and tasks.
#include "residency/memory/topology.h"

#include <gtest/gtest.h>

#include <numeric>
#include <string>
#include <vector>

#include "engine/placement.h"
#include "residency/memory/arena.h"
#include "topology_fixture.h"

namespace torch_mesh {
namespace {

using testing::NodeFolder;
using Cpus = std::vector<int32_t>;

Cpus range(int32_t begin, int32_t end) {
  Cpus cpus(end - begin);
  std::iota(cpus.begin(), cpus.end(), begin);
  return cpus;
}

thread_local int32_t cpu_of_this_thread = 0;
int32_t current_cpu() { return cpu_of_this_thread; }

int32_t node_on(const Topology& topology, int32_t cpu) {
  cpu_of_this_thread = cpu;
  return topology.current_node();
}

TEST(Topology, KnowsTheNodeOfEveryProcessor) {
  // Node 1 has only memory, like CXL. Processors of a node need not have consecutive numbers.
  const NodeFolder folder("0-2", {{0, "0-3,8-11"}, {1, ""}, {2, "4-7,12-15"}});
  const Topology topology = Topology::read(folder.path(), range(0, 16), range(0, 3), current_cpu);
  ASSERT_EQ(topology.nodes(), 2);
  EXPECT_EQ(topology.kernel_node(0), 0);
  EXPECT_EQ(topology.kernel_node(1), 2);
  for (int32_t cpu = 0; cpu < 16; ++cpu) {
    EXPECT_EQ(node_on(topology, cpu), cpu / 4 % 2) << "cpu " << cpu;
  }
  EXPECT_EQ(node_on(topology, 16), 0);  // a processor added after the topology was read
  EXPECT_EQ(node_on(topology, -1), 0);  // the sandbox forbids getcpu
}

TEST(Topology, CountsOnlyNodesThatTheProcessMayUse) {
  const NodeFolder folder("0-3", {{0, "0-3"}, {1, "4-7"}, {2, "8-11"}, {3, "12-15"}});
  const auto read = [&](const Cpus& cpus, const Cpus& memory) {
    return Topology::read(folder.path(), cpus, memory, current_cpu);
  };
  const Topology pinned = read({3, 9, 10}, range(0, 4));
  ASSERT_EQ(pinned.nodes(), 2);
  EXPECT_EQ(pinned.kernel_node(1), 2);
  EXPECT_EQ(node_on(pinned, 9), 1);
  EXPECT_EQ(read(range(0, 16), {1, 3}).nodes(), 2);
  // A container with one node's cores only, or its memory only.
  EXPECT_EQ(read(range(4, 8), range(0, 4)).nodes(), 1);
  EXPECT_EQ(read(range(0, 16), {2}).nodes(), 1);
  EXPECT_EQ(read({}, {}).nodes(), 1);
}

TEST(Topology, AnUnreadableTopologyIsOneNode) {
  const auto nodes = [](const std::string& folder) {
    const Topology topology = Topology::read(folder, range(0, 16), range(0, 4), current_cpu);
    EXPECT_EQ(node_on(topology, 7), topology.nodes() == 1 ? 0 : 1);
    return topology.nodes();
  };
  EXPECT_EQ(nodes("/nonexistent"), 1);
  EXPECT_EQ(nodes(NodeFolder("0-1", {{0, "0-3"}}).path()), 1);
  EXPECT_EQ(nodes(NodeFolder("0-1", {{0, "0-3"}, {1, "four"}}).path()), 1);
  EXPECT_EQ(nodes(NodeFolder("", {{0, "0-3"}, {1, "4-7"}}).path()), 1);
  EXPECT_EQ(nodes(NodeFolder("0-1", {{0, "0-3"}, {1, "4-7"}}).path()), 2);
}

TEST(Topology, ReadsTheKernelsLists) {
  EXPECT_EQ(parse_cpu_list("0"), Cpus({0}));
  EXPECT_EQ(parse_cpu_list("0-2,5,7-8\n"), Cpus({0, 1, 2, 5, 7, 8}));
  for (const char* text : {"", "\n", "-1", "3-1", "0-", "0-x", "x", "1,,2", "0-999999999", "0;1"}) {
    EXPECT_EQ(parse_cpu_list(text), Cpus()) << text;
  }
}

TEST(Topology, OfThisProcessHasANodeForEveryThread) {
  const Topology& topology = Topology::of_this_process();
  EXPECT_GE(topology.nodes(), 1);
  EXPECT_LT(topology.current_node(), topology.nodes());
}

TEST(Arena, SlotsAreSpreadOverTheNodes) {
  const NodeFolder folder("0-2", {{0, "0"}, {1, "1"}, {2, "2"}});
  const Topology topology = Topology::read(folder.path(), range(0, 3), range(0, 3), current_cpu);
  ASSERT_EQ(topology.nodes(), 3);
  // Most machines lack nodes 1 and 2; then the kernel puts the pages elsewhere.
  const Arena arena(7, 4096, topology);
  for (int32_t i = 0; i < 7; ++i) {
    EXPECT_EQ(arena.node(i), i / 3);
    arena.piece(i)[4095] = std::byte{1};
  }
  EXPECT_EQ(Arena(7, 4096, Topology()).node(6), 0);
}

TEST(Placement, ExpertsOfUnknownNodesAreSpreadOverTheNodes) {
  const NodeFolder folder = NodeFolder::with_one_cpu_each(2);
  const Topology topology = Topology::read(folder.path(), range(0, 2), range(0, 2), current_cpu);
  std::vector<ReadyExpert> ready;
  for (int32_t i = 0; i < 5; ++i) ready.push_back({i, nullptr, i == 0 ? 1 : -1});
  const Placement placement(topology, ready);
  TaskQueue queue;
  std::vector<std::vector<int32_t>> lanes;
  placement.add_lanes(queue, [&](int32_t begin, int32_t end) {
    lanes.emplace_back();
    for (int32_t place = begin; place < end; ++place) lanes.back().push_back(placement[place]);
  });
  EXPECT_EQ(lanes, (std::vector<std::vector<int32_t>>{{2, 4}, {0, 1, 3}}));
}

}  // namespace
}  // namespace torch_mesh
