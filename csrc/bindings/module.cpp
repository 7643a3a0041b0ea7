// The control plane, torch_mesh._C; torch_mesh/_C.pyi is its reference.
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>
#include <torch/version.h>

#include <algorithm>
#include <map>
#include <string>
#include <string_view>
#include <vector>

#include "bindings/device.h"
#include "bindings/engine.h"
#include "bindings/errors.h"
#include "bindings/replay.h"
#include "bindings/runtime.h"
#include "bindings/source.h"
#include "bindings/tables.h"
#include "engine/attention.h"
#include "io/reader.h"
#include "kernels/kernel_table.h"
#include "kernels/low_rank.h"
#include "kernels/pack_calibrated.h"
#include "residency/memory/topology.h"
#include "residency/policies/policy.h"

namespace torch_mesh {
namespace {

namespace py = pybind11;

std::map<std::string, std::string> features() {
  std::map<std::string, std::string> result;
  std::string tables;
  for (const std::string_view name : kernel_tables()) {
    if (!tables.empty()) tables += " ";
    tables += name;
  }
  result["isa"] = kernel_table_name(kernel_table());
  result["isas"] = tables;
  result["uring"] = uring_unavailable();
  result["numa_nodes"] = std::to_string(std::max<size_t>(memory_nodes().size(), 1));
  result["numa_compute_nodes"] = std::to_string(Topology::of_this_process().nodes());
  return result;
}

// Defines a Python function that calls `function` with the largest layout of all layers and
// `Arguments`. Their `names` follow those of the layout.
template <typename Result, typename... Arguments, typename... Names>
void define_of_layout(py::module_& m, const char* name,
                      Result (*function)(const RecordLayout&, Arguments...),
                      const Names&... names) {
  m.def(
      name,
      [function](const std::string& format, int32_t group_size, int32_t hidden,
                 int32_t intermediate, bool gated, bool bias, Arguments... arguments) {
        const auto layouts =
            layouts_of_layers(format, group_size, hidden, intermediate, gated, bias);
        return function(largest(layouts), arguments...);
      },
      py::arg("format"), py::arg("group_size"), py::arg("hidden"), py::arg("intermediate"),
      py::arg("gated"), py::arg("bias"), names...);
}

int64_t record_bytes(const RecordLayout& layout) { return layout.bytes; }

// For kernels that are not C++: those of GPUs.
std::map<std::string, int64_t> record_layout(const RecordLayout& layout) {
  return {{"bytes", layout.bytes},
          {"group_bytes", layout.down.group_bytes},
          {"scales_bytes", layout.down.scales_bytes()},
          {"gate_up_offset", layout.gate_up_offset},
          {"gate_up_block_bytes", layout.gate_up.block_bytes},
          {"gate_up_bias_offset", layout.gate_up_bias_offset},
          {"down_offset", layout.down_offset},
          {"down_block_bytes", layout.down.block_bytes},
          {"down_bias_offset", layout.down_bias_offset}};
}

int32_t chunk_tokens(const RecordLayout& layout, int32_t top_k, int64_t workspace) {
  if (top_k < 1) throw_invalid("top_k is ", top_k, "; it must be 1 or more");
  if (workspace < 1) throw_invalid("workspace is ", workspace, " bytes; it must be 1 or more");
  const ExpertFfn ffn(layout, Activation::kSilu, torch_runtime(), kernel_table());
  return tokens_per_chunk(ffn, layout, top_k, workspace);
}

int64_t linear_bytes(const std::string& format, int32_t group_size, int32_t in_features,
                     int32_t out_features) {
  return PackedMatrix::make(format_from_name(format), group_size, out_features, in_features)
      .bytes();
}

uint64_t checksum(const py::bytes& store_id, int32_t layer, int32_t expert,
                  const py::buffer& record) {
  const std::array<uint8_t, 16> id = store_id_from(store_id);
  const py::buffer_info info = record.request();
  if (!PyBuffer_IsContiguous(info.view(), 'C')) {
    throw_invalid("the record must be contiguous bytes");
  }
  py::gil_scoped_release released;
  return record_checksum(id, layer, expert, static_cast<const std::byte*>(info.ptr),
                         info.size * info.itemsize);
}

std::vector<std::string> policies() {
  const std::vector<std::string_view> names = policy_names();
  return {names.begin(), names.end()};
}

void define(py::module_& m) {
  register_error_translator();
  m.attr("torch_version") = TORCH_VERSION;
  m.def("features", features, py::call_guard<py::gil_scoped_release>());
  define_of_layout(m, "record_bytes", record_bytes);
  define_of_layout(m, "record_layout", record_layout);
  m.def(
      "calibration_order",
      [](const std::string& format) {
        const CalibrationOrder order = calibration_order(RecordFormats::from_name(format).down);
        return py::make_tuple(order.streams, order.step);
      },
      py::arg("format"));
  define_of_layout(m, "tokens_per_chunk", chunk_tokens, py::arg("top_k"), py::arg("workspace"));
  m.attr("MAX_THREADS") = kMaxThreads;
  m.attr("MAX_TIMEOUT") = kMaxTimeout;
  m.attr("MAX_DECODE_ROWS") = kMaxDecodeRows;
  m.attr("MAX_RANK") = kMaxRank;
  m.attr("HEAD_DIM_STEP") = kHeadDimStep;
  m.attr("MAX_HEAD_DIM") = kMaxHeadDim;
  m.def("linear_bytes", linear_bytes, py::arg("format"), py::arg("group_size"),
        py::arg("in_features"), py::arg("out_features"));
  m.def("record_checksum", checksum, py::arg("store_id"), py::arg("layer"), py::arg("expert"),
        py::arg("record"));
  m.def("policy_names", policies);
  m.def("direct_io_alignment", direct_io_alignment, py::arg("path"),
        py::call_guard<py::gil_scoped_release>());
  define_source(m);
  define_engine(m);
  define_tables(m);
  define_replay(m);
  define_device(m);
}

}  // namespace
}  // namespace torch_mesh

PYBIND11_MODULE(_C, m) { torch_mesh::define(m); }
