// Packing: quantizes and lays out one expert; and unpacking.
#pragma once

#include <cstddef>
#include <cstdint>

#include "base/runtime.h"
#include "kernels/expert_ffn.h"
#include "kernels/matrix_view.h"
#include "kernels/pack_calibrated.h"
#include "store/record.h"

namespace torch_mesh {

// Writes layout.bytes bytes, padding included. The result depends on the weights alone: every
// instruction set packs the same bits. Integer scales minimize the squared error of each group over
// a set of candidates on the bf16 grid. A weight that is not finite makes its group's scale NaN, so
// that it shows in the output instead of vanishing. Throws Error(kInvalid) when a view is missing,
// or present and not part of the layout, and for a format of codes.
void pack_record(const RecordLayout& layout, const ExpertViews& views, std::byte* record);
void pack_record(const RecordLayout& layout, const ExpertViews& views, std::byte* record,
                 const KernelTable& table);

// The same, minimizing the errors of products rather than of weights (pack_calibrated.h). A weight
// that is not finite spreads to the rest of its column. Throws Error(kInvalid) for bf16 and bf12,
// too.
void pack_record(const RecordLayout& layout, const ExpertViews& views, const ExpertMoments& moments,
                 std::byte* record, const Runtime& runtime, int32_t threads,
                 const KernelTable& table);

// Packs codes and scales as pack_codes.h does. Throws Error(kInvalid) for what the layout's format
// cannot hold: scales of another type or of fewer weights than a group has, and scales or codes
// that are not numbers.
void pack_record(const RecordLayout& layout, const ExpertCodes& codes, std::byte* record);

// Packs blocks [begin, end) of a matrix on its own; `blocks` points at block 0. Blocks are
// independent: ranges may be packed by different threads.
void pack_blocks(const PackedMatrix& matrix, const MatrixView& view, int32_t begin, int32_t end,
                 std::byte* blocks);

// Writes the weights as the kernels see them. gate_up is [halves * intermediate][hidden] with gate
// first, down is [hidden][intermediate]; the biases likewise. A null pointer skips that part.
void unpack_record(const RecordLayout& layout, const std::byte* record, float* gate_up, float* down,
                   float* gate_up_bias, float* down_bias);
// Writes [columns][depth] of a matrix on its own.
void unpack_blocks(const PackedMatrix& matrix, const std::byte* blocks, float* weights);

}  // namespace torch_mesh
