// Rows of embedding tables as codes and scales: less to read, and more rows in the same cache.
//
// A row is its scales, bf16 numbers, then its codes:
//   int8: one scale, and a signed byte for each value
//   int4: a scale for each 32 values, and nibbles, the first of a pair in the lower one, each code
//         + 8
// A value is code * scale, rounded to the type of the table.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>

#include "kernels/matrix_view.h"
#include "store/record.h"

namespace torch_mesh {

struct RowCodes {
  Format format = Format::kInt8;
  ScalarType type = ScalarType::kBf16;  // of the values that rows become
  int32_t dim = 0;                      // values of a row

  int64_t value_bytes() const { return dim * scalar_bytes(type); }
};

// Throws Error(kInvalid) for a format that rows of tables cannot have, and for a row of no values.
int64_t coded_row_bytes(Format format, int64_t dim);

// Rounds a row of values to coded_row_bytes(format, values.size()) bytes; each code is the nearest
// for its scale. int8's scale has the largest magnitude at 127; int4's minimizes the squared error
// of its group over a set of candidates, as in records of experts. False where a value is not
// finite: there is no code for it.
bool encode_row(Format format, std::span<const float> values, std::byte* row);

// Writes the values of a row, codes.value_bytes() bytes. A value beyond the type's range, which a
// scale that was rounded up may reach, becomes the type's largest.
void decode_row(const RowCodes& codes, const std::byte* row, std::byte* values);

}  // namespace torch_mesh
