#include "bindings/source.h"

#include <pybind11/numpy.h>
#include <pybind11/stl.h>

#include <cstring>
#include <map>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "bindings/errors.h"
#include "kernels/pack.h"

namespace torch_mesh {
namespace {

namespace py = pybind11;
using Int64Array = py::array_t<int64_t, py::array::c_style | py::array::forcecast>;
using UInt64Array = py::array_t<uint64_t, py::array::c_style>;

ScalarType raw_type(const std::string& name) {
  if (name == "bf16") return ScalarType::kBf16;
  if (name == "fp16") return ScalarType::kFloat16;
  if (name == "fp32") return ScalarType::kFloat32;
  invalid("raw_dtype is '" + name + "'; allowed: 'bf16', 'fp16', 'fp32'");
}

RawViews raw_views_from(const std::string& dtype, const py::dict& views, int32_t pieces) {
  RawViews result;
  result.type = raw_type(dtype);
  const std::map<std::string, RawView*> known = {
      {"gate", &result.gate},       {"up", &result.up},
      {"down", &result.down},       {"gate_bias", &result.gate_bias},
      {"up_bias", &result.up_bias}, {"down_bias", &result.down_bias}};
  for (const auto& [key, value] : views) {
    const auto name = key.cast<std::string>();
    const auto found = known.find(name);
    if (found == known.end()) invalid("raw_views has no matrix named '" + name + "'");
    const auto view = value.cast<py::dict>();
    *found->second = RawView{.piece = view["piece"].cast<int32_t>(),
                             .offset = view["offset"].cast<int64_t>(),
                             .row_stride = view["row_stride"].cast<int64_t>(),
                             .column_stride = view["column_stride"].cast<int64_t>()};
    if (found->second->piece < 0 || found->second->piece >= pieces) {
      invalid("raw_views['" + name + "'] names piece " + std::to_string(found->second->piece) +
              "; there are " + std::to_string(pieces));
    }
  }
  return result;
}

PySource make_source(const std::vector<std::pair<std::string, int64_t>>& files,
                     const Int64Array& extents, const std::optional<UInt64Array>& checksums,
                     const py::bytes& store_id, const std::optional<std::string>& raw_dtype,
                     const std::optional<py::dict>& raw_views) {
  if (extents.ndim() != 4 || extents.shape(3) != 3 || extents.shape(2) < 1 ||
      extents.shape(2) > kMaxPieces) {
    invalid("extents must be int64 [layers, experts, pieces (1 to " + std::to_string(kMaxPieces) +
            "), 3]");
  }
  PySource result;
  Source& source = result.source;
  for (const auto& [path, bytes] : files) source.files.push_back(File{path, bytes});
  source.layers = static_cast<int32_t>(extents.shape(0));
  source.experts = static_cast<int32_t>(extents.shape(1));
  source.pieces = static_cast<int32_t>(extents.shape(2));
  source.store_id = store_id_from(store_id);
  source.raw = raw_dtype.has_value();
  const int64_t* at = extents.data();
  source.extents.reserve(extents.size() / 3);
  for (py::ssize_t i = 0; i < extents.size() / 3; ++i, at += 3) {
    // A number beyond int32 must not wrap into a valid index.
    if (at[0] < 0 || at[0] >= static_cast<int64_t>(files.size())) {
      invalid("an extent names file " + std::to_string(at[0]) + " of " +
              std::to_string(files.size()));
    }
    source.extents.push_back(Extent{static_cast<int32_t>(at[0]), at[1], at[2]});
  }
  if (checksums) source.checksums.assign(checksums->data(), checksums->data() + checksums->size());
  if (raw_dtype) {
    if (!raw_views) invalid("a raw source needs raw_views");
    result.views = raw_views_from(*raw_dtype, *raw_views, source.pieces);
  }
  validate(source);
  return result;
}

// The last element that a view touches must lie within its piece, for every expert.
void check_view(const Source& source, const RawView& view, ScalarType type, int64_t rows,
                int64_t columns, const char* name) {
  if (view.piece < 0) invalid(std::string("raw_views lacks '") + name + "'");
  if (view.offset < 0 || view.row_stride < 0 || view.column_stride < 0) {
    invalid(std::string("raw_views['") + name + "'] has a negative offset or stride");
  }
  const __int128 last = static_cast<__int128>(view.offset) +
                        static_cast<__int128>(rows - 1) * view.row_stride +
                        static_cast<__int128>(columns - 1) * view.column_stride;
  const __int128 bytes = (last + 1) * scalar_bytes(type);
  for (int32_t layer = 0; layer < source.layers; ++layer) {
    for (int32_t expert = 0; expert < source.experts; ++expert) {
      const int64_t have = source.expert(layer, expert)[view.piece].bytes;
      if (bytes > have) {
        invalid(std::string("'") + name + "' of layer " + std::to_string(layer) + ", expert " +
                std::to_string(expert) + " has " + std::to_string(have) +
                " bytes on disk; its shape needs " + std::to_string(static_cast<int64_t>(bytes)));
      }
    }
  }
}

void check_views(const PySource& source, const RecordLayout& layout) {
  const auto check = [&](const RawView& view, int64_t rows, int64_t columns, const char* name) {
    check_view(source.source, view, source.views.type, rows, columns, name);
  };
  const RawViews& views = source.views;
  if (layout.gated) check(views.gate, layout.intermediate, layout.hidden, "gate");
  check(views.up, layout.intermediate, layout.hidden, "up");
  check(views.down, layout.hidden, layout.intermediate, "down");
  if (!layout.bias) return;
  if (layout.gated) check(views.gate_bias, layout.intermediate, 1, "gate_bias");
  check(views.up_bias, layout.intermediate, 1, "up_bias");
  check(views.down_bias, layout.hidden, 1, "down_bias");
}

}  // namespace

std::array<uint8_t, 16> store_id_from(const py::bytes& bytes) {
  const std::string_view view = bytes;
  std::array<uint8_t, 16> id{};
  if (view.size() != id.size()) {
    invalid("store_id has " + std::to_string(view.size()) + " bytes; allowed: 16");
  }
  std::memcpy(id.data(), view.data(), id.size());
  return id;
}

PackRecord PySource::packing(const RecordLayout& layout) const {
  if (!source.raw) return {};
  check_views(*this, layout);
  return [views = views, layout](int32_t, std::span<const std::byte* const> pieces,
                                 std::byte* record) {
    const auto view = [&](const RawView& raw) -> MatrixView {
      if (raw.piece < 0) return {};
      return {pieces[raw.piece] + raw.offset * scalar_bytes(views.type), views.type, raw.row_stride,
              raw.column_stride};
    };
    pack_record(layout,
                ExpertViews{.gate = layout.gated ? view(views.gate) : MatrixView{},
                            .up = view(views.up),
                            .down = view(views.down),
                            .gate_bias = view(views.gate_bias),
                            .up_bias = view(views.up_bias),
                            .down_bias = view(views.down_bias)},
                record);
  };
}

void define_source(py::module_& module) {
  py::class_<PySource>(module, "Source")
      .def(py::init(&make_source), py::arg("files"), py::arg("extents"), py::arg("checksums"),
           py::arg("store_id"), py::arg("raw_dtype") = py::none(),
           py::arg("raw_views") = py::none())
      .def_property_readonly("staging_bytes", [](const PySource& source) {
        const PoolOptions options;
        return options.staging * staging_bytes(source.source);
      });
}

}  // namespace torch_mesh
