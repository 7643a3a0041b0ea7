// torch_mesh._C.Source: where records are, in a store or in the files of a raw checkpoint.
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

// Where in the pieces of a raw expert something begins, in bytes.
struct RawPlace {
  int32_t piece = -1;  // there is none
  int64_t offset = 0;
};

// One matrix inside the pieces of a raw expert; strides count elements.
struct RawView {
  RawPlace place;
  int64_t row_stride = 0;
  int64_t column_stride = 0;
};

// One matrix in codes and scales: a view without its pointers, and where these point to.
struct RawCodes {
  CodesView view;
  RawPlace codes, scales, factor, divisor, zeros, in_turn;
};

struct RawViews {
  ScalarType type = ScalarType::kBf16;
  bool quantised = false;  // gate, up and down are in codes
  RawView gate, up, down, gate_bias, up_bias, down_bias;
  RawCodes gate_codes, up_codes, down_codes;

  // Throws Error(kInvalid) where pieces of these sizes are too short for the layout.
  void check(const RecordLayout& layout, std::span<const int64_t> piece_bytes) const;
  void pack(const RecordLayout& layout, std::span<const std::byte* const> pieces,
            std::byte* record) const;
};

struct PySource {
  Source source;
  // Of a raw one: what experts are laid out as, and which of these each is, [layers][experts].
  std::vector<RawViews> views;
  std::vector<int32_t> views_of;

  // What makes records for an engine of raw pieces; none for a store. Throws Error(kInvalid) where
  // the pieces of an expert are too short for them.
  PackRecord packing(const EngineOptions& engine) const;
};

std::array<uint8_t, 16> store_id_from(const pybind11::bytes& bytes);
// Throws Error(kInvalid), naming `what`.
ScalarType scalar_type_from(const std::string& what, const std::string& name);

void define_source(pybind11::module_& module);

}  // namespace torch_mesh
