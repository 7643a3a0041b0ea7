// pack, pack_calibrated and unpack.
#include "kernels/pack.h"

#include <ATen/Parallel.h>
#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/isfinite.h>
#include <torch/library.h>

#include <cstdint>
#include <optional>
#include <tuple>

#include "bindings/errors.h"
#include "bindings/process.h"
#include "bindings/runtime.h"
#include "bindings/tensors.h"
#include "store/record.h"

namespace torch_mesh {
namespace {

MatrixView view(const OptionalTensor& tensor, at::IntArrayRef shape, const char* what) {
  if (!tensor.has_value()) return {};
  TORCH_CHECK_VALUE(tensor->device().is_cpu(), what, " is on ", tensor->device(),
                    "; pack needs CPU tensors");
  TORCH_CHECK_VALUE(tensor->sizes() == shape, what, " must be ", shape, "; got ", tensor->sizes());
  return MatrixView{tensor->const_data_ptr(), scalar_type(*tensor, what), tensor->stride(0),
                    shape.size() == 1 ? 0 : tensor->stride(1)};
}

RecordLayout layout_of(c10::string_view format, int64_t group_size, int64_t hidden,
                       int64_t intermediate, bool gated, bool bias) {
  return RecordLayout::make(RecordFormats::from_name({format.data(), format.size()}),
                            clamped_to_int32(group_size), clamped_to_int32(hidden),
                            clamped_to_int32(intermediate), gated, bias);
}

// An expert as given: views of its tensors and the layout of its record.
struct GivenExpert {
  RecordLayout layout;
  ExpertViews views;

  GivenExpert(const OptionalTensor& gate, const at::Tensor& up, const at::Tensor& down,
              const OptionalTensor& gate_bias, const OptionalTensor& up_bias,
              const OptionalTensor& down_bias, c10::string_view format, int64_t group_size) {
    TORCH_CHECK_VALUE(up.dim() == 2 && down.dim() == 2, "up and down must be matrices; got ",
                      up.sizes(), " and ", down.sizes());
    const bool bias = up_bias.has_value();
    TORCH_CHECK_VALUE(
        bias == down_bias.has_value() && (gate_bias.has_value() == (bias && gate.has_value())),
        "either all projections have a bias or none has");
    const int64_t intermediate = up.size(0), hidden = up.size(1);
    layout = layout_of(format, group_size, hidden, intermediate, gate.has_value(), bias);
    views = {.gate = view(gate, {intermediate, hidden}, "gate"),
             .up = view(up, {intermediate, hidden}, "up"),
             .down = view(down, {hidden, intermediate}, "down"),
             .gate_bias = view(gate_bias, {intermediate}, "gate_bias"),
             .up_bias = view(up_bias, {intermediate}, "up_bias"),
             .down_bias = view(down_bias, {hidden}, "down_bias")};
  }

  at::Tensor new_record() const {
    return at::empty({layout.bytes}, at::TensorOptions().dtype(at::kByte));
  }
};

std::byte* bytes_of(const at::Tensor& record) {
  return reinterpret_cast<std::byte*>(record.mutable_data_ptr());
}

at::Tensor pack(const OptionalTensor& gate, const at::Tensor& up, const at::Tensor& down,
                const OptionalTensor& gate_bias, const OptionalTensor& up_bias,
                const OptionalTensor& down_bias, c10::string_view format, int64_t group_size) {
  const GivenExpert expert(gate, up, down, gate_bias, up_bias, down_bias, format, group_size);
  at::Tensor record = expert.new_record();
  pack_record(expert.layout, expert.views, bytes_of(record));
  return record;
}

void check_moments(const at::Tensor& tensor, at::IntArrayRef shape, const char* what) {
  TORCH_CHECK_VALUE(tensor.device().is_cpu() && tensor.scalar_type() == at::kFloat &&
                        tensor.sizes() == shape && tensor.is_contiguous(),
                    what, " must be contiguous fp32 on the CPU of shape ", shape, "; got ",
                    tensor.scalar_type(), " of shape ", tensor.sizes(), " on ", tensor.device());
}

void check_finite(const at::Tensor& feedback, const at::Tensor& importance, const char* what) {
  TORCH_CHECK_VALUE(at::isfinite(feedback).all().item<bool>(), what,
                    "_feedback has values that are not finite");
  TORCH_CHECK_VALUE(
      at::isfinite(importance).all().item<bool>() && importance.gt(0).all().item<bool>(), what,
      "_importance must be finite and above 0 for every input");
}

at::Tensor pack_calibrated(const OptionalTensor& gate, const at::Tensor& up, const at::Tensor& down,
                           const OptionalTensor& gate_bias, const OptionalTensor& up_bias,
                           const OptionalTensor& down_bias, const at::Tensor& hidden_feedback,
                           const at::Tensor& hidden_importance,
                           const at::Tensor& intermediate_feedback,
                           const at::Tensor& intermediate_importance, c10::string_view format,
                           int64_t group_size) {
  check_process();
  const GivenExpert expert(gate, up, down, gate_bias, up_bias, down_bias, format, group_size);
  const int64_t hidden = expert.layout.hidden, intermediate = expert.layout.intermediate;
  check_moments(hidden_feedback, {hidden, hidden}, "hidden_feedback");
  check_moments(hidden_importance, {hidden}, "hidden_importance");
  check_moments(intermediate_feedback, {intermediate, intermediate}, "intermediate_feedback");
  check_moments(intermediate_importance, {intermediate}, "intermediate_importance");
  check_finite(hidden_feedback, hidden_importance, "hidden");
  check_finite(intermediate_feedback, intermediate_importance, "intermediate");
  const ExpertMoments moments{
      {hidden_feedback.const_data_ptr<float>(), hidden_importance.const_data_ptr<float>()},
      {intermediate_feedback.const_data_ptr<float>(),
       intermediate_importance.const_data_ptr<float>()}};
  at::Tensor record = expert.new_record();
  pack_record(expert.layout, expert.views, moments, bytes_of(record), torch_runtime(),
              at::get_num_threads(), kernel_table());
  return record;
}

std::tuple<at::Tensor, at::Tensor, at::Tensor, at::Tensor> unpack(
    const at::Tensor& record, c10::string_view format, int64_t group_size, int64_t hidden,
    int64_t intermediate, bool gated, bool bias) {
  const RecordLayout layout = layout_of(format, group_size, hidden, intermediate, gated, bias);
  TORCH_CHECK_VALUE(record.device().is_cpu() && record.scalar_type() == at::kByte &&
                        record.dim() == 1 && record.size(0) == layout.bytes,
                    "record must be a uint8 CPU tensor of ", layout.bytes, " bytes; got ",
                    record.scalar_type(), " of shape ", record.sizes());
  const at::Tensor bytes = record.contiguous();
  const auto options = at::TensorOptions().dtype(at::kFloat);
  const int64_t rows = int64_t{layout.halves()} * intermediate;
  const at::Tensor gate_up = at::empty({rows, hidden}, options);
  const at::Tensor down = at::empty({hidden, intermediate}, options);
  const at::Tensor gate_up_bias = at::empty({bias ? rows : 0}, options);
  const at::Tensor down_bias = at::empty({bias ? hidden : 0}, options);
  unpack_record(layout, reinterpret_cast<const std::byte*>(bytes.const_data_ptr()),
                gate_up.mutable_data_ptr<float>(), down.mutable_data_ptr<float>(),
                bias ? gate_up_bias.mutable_data_ptr<float>() : nullptr,
                bias ? down_bias.mutable_data_ptr<float>() : nullptr);
  return {gate_up, down, gate_up_bias, down_bias};
}

}  // namespace
}  // namespace torch_mesh

TORCH_LIBRARY_IMPL(torch_mesh, CPU, m) {
  m.impl("pack", torch_mesh::op<torch_mesh::pack>);
  m.impl("pack_calibrated", torch_mesh::op<torch_mesh::pack_calibrated>);
  m.impl("unpack", torch_mesh::op<torch_mesh::unpack>);
}
