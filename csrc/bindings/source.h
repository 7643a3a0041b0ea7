// torch_mesh._C.Source: where records are, in a store or in the files of a raw checkpoint.
#pragma once

#include <pybind11/pybind11.h>

#include <array>
#include <cstdint>

#include "kernels/matrix_view.h"
#include "residency/pool.h"
#include "store/record.h"
#include "store/source.h"

namespace torch_mesh {

// One matrix inside the pieces of a raw expert.
struct RawView {
  int32_t piece = -1;
  int64_t offset = 0;
  int64_t row_stride = 0;
  int64_t column_stride = 0;
};

struct RawViews {
  ScalarType type = ScalarType::kBf16;
  RawView gate, up, down, gate_bias, up_bias, down_bias;
};

struct PySource {
  Source source;
  RawViews views;  // of a raw one

  // What makes records of `layout` of raw pieces; none for a store. Throws Error(kInvalid) where
  // the pieces of an expert are too short for them.
  PackRecord packing(const RecordLayout& layout) const;
};

std::array<uint8_t, 16> store_id_from(const pybind11::bytes& bytes);

void define_source(pybind11::module_& module);

}  // namespace torch_mesh
