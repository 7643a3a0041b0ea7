#include "bindings/tables.h"

#include <pybind11/numpy.h>
#include <pybind11/stl.h>

#include <array>
#include <map>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <tuple>
#include <utility>
#include <vector>

#include "base/error.h"
#include "bindings/engine.h"
#include "bindings/keywords.h"
#include "bindings/runtime.h"
#include "bindings/source.h"

namespace torch_mesh {
namespace {

namespace py = pybind11;
using Bytes = py::array_t<uint8_t, py::array::c_style>;
using Floats = py::array_t<float, py::array::c_style>;

Table table_from(const py::dict& given) {
  Keywords keys("a table", given);
  Table table;
  table.name = keys.take<std::string>("name");
  table.row_bytes = keys.take<int64_t>("row_bytes");
  using Codes = std::tuple<std::string, std::string, int32_t>;
  if (const auto codes = keys.take<std::optional<Codes>>("codes")) {
    const auto& [format, type, dim] = *codes;
    table.codes =
        RowCodes{format_from_name(format), scalar_type_from("the dtype of codes", type), dim};
  }
  table.stride = keys.take<int64_t>("stride");
  table.has_checksums = keys.take<bool>("has_checksums");
  table.salt = store_id_from(keys.take<py::bytes>("salt"));
  table.cache_bytes = keys.take<int64_t>("cache_bytes");
  using Stretch = std::tuple<int32_t, int64_t, int64_t>;
  for (const auto& [file, offset, rows] : keys.take<std::vector<Stretch>>("stretches")) {
    table.stretches.push_back({file, offset, rows});
  }
  keys.none_left();
  return table;
}

TablesOptions options_from(Keywords& given) {
  TablesOptions options;
  using Named = std::vector<std::pair<std::string, int64_t>>;
  for (const auto& [path, bytes] : given.take<Named>("files")) {
    options.files.push_back({path, bytes});
  }
  for (const py::dict& table : given.take<std::vector<py::dict>>("tables")) {
    options.tables.push_back(table_from(table));
  }
  options.verify = given.take<bool>("verify");
  options.timeout = timeout_from(given.take<double>("timeout"));
  set_reader_io(given.take<std::string>("io"), options.reader);
  if (const auto* between = given.take<const PyInterpose*>("interpose", nullptr)) {
    options.reader.interpose = between->interpose;
  }
  return options;
}

constexpr std::pair<const char*, int64_t TableStats::*> kCounts[] = {
    {"gathers", &TableStats::gathers},
    {"lookups", &TableStats::lookups},
    {"distinct", &TableStats::distinct},
    {"hits", &TableStats::hits},
    {"reads", &TableStats::reads},
    {"bytes_read", &TableStats::bytes_read},
    {"prefetches", &TableStats::prefetches},
    {"failed", &TableStats::failed},
    {"wait_nanoseconds", &TableStats::wait_nanoseconds}};

std::vector<std::map<std::string_view, int64_t>> stats(const PyTables& self) {
  const auto counted = self.call([](Tables& tables) {
    std::vector<TableStats> of_each;
    for (int32_t table = 0; table < tables.tables(); ++table)
      of_each.push_back(tables.stats(table));
    return of_each;
  });
  std::vector<std::map<std::string_view, int64_t>> shown;
  for (const TableStats& table : counted) {
    auto& counts = shown.emplace_back();
    for (const auto& [name, member] : kCounts) counts[name] = table.*member;
  }
  return shown;
}

py::dict description(const PyTables& self) {
  struct Seen {
    std::vector<int64_t> cache_rows;
    int64_t memory_bytes;
    std::string io;
    std::vector<std::string> notes;
  };
  const Seen seen = self.call([](Tables& tables) {
    Seen seen{{}, tables.memory_bytes(), tables.reader().backend(), tables.reader().notes()};
    for (int32_t table = 0; table < tables.tables(); ++table) {
      seen.cache_rows.push_back(tables.cache_rows(table));
    }
    return seen;
  });
  py::dict result;
  result["cache_rows"] = seen.cache_rows;
  result["memory_bytes"] = seen.memory_bytes;
  result["io"] = seen.io;
  result["notes"] = seen.notes;
  return result;
}

Bytes padded_rows(const py::bytes& salt, int64_t first_row, int64_t row_bytes, const Bytes& rows) {
  const std::array<uint8_t, 16> id = store_id_from(salt);
  if (row_bytes < 1 || rows.size() % row_bytes != 0) {
    throw_invalid(rows.size(), " bytes are not whole rows of ", row_bytes);
  }
  Bytes padded(rows.size() / row_bytes * padded_row_bytes(row_bytes));
  const std::span from(reinterpret_cast<const std::byte*>(rows.data()),
                       static_cast<size_t>(rows.size()));
  const std::span to(reinterpret_cast<std::byte*>(padded.mutable_data()),
                     static_cast<size_t>(padded.size()));
  const py::gil_scoped_release released;
  pad_rows(id, first_row, row_bytes, from, to);
  return padded;
}

Bytes coded_rows(const std::string& weights, int64_t first_row, const Floats& values) {
  const Format format = format_from_name(weights);
  if (values.ndim() != 2) {
    throw_invalid("values has ", values.ndim(), " dimensions; it must be float32 [rows, width]");
  }
  const int64_t rows = values.shape(0), dim = values.shape(1);
  const int64_t row_bytes = coded_row_bytes(format, dim);
  Bytes coded({rows, row_bytes});
  auto* to = reinterpret_cast<std::byte*>(coded.mutable_data());
  const std::span from(values.data(), static_cast<size_t>(values.size()));
  const py::gil_scoped_release released;
  for (int64_t row = 0; row < rows; ++row) {
    if (!encode_row(format, from.subspan(row * dim, dim), to + row * row_bytes)) {
      throw_invalid("row ", first_row + row, " has a value that is not finite, and ", weights,
                    " has no code for it");
    }
  }
  return coded;
}

}  // namespace

PyTables::PyTables(const py::kwargs& given) : PyLive("these tables are closed") {
  Keywords keys("Tables", given);
  TablesOptions options = options_from(keys);
  keys.none_left();
  const py::gil_scoped_release released;
  open(std::make_unique<Tables>(std::move(options), torch_runtime()));
}

void define_tables(py::module_& module) {
  module.def("padded_row_bytes", padded_row_bytes, py::arg("row_bytes"));
  module.def("pad_rows", padded_rows, py::arg("salt"), py::arg("first_row"), py::arg("row_bytes"),
             py::arg("rows"));
  module.def(
      "coded_row_bytes",
      [](const std::string& weights, int64_t dim) {
        return coded_row_bytes(format_from_name(weights), dim);
      },
      py::arg("weights"), py::arg("dim"));
  module.def("code_rows", coded_rows, py::arg("weights"), py::arg("first_row"), py::arg("values"));
  py::class_<PyTables>(module, "Tables")
      .def(py::init<const py::kwargs&>())
      .def_property_readonly("id", &PyTables::id)
      .def("stats", stats)
      .def("reset_stats",
           [](const PyTables& self) { self.call([](Tables& tables) { tables.reset_stats(); }); })
      .def("describe", description)
      .def("close", &PyTables::close, py::arg("wait") = true);
}

}  // namespace torch_mesh
