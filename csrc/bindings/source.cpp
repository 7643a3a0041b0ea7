#include "bindings/source.h"

#include <pybind11/numpy.h>
#include <pybind11/stl.h>

#include <algorithm>
#include <cstring>
#include <limits>
#include <map>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "base/error.h"
#include "kernels/pack.h"
#include "store/gguf_types.h"

namespace torch_mesh {
namespace {

namespace py = pybind11;
using Int64Array = py::array_t<int64_t, py::array::c_style | py::array::forcecast>;
using UInt64Array = py::array_t<uint64_t, py::array::c_style>;

template <typename T>
T number(const py::dict& table, const char* name, T otherwise) {
  return table.contains(name) ? table[name].cast<T>() : otherwise;
}

// "shape [2, 3]"
std::string shape_of(const py::array& array) {
  std::string shape = "shape [";
  for (py::ssize_t axis = 0; axis < array.ndim(); ++axis) {
    if (axis > 0) shape += ", ";
    shape += std::to_string(array.shape(axis));
  }
  return shape + "]";
}

RawPlace place_from(const py::dict& table, int32_t pieces) {
  const RawPlace place{table["piece"].cast<int32_t>(), table["offset"].cast<int64_t>()};
  if (place.piece < 0 || place.piece >= pieces) {
    throw_invalid("raw_views names piece ", place.piece, "; there are ", pieces);
  }
  return place;
}

CodeOrder order_from(const std::string& name) {
  if (name == "bytes") return CodeOrder::kBytes;
  if (name == "pairs") return CodeOrder::kPairs;
  if (name == "halves") return CodeOrder::kHalves;
  if (name == "blocks") return CodeOrder::kBlocks;
  throw_invalid("the order of codes is '", name,
                "'; allowed: 'bytes', 'pairs', 'halves', 'blocks'");
}

ScaleType scale_type_from(const std::string& name) {
  if (name == "bf16") return ScaleType::kBf16;
  if (name == "fp16") return ScaleType::kFp16;
  if (name == "fp32") return ScaleType::kFp32;
  if (name == "e8m0") return ScaleType::kE8m0;
  if (name == "e4m3") return ScaleType::kE4m3;
  throw_invalid("the scales are '", name, "'; allowed: 'bf16', 'fp16', 'fp32', 'e8m0', 'e4m3'");
}

RawCodes codes_from(const py::dict& table, int32_t pieces) {
  RawCodes codes;
  codes.codes = place_from(table, pieces);
  CodesView& view = codes.view;
  view.order = order_from(table["order"].cast<std::string>());
  view.row_bytes = table["row_bytes"].cast<int64_t>();
  if (view.order == CodeOrder::kBlocks) return codes;
  view.flip = number<uint8_t>(table, "flip", 0);
  view.run = table["run"].cast<int32_t>();
  view.run_bytes = table["run_bytes"].cast<int64_t>();
  view.first_row = number<int32_t>(table, "first_row", 0);
  const auto scales = table["scales"].cast<py::dict>();
  codes.scales = place_from(scales, pieces);
  view.scales.type = scale_type_from(scales["type"].cast<std::string>());
  view.scales.rows = scales["rows"].cast<int32_t>();
  view.scales.columns = scales["columns"].cast<int32_t>();
  view.scales.row_bytes = scales["row_bytes"].cast<int64_t>();
  view.scales.column_bytes = scales["column_bytes"].cast<int64_t>();
  constexpr int32_t kMaxRows = 1 << 20;
  if (view.run < 2 || view.first_row < 0 || view.first_row > kMaxRows || view.scales.rows < 1 ||
      view.scales.columns < 1) {
    throw_invalid("codes in runs of ", view.run, " from row ", view.first_row, " with scales for ",
                  view.scales.rows, " x ", view.scales.columns,
                  " weights; allowed: runs of 2 or more, rows from 0, scales for 1 x 1 or more");
  }
  const auto optional = [&](const char* name) {
    return table.contains(name) ? place_from(table[name].cast<py::dict>(), pieces) : RawPlace{};
  };
  codes.factor = optional("factor");
  codes.divisor = optional("divisor");
  codes.group_index = optional("group_index");
  codes.zeros = optional("zeros");
  if (codes.zeros.piece >= 0) {
    const auto zeros = table["zeros"].cast<py::dict>();
    view.zeros_bytes = zeros["bytes"].cast<int64_t>();
    view.zero = zeros["value"].cast<uint8_t>();
  }
  return codes;
}

RawViews raw_views_from(const std::string& dtype, const py::dict& views, int32_t pieces) {
  RawViews result;
  result.type = scalar_type_from("raw_dtype", dtype);
  const std::map<std::string, std::pair<RawView*, RawCodes*>> known = {
      {"gate", {&result.gate, &result.gate_codes}}, {"up", {&result.up, &result.up_codes}},
      {"down", {&result.down, &result.down_codes}}, {"gate_bias", {&result.gate_bias, nullptr}},
      {"up_bias", {&result.up_bias, nullptr}},      {"down_bias", {&result.down_bias, nullptr}}};
  for (const auto& [key, value] : views) {
    const auto name = key.cast<std::string>();
    const auto found = known.find(name);
    if (found == known.end()) throw_invalid("raw_views has no matrix named '", name, "'");
    const auto [floats, codes] = found->second;
    const auto table = value.cast<py::dict>();
    if (codes != nullptr && table.contains("order")) {
      *codes = codes_from(table, pieces);
      result.quantized = true;
      continue;
    }
    RawPlace place = place_from(table, pieces);
    if (place.offset < 0 || place.offset > std::numeric_limits<int64_t>::max() / 4) {
      throw_invalid("raw_views['", name, "'] has a negative offset or one beyond any file");
    }
    place.offset *= scalar_bytes(result.type);
    *floats = {place, table["row_stride"].cast<int64_t>(), table["column_stride"].cast<int64_t>()};
  }
  return result;
}

// Returns each expert's index among `count` raw_views: `given`, or 0 if there is only one.
std::vector<int32_t> views_of_experts(const std::optional<Int64Array>& given, const Source& source,
                                      size_t count) {
  const auto experts = static_cast<size_t>(source.layers) * static_cast<size_t>(source.experts);
  if (!given) {
    if (count != 1) throw_invalid("several raw_views need raw_views_of, which says whose each is");
    return std::vector<int32_t>(experts, 0);
  }
  if (given->ndim() != 2 || given->shape(0) != source.layers || given->shape(1) != source.experts) {
    throw_invalid("raw_views_of has ", shape_of(*given), "; it must be int64 [layers, experts] = [",
                  source.layers, ", ", source.experts, "]");
  }
  std::vector<int32_t> result;
  result.reserve(experts);
  for (const int64_t index : std::span(given->data(), experts)) {
    if (index < 0 || index >= static_cast<int64_t>(count)) {
      throw_invalid("raw_views_of names ", index, "; there are ", count, " raw_views");
    }
    result.push_back(static_cast<int32_t>(index));
  }
  return result;
}

PySource make_source(const std::vector<std::pair<std::string, int64_t>>& files,
                     const Int64Array& extents, const std::optional<UInt64Array>& checksums,
                     const py::bytes& store_id, const std::optional<std::string>& raw_dtype,
                     const std::optional<std::vector<py::dict>>& raw_views,
                     const std::optional<Int64Array>& raw_views_of, int32_t first_expert,
                     int32_t routed_experts, const std::vector<std::vector<std::string>>& copies) {
  if (extents.ndim() != 4 || extents.shape(3) != 3 || extents.shape(2) < 1 ||
      extents.shape(2) > kMaxPieces) {
    throw_invalid("extents has ", shape_of(extents),
                  "; it must be int64 [layers, experts, pieces (1 to ", kMaxPieces, "), 3]");
  }
  PySource result;
  Source& source = result.source;
  if (!copies.empty() && copies.size() != files.size()) {
    throw_invalid("copies has ", copies.size(), " lists; give one for each of ", files.size(),
                  " files, or none");
  }
  for (size_t index = 0; index < files.size(); ++index) {
    const auto& [path, bytes] = files[index];
    source.files.push_back(
        File{path, bytes, copies.empty() ? std::vector<std::string>() : copies[index]});
  }
  source.layers = static_cast<int32_t>(extents.shape(0));
  source.experts = static_cast<int32_t>(extents.shape(1));
  source.pieces = static_cast<int32_t>(extents.shape(2));
  source.first_expert = first_expert;
  source.routed_experts = routed_experts;
  source.store_id = store_id_from(store_id);
  source.raw = raw_dtype.has_value();
  const int64_t* at = extents.data();
  source.extents.reserve(extents.size() / 3);
  for (py::ssize_t i = 0; i < extents.size() / 3; ++i, at += 3) {
    // A number beyond int32 must not wrap into a valid index.
    if (at[0] < 0 || at[0] >= static_cast<int64_t>(files.size())) {
      throw_invalid("an extent names file ", at[0], " of ", files.size());
    }
    source.extents.push_back(Extent{static_cast<int32_t>(at[0]), at[1], at[2]});
  }
  if (checksums) source.checksums.assign(checksums->data(), checksums->data() + checksums->size());
  if (raw_dtype) {
    if (!raw_views || raw_views->empty()) throw_invalid("a raw source needs raw_views");
    for (const py::dict& views : *raw_views) {
      result.views.push_back(raw_views_from(*raw_dtype, views, source.pieces));
    }
    result.views_of = views_of_experts(raw_views_of, source, raw_views->size());
  }
  validate(source);
  return result;
}

// The end of a strided range that begins at `place`. steps() moves it by `count` steps of `bytes`
// each; the last call moves it over the last element.
struct Range {
  const char* name;
  int32_t piece;
  __int128 end;

  Range(const char* name_, const RawPlace& place) : name(name_), piece(place.piece) {
    if (piece < 0) throw_invalid("raw_views lacks '", name, "'");
    end = place.offset;
    negative_ = place.offset < 0;
  }
  Range& steps(int64_t count, int64_t bytes) {
    negative_ |= bytes < 0;
    end += static_cast<__int128>(count) * bytes;
    return *this;
  }
  void within(std::span<const int64_t> piece_bytes) const {
    if (negative_) {
      throw_invalid("raw_views['", name, "'] has a negative offset or stride");
    }
    const int64_t have = piece_bytes[static_cast<size_t>(piece)];
    if (end <= have) return;
    throw_invalid("'", name, "' has ", have, " bytes on disk; its shape needs ",
                  static_cast<int64_t>(end));
  }

 private:
  bool negative_;
};

void check_floats(const RawView& view, ScalarType type, int64_t rows, int64_t columns,
                  const char* name, std::span<const int64_t> piece_bytes) {
  const int64_t bytes = scalar_bytes(type);
  const int64_t max_stride = std::numeric_limits<int64_t>::max() / bytes;
  for (const int64_t stride : {view.row_stride, view.column_stride}) {
    if (stride < 0 || stride > max_stride) {
      throw_invalid("raw_views['", name, "'] has a negative stride or one beyond any file");
    }
  }
  Range(name, view.place)
      .steps(rows - 1, view.row_stride * bytes)
      .steps(columns - 1, view.column_stride * bytes)
      .steps(1, bytes)
      .within(piece_bytes);
}

void check_codes(const RawCodes& codes, Format format, int64_t rows, int64_t columns,
                 const char* name, std::span<const int64_t> piece_bytes) {
  const CodesView& view = codes.view;
  if (codes.codes.piece < 0) throw_invalid("raw_views lacks the codes of '", name, "'");
  if (is_gguf(format) != (view.order == CodeOrder::kBlocks)) {
    throw_invalid("raw_views['", name, "'] has ",
                  is_gguf(format) ? "no blocks of " : "blocks of GGUF for ", format_name(format));
  }
  if (is_gguf(format)) {
    const GgufType type = gguf_type(format);
    Range(name, codes.codes)
        .steps(rows - 1, view.row_bytes)
        .steps(columns / type.depth, type.bytes)
        .within(piece_bytes);
    return;
  }
  // Runs must not overlap. The last one may be cut off, except in kHalves, where a code's position
  // depends on the length of the whole run.
  const int64_t whole = view.order == CodeOrder::kBytes ? view.run : view.run / 2;
  if (columns > view.run && view.run_bytes < whole) {
    throw_invalid("raw_views['", name, "'] has runs of ", whole, " bytes, ", view.run_bytes,
                  " apart");
  }
  const int64_t last = (columns - 1) % view.run + 1;
  const int64_t last_bytes = view.order == CodeOrder::kBytes   ? last
                             : view.order == CodeOrder::kPairs ? (last + 1) / 2
                                                               : view.run / 2;
  Range(name, codes.codes)
      .steps(rows - 1, view.row_bytes)
      .steps((columns - 1) / view.run, view.run_bytes)
      .steps(1, last_bytes)
      .within(piece_bytes);
  const ScalesView& scales = view.scales;
  Range(name, codes.scales)
      .steps((view.first_row + rows - 1) / scales.rows, scales.row_bytes)
      .steps((columns - 1) / scales.columns, scales.column_bytes)
      .steps(1, scale_bytes(scales.type))
      .within(piece_bytes);
  const auto optional = [&](const RawPlace& place, int64_t count, int64_t bytes) {
    if (place.piece >= 0) Range(name, place).steps(count, bytes).within(piece_bytes);
  };
  optional(codes.factor, 1, 4);
  optional(codes.divisor, 1, 4);
  optional(codes.zeros, 1, view.zeros_bytes);
  optional(codes.group_index, columns, 4);
}

CodesView codes_view(const RawCodes& codes, std::span<const std::byte* const> pieces) {
  const auto at = [&](const RawPlace& place) {
    return place.piece < 0 ? nullptr : pieces[static_cast<size_t>(place.piece)] + place.offset;
  };
  CodesView view = codes.view;
  view.data = at(codes.codes);
  view.scales.data = at(codes.scales);
  view.factor = at(codes.factor);
  view.divisor = at(codes.divisor);
  view.zeros = at(codes.zeros);
  view.group_index = at(codes.group_index);
  return view;
}

}  // namespace

ScalarType scalar_type_from(const std::string& what, const std::string& name) {
  if (name == "bf16") return ScalarType::kBf16;
  if (name == "fp16") return ScalarType::kFloat16;
  if (name == "fp32") return ScalarType::kFloat32;
  throw_invalid(what, " is '", name, "'; allowed: 'bf16', 'fp16', 'fp32'");
}

std::array<uint8_t, 16> store_id_from(const py::bytes& bytes) {
  const std::string_view view = bytes;
  std::array<uint8_t, 16> id{};
  if (view.size() != id.size()) {
    throw_invalid("store_id has ", view.size(), " bytes; allowed: 16");
  }
  std::memcpy(id.data(), view.data(), id.size());
  return id;
}

void RawViews::check(const RecordLayout& layout, std::span<const int64_t> piece_bytes) const {
  const auto matrix = [&](const RawView& floats, const RawCodes& codes, int64_t rows,
                          int64_t columns, const char* name) {
    const PackedMatrix& packed = &codes == &down_codes ? layout.down : layout.gate_up;
    if (quantized) return check_codes(codes, packed.format, rows, columns, name, piece_bytes);
    check_floats(floats, type, rows, columns, name, piece_bytes);
  };
  if (layout.gated) matrix(gate, gate_codes, layout.intermediate, layout.hidden, "gate");
  matrix(up, up_codes, layout.intermediate, layout.hidden, "up");
  matrix(down, down_codes, layout.hidden, layout.intermediate, "down");
  if (!layout.bias) return;
  const auto bias = [&](const RawView& view, int64_t rows, const char* name) {
    check_floats(view, type, rows, 1, name, piece_bytes);
  };
  if (layout.gated) bias(gate_bias, layout.intermediate, "gate_bias");
  bias(up_bias, layout.intermediate, "up_bias");
  bias(down_bias, layout.hidden, "down_bias");
}

void RawViews::pack(const RecordLayout& layout, std::span<const std::byte* const> pieces,
                    std::byte* record) const {
  const auto floats = [&](const RawView& raw) -> MatrixView {
    if (raw.place.piece < 0) return {};
    return {pieces[static_cast<size_t>(raw.place.piece)] + raw.place.offset, type, raw.row_stride,
            raw.column_stride};
  };
  if (!quantized) {
    pack_record(layout,
                ExpertViews{.gate = layout.gated ? floats(gate) : MatrixView{},
                            .up = floats(up),
                            .down = floats(down),
                            .gate_bias = floats(gate_bias),
                            .up_bias = floats(up_bias),
                            .down_bias = floats(down_bias)},
                record);
    return;
  }
  pack_record(layout,
              ExpertCodes{.gate = layout.gated ? codes_view(gate_codes, pieces) : CodesView{},
                          .up = codes_view(up_codes, pieces),
                          .down = codes_view(down_codes, pieces),
                          .gate_bias = floats(gate_bias),
                          .up_bias = floats(up_bias),
                          .down_bias = floats(down_bias)},
              record);
}

PackRecord PySource::packing(const EngineOptions& engine) const {
  if (!source.raw) return {};
  std::vector<int64_t> bytes(static_cast<size_t>(source.pieces));
  for (int32_t layer = 0; layer < source.layers; ++layer) {
    for (int32_t expert = 0; expert < source.experts; ++expert) {
      const ExpertId id = source.id_of(layer, expert);
      std::ranges::transform(source.extents_of(id), bytes.begin(), &Extent::bytes);
      try {
        views[views_of[id]].check(engine.layout_of(layer), bytes);
      } catch (const Error& error) {
        throw_invalid("layer ", layer, ", expert ", source.number(expert), ": ", error.what());
      }
    }
  }
  return [views = views, views_of = views_of, engine, experts = source.experts](
             ExpertId id, std::span<const std::byte* const> pieces, std::byte* record) {
    const auto index = static_cast<int64_t>(id);
    const RecordLayout& layout = engine.layout_of(static_cast<int32_t>(index / experts));
    const RawViews& own = views[static_cast<size_t>(views_of[static_cast<size_t>(index)])];
    own.pack(layout, pieces, record);
    std::memset(record + layout.bytes, 0, static_cast<size_t>(engine.layout.bytes - layout.bytes));
  };
}

py::bytearray pack_raw(const std::vector<py::buffer>& buffers, const std::string& dtype,
                       const py::dict& given, const std::string& format, int32_t group_size,
                       int32_t hidden, int32_t intermediate, bool gated, bool bias) {
  const RecordLayout layout = RecordLayout::make(RecordFormats::from_name(format), group_size,
                                                 hidden, intermediate, gated, bias);
  const RawViews views = raw_views_from(dtype, given, static_cast<int32_t>(buffers.size()));
  std::vector<py::buffer_info> infos;
  std::vector<const std::byte*> pieces;
  std::vector<int64_t> bytes;
  for (const py::buffer& buffer : buffers) {
    const py::buffer_info& info = infos.emplace_back(buffer.request());
    if (info.itemsize != 1 || info.ndim != 1 || (info.size > 1 && info.strides[0] != 1)) {
      throw_invalid("pieces must be contiguous buffers of bytes");
    }
    pieces.push_back(static_cast<const std::byte*>(info.ptr));
    bytes.push_back(info.size);
  }
  views.check(layout, bytes);
  PyObject* record = PyByteArray_FromStringAndSize(nullptr, layout.bytes);
  if (record == nullptr) throw py::error_already_set();
  auto result = py::reinterpret_steal<py::bytearray>(record);
  auto* to = reinterpret_cast<std::byte*>(PyByteArray_AS_STRING(record));
  py::gil_scoped_release released;
  views.pack(layout, pieces, to);
  return result;
}

void define_source(py::module_& module) {
  module.def("pack_raw", &pack_raw, py::arg("pieces"), py::arg("raw_dtype"), py::arg("raw_views"),
             py::arg("format"), py::arg("group_size"), py::arg("hidden"), py::arg("intermediate"),
             py::arg("gated"), py::arg("bias"));
  py::class_<PySource>(module, "Source")
      .def(py::init(&make_source), py::arg("files"), py::arg("extents"), py::arg("checksums"),
           py::arg("store_id"), py::arg("raw_dtype") = py::none(),
           py::arg("raw_views") = py::none(), py::arg("raw_views_of") = py::none(),
           py::arg("first_expert") = 0, py::arg("routed_experts") = 0,
           py::arg("copies") = std::vector<std::vector<std::string>>())
      .def_property_readonly("staging_bytes", [](const PySource& source) {
        const PoolOptions options;
        return options.staging * staging_bytes(source.source);
      });
}

}  // namespace torch_mesh
