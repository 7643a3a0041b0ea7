// torch_mesh._C.Source: the location of records, in a store or in the files of a raw checkpoint.
#pragma once

#include <pybind11/pybind11.h>

#include <array>
#include <cstddef>
#include <cstdint>
#include <span>
#include <string>
#include <vector>

#include "engine/engine.h"
#include "kernels/matrix_view.h"
#include "residency/pool.h"
#include "store/record.h"
#include "store/source.h"

namespace torch_mesh {

// A position in the pieces of a raw expert, in bytes.
struct RawPlace {
  int32_t piece = -1;  // -1: there is none
  int64_t offset = 0;
};

// One matrix inside the pieces of a raw expert; strides count elements.
struct RawView {
  RawPlace place;
  int64_t row_stride = 0;
  int64_t column_stride = 0;
};

// One matrix in codes and scales: a view without its pointers, and the places to point to.
struct RawCodes {
  CodesView view;
  RawPlace codes, scales, factor, divisor, zeros, group_index;
};

struct RawViews {
  ScalarType type = ScalarType::kBf16;
  bool quantized = false;  // gate, up and down are in codes
  RawView gate, up, down, gate_bias, up_bias, down_bias;
  RawCodes gate_codes, up_codes, down_codes;

  // Throws Error(kInvalid) if pieces of these sizes are too short for the layout.
  void check(const RecordLayout& layout, std::span<const int64_t> piece_bytes) const;
  void pack(const RecordLayout& layout, std::span<const std::byte* const> pieces,
            std::byte* record) const;
};

struct PySource {
  Source source;
  // Of a raw source: its distinct layouts, and the index of each expert's, [layers][experts].
  std::vector<RawViews> views;
  std::vector<int32_t> views_of;

  // Returns the function that packs raw pieces to an engine's records; none for a store. Throws
  // Error(kInvalid) if the pieces of an expert are too short.
  PackRecord packing(const EngineOptions& engine) const;
};

std::array<uint8_t, 16> store_id_from(const pybind11::bytes& bytes);
// Throws Error(kInvalid), naming `what`.
ScalarType scalar_type_from(const std::string& what, const std::string& name);

void define_source(pybind11::module_& module);

}  // namespace torch_mesh
