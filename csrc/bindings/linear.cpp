// linear, plain_linear, linear_backward, pack_linear, pack_linear_blocks and unpack_linear: layers
// outside the experts.
#include <ATen/Parallel.h>
#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>
#include <torch/library.h>

#include <cstdint>
#include <optional>
#include <string_view>
#include <vector>

#include "bindings/errors.h"
#include "bindings/process.h"
#include "bindings/runtime.h"
#include "bindings/tensors.h"
#include "engine/dense_linear.h"
#include "kernels/exact_products.h"
#include "kernels/pack.h"
#include "kernels/pack_codes.h"
#include "store/gguf_types.h"

namespace torch_mesh {
namespace {

PackedMatrix matrix_of(c10::string_view format, int64_t group_size, int64_t in_features,
                       int64_t out_features) {
  return PackedMatrix::make(format_from_name(std::string_view(format.data(), format.size())),
                            clamped_to_int32(group_size), clamped_to_int32(out_features),
                            clamped_to_int32(in_features));
}

void check_packed(const PackedMatrix& matrix, const at::Tensor& packed) {
  TORCH_CHECK_VALUE(
      packed.device().is_cpu() && packed.scalar_type() == at::kByte && packed.dim() == 1 &&
          packed.size(0) == matrix.bytes() && packed.is_contiguous(),
      "packed must be a contiguous uint8 CPU tensor of ", matrix.bytes(), " bytes for ",
      matrix.columns, " x ", matrix.depth, " weights in ", format_name(matrix.format), "; got ",
      packed.scalar_type(), " of shape ", packed.sizes(), " on ", packed.device());
}

const std::byte* bytes_of(const at::Tensor& packed) {
  return reinterpret_cast<const std::byte*>(packed.const_data_ptr());
}

// Returns the output [..., out_features] for x [..., in_features], which multiply(rows) computes.
template <typename Multiply>
at::Tensor with_rows(const at::Tensor& x, const OptionalTensor& bias, int64_t in_features,
                     int64_t out_features, const Multiply& multiply) {
  TORCH_CHECK_VALUE(!bias || bias->sizes() == at::IntArrayRef{out_features}, "bias must be [",
                    out_features, "]; got ", bias ? bias->sizes() : at::IntArrayRef{});
  std::vector<int64_t> sizes = x.sizes().vec();
  sizes.back() = out_features;
  at::Tensor out = at::empty(sizes, x.options());
  if (out.numel() == 0) return out;
  const at::Tensor rows = with_contiguous_rows(x.dim() == 2 ? x : x.reshape({-1, in_features}));
  const at::Tensor addends = bias ? bias->contiguous() : at::Tensor();
  multiply(
      LinearRows{.x = const_rows(rows, "x"),
                 .rows = rows.size(0),
                 .bias = bias ? addends.const_data_ptr() : nullptr,
                 .bias_type = bias ? scalar_type(addends, "bias") : ScalarType::kFloat32,
                 .out = MutableRows{out.mutable_data_ptr(), scalar_type(out, "x"), out_features}});
  return out;
}

at::Tensor linear(const at::Tensor& x, const at::Tensor& packed, const OptionalTensor& bias,
                  int64_t in_features, int64_t out_features, c10::string_view format,
                  int64_t group_size) {
  check_process();
  const PackedMatrix matrix = matrix_of(format, group_size, in_features, out_features);
  check_packed(matrix, packed);
  TORCH_CHECK_VALUE(x.dim() >= 1 && x.size(-1) == matrix.depth,
                    "x must be [..., in_features=", matrix.depth, "]; got ", x.sizes());
  return with_rows(x, bias, in_features, out_features, [&](const LinearRows& rows) {
    dense_linear(matrix, bytes_of(packed), rows, torch_runtime(), at::get_num_threads(),
                 process_workspaces());
  });
}

at::Tensor plain_linear(const at::Tensor& x, const at::Tensor& weight, const OptionalTensor& bias) {
  check_process();
  TORCH_CHECK_VALUE(
      weight.dim() == 2 && weight.device().is_cpu() && weight.scalar_type() == at::kBFloat16 &&
          weight.stride(1) == 1,
      "weight must be a bfloat16 CPU matrix [out_features, in_features] with contiguous "
      "rows; got ",
      weight.scalar_type(), " of shape ", weight.sizes(), " and strides ", weight.strides(), " on ",
      weight.device());
  const int64_t in_features = weight.size(1), out_features = weight.size(0);
  TORCH_CHECK_VALUE(x.dim() >= 1 && x.size(-1) == in_features && x.scalar_type() == at::kBFloat16,
                    "x must be bfloat16 [..., in_features=", in_features, "]; got ",
                    x.scalar_type(), " ", x.sizes());
  const PackedMatrix matrix = PackedMatrix::make(Format::kBf16, 0, clamped_to_int32(out_features),
                                                 clamped_to_int32(in_features));
  return with_rows(x, bias, in_features, out_features, [&](const LinearRows& rows) {
    unpacked_linear(matrix, weight.const_data_ptr(), weight.stride(0) * 2, rows, torch_runtime(),
                    at::get_num_threads(), process_workspaces());
  });
}

at::Tensor unpack_linear(const at::Tensor& packed, int64_t in_features, int64_t out_features,
                         c10::string_view format, int64_t group_size) {
  const PackedMatrix matrix = matrix_of(format, group_size, in_features, out_features);
  check_packed(matrix, packed);
  at::Tensor weight = at::empty({out_features, in_features}, at::TensorOptions().dtype(at::kFloat));
  unpack_blocks(matrix, bytes_of(packed), weight.mutable_data_ptr<float>());
  return weight;
}

at::Tensor linear_backward(const at::Tensor& grad, const at::Tensor& packed, int64_t in_features,
                           int64_t out_features, c10::string_view format, int64_t group_size) {
  check_process();
  const PackedMatrix matrix = matrix_of(format, group_size, in_features, out_features);
  check_packed(matrix, packed);
  TORCH_CHECK_VALUE(grad.dim() >= 1 && grad.size(-1) == out_features,
                    "grad must be [..., out_features=", out_features, "]; got ", grad.sizes());
  const at::Tensor rows = contiguous_as(grad.reshape({-1, out_features}), at::kFloat);
  const at::Tensor x_grad = at::empty({rows.size(0), in_features}, rows.options());
  const ExactProducts products(kernel_table(), matrix, 1, bytes_of(packed));
  const FloatRows from{rows.const_data_ptr<float>(), out_features, clamped_to_int32(rows.size(0))};
  parallel_for(torch_runtime(), products.input_tasks(), at::get_num_threads(),
               [&](int64_t begin, int64_t end) {
                 for (int64_t task = begin; task < end; ++task) {
                   products.inputs(static_cast<int32_t>(task), from,
                                   x_grad.mutable_data_ptr<float>(), in_features);
                 }
               });
  std::vector<int64_t> sizes = grad.sizes().vec();
  sizes.back() = in_features;
  return x_grad.to(grad.scalar_type()).reshape(sizes);
}

at::Tensor pack_linear(const at::Tensor& weight, c10::string_view format, int64_t group_size) {
  check_process();
  TORCH_CHECK_VALUE(weight.dim() == 2 && weight.device().is_cpu(),
                    "weight must be a CPU matrix [out_features, in_features]; got ", weight.sizes(),
                    " on ", weight.device());
  const PackedMatrix matrix = matrix_of(format, group_size, weight.size(1), weight.size(0));
  const MatrixView view{weight.const_data_ptr(), scalar_type(weight, "weight"), weight.stride(0),
                        weight.stride(1)};
  at::Tensor packed = at::empty({matrix.bytes()}, at::TensorOptions().dtype(at::kByte));
  auto* blocks = reinterpret_cast<std::byte*>(packed.mutable_data_ptr());
  parallel_for(
      torch_runtime(), matrix.blocks, at::get_num_threads(), [&](int64_t begin, int64_t end) {
        pack_blocks(matrix, view, static_cast<int32_t>(begin), static_cast<int32_t>(end), blocks);
      });
  return packed;
}

// Views rows of GGUF blocks: each a scale and 32 codes, or a block of the format's own type.
CodesView blocks_view(const PackedMatrix& matrix, const std::byte* data) {
  if (is_gguf(matrix.format)) {
    const GgufType type = gguf_type(matrix.format);
    return {.data = data,
            .order = CodeOrder::kBlocks,
            .row_bytes = int64_t{matrix.depth / type.depth} * type.bytes};
  }
  constexpr int32_t kBlock = 32;
  const bool bytes = matrix.format == Format::kInt8Fp16;
  const int64_t scale = scale_bytes(matrix.scale_type());
  const int64_t block_bytes = scale + (bytes ? kBlock : kBlock / 2);
  const int64_t row_bytes = matrix.depth / kBlock * block_bytes;
  return {.data = data + scale,
          .order = bytes ? CodeOrder::kBytes : CodeOrder::kHalves,
          .run = kBlock,
          .run_bytes = block_bytes,
          .row_bytes = row_bytes,
          .scales = {data, matrix.scale_type(), 1, kBlock, row_bytes, block_bytes}};
}

at::Tensor pack_linear_blocks(const at::Tensor& blocks, int64_t in_features,
                              c10::string_view format) {
  check_process();
  constexpr int64_t kGroup = 32;  // that of Q8_0 and Q4_0; the others have their own
  TORCH_CHECK_VALUE(
      blocks.dim() == 2 && blocks.device().is_cpu() && blocks.scalar_type() == at::kByte &&
          blocks.is_contiguous(),
      "blocks must be a contiguous uint8 CPU matrix [out_features, bytes of a row]; got ",
      blocks.scalar_type(), " of shape ", blocks.sizes(), " on ", blocks.device());
  const PackedMatrix matrix = matrix_of(format, kGroup, in_features, blocks.size(0));
  TORCH_CHECK_VALUE(holds_gguf_codes(matrix.format), format_name(matrix.format),
                    " holds no blocks of a GGUF file");
  TORCH_CHECK_VALUE(in_features % kGroup == 0, "in_features is ", in_features,
                    ", no multiple of the blocks' ", kGroup, " weights");
  const CodesView view = blocks_view(matrix, bytes_of(blocks));
  TORCH_CHECK_VALUE(blocks.size(1) == view.row_bytes, "a row of ", in_features, " weights in ",
                    format_name(matrix.format), " has ", view.row_bytes, " bytes; got ",
                    blocks.size(1));
  check_codes(matrix, view);
  at::Tensor packed = at::empty({matrix.bytes()}, at::TensorOptions().dtype(at::kByte));
  auto* to = reinterpret_cast<std::byte*>(packed.mutable_data_ptr());
  parallel_for(torch_runtime(), matrix.blocks, at::get_num_threads(),
               [&](int64_t begin, int64_t end) {
                 for (int64_t block = begin; block < end; ++block) {
                   pack_codes(matrix, view, static_cast<int32_t>(block) * kBlockColumns,
                              to + block * matrix.block_bytes);
                 }
               });
  return packed;
}

}  // namespace
}  // namespace torch_mesh

TORCH_LIBRARY_IMPL(torch_mesh, CPU, m) {
  m.impl("linear", torch_mesh::op<torch_mesh::linear>);
  m.impl("plain_linear", torch_mesh::op<torch_mesh::plain_linear>);
  m.impl("linear_backward", torch_mesh::op<torch_mesh::linear_backward>);
  m.impl("pack_linear", torch_mesh::op<torch_mesh::pack_linear>);
  m.impl("pack_linear_blocks", torch_mesh::op<torch_mesh::pack_linear_blocks>);
  m.impl("unpack_linear", torch_mesh::op<torch_mesh::unpack_linear>);
}
