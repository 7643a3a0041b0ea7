// grouped_linear and grouped_linear_backward.
#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>
#include <torch/library.h>

#include <vector>

#include "bindings/errors.h"
#include "bindings/registry.h"
#include "bindings/runtime.h"
#include "bindings/tensors.h"
#include "engine/grouping.h"
#include "kernels/exact_products.h"

namespace torch_mesh {
namespace {

int32_t checked_projection(int64_t projection) {
  TORCH_CHECK_VALUE(projection == 0 || projection == 1, "projection is ", projection,
                    "; allowed: 0 (gate_up), 1 (down)");
  return static_cast<int32_t>(projection);
}

// With `sentinels`, rows after the last offset belong to no expert.
at::Tensor checked_offsets(const at::Tensor& offsets, int64_t rows, int32_t experts,
                           bool sentinels) {
  TORCH_CHECK_VALUE(offsets.scalar_type() == at::kLong || offsets.scalar_type() == at::kInt,
                    "offsets has dtype ", offsets.scalar_type(), "; allowed: int64, int32");
  TORCH_CHECK_VALUE(offsets.dim() == 1 && offsets.size(0) == experts + 1,
                    "offsets must be [experts + 1 = ", experts + 1, "]; got ", offsets.sizes());
  const at::Tensor on_cpu = contiguous_as(offsets, at::kLong);
  const int64_t first = on_cpu.const_data_ptr<int64_t>()[0];
  const int64_t last = on_cpu.const_data_ptr<int64_t>()[experts];
  TORCH_CHECK_VALUE(last <= rows, "the last offset must be at most the number of rows, ", rows,
                    "; got ", last);
  TORCH_CHECK_VALUE(first == 0 && (sentinels || last == rows), "of ", rows, " rows, those from ",
                    first, " to ", last, " have an expert in [0, ", experts,
                    "); all must, but with sentinels=True the last ones may have none");
  check_offsets(on_cpu.const_data_ptr<int64_t>(), experts);
  return on_cpu;
}

void zero_rows_after(const at::Tensor& rows, const at::Tensor& bounds) {
  const int64_t last = bounds.const_data_ptr<int64_t>()[bounds.size(0) - 1];
  if (last < rows.size(0)) rows.narrow(0, last, rows.size(0) - last).zero_();
}

at::Tensor grouped_linear(const at::Tensor& x, const at::Tensor& offsets, const at::Tensor& handle,
                          int64_t projection, int64_t out_features, int64_t top_k, bool sentinels) {
  const LayerHandle layer = resolve(handle);
  Engine& engine = layer.engine();
  const int32_t which = checked_projection(projection);
  TORCH_CHECK_VALUE(x.dim() == 2 && x.size(1) == engine.in_features(which),
                    "x_sorted must be [rows, ", engine.in_features(which), "]; got ", x.sizes());
  TORCH_CHECK_VALUE(out_features == engine.out_features(which), "out_features is ", out_features,
                    "; projection ", which, " has ", engine.out_features(which));
  const int32_t max_top_k = engine.pool().routed_experts();
  TORCH_CHECK_VALUE(top_k >= 1 && top_k <= max_top_k, "top_k is ", top_k, "; allowed: 1 to ",
                    max_top_k);
  const at::Tensor bounds = checked_offsets(offsets, x.size(0), engine.pool().experts(), sentinels);
  at::Tensor out = at::empty({x.size(0), engine.out_features(which)}, x.options());
  if (x.size(0) == 0) return out;
  zero_rows_after(out, bounds);
  const at::Tensor rows = with_contiguous_rows(x);
  engine.grouped_linear(LinearCall{.layer = layer.layer,
                                   .projection = which,
                                   .x = const_rows(rows, "x_sorted"),
                                   .offsets = bounds.const_data_ptr<int64_t>(),
                                   .top_k = static_cast<int32_t>(top_k),
                                   .out = mutable_rows(out, "x_sorted")});
  return out;
}

at::Tensor grouped_linear_backward(const at::Tensor& grad, const at::Tensor& offsets,
                                   const at::Tensor& handle, int64_t projection,
                                   int64_t in_features) {
  const LayerHandle layer = resolve(handle);
  Engine& engine = layer.engine();
  const RecordLayout& layout = engine.layout(layer.layer);
  const int32_t which = checked_projection(projection);
  const int64_t in = engine.in_features(which), out = engine.out_features(which);
  TORCH_CHECK_VALUE(grad.dim() == 2 && grad.size(1) == out, "grad must be [rows, ", out, "]; got ",
                    grad.sizes());
  TORCH_CHECK_VALUE(in_features == in, "in_features is ", in_features, "; projection ", which,
                    " has ", in);
  const at::Tensor bounds = checked_offsets(offsets, grad.size(0), engine.pool().experts(),
                                            /*sentinels=*/true);
  const int64_t* first = bounds.const_data_ptr<int64_t>();

  std::vector<int32_t> used;
  for (int32_t expert = 0; expert < engine.pool().experts(); ++expert) {
    if (first[expert + 1] > first[expert]) used.push_back(expert);
  }
  const at::Tensor rows = contiguous_as(grad, at::kFloat);
  const at::Tensor x_grad = at::empty({grad.size(0), in}, rows.options());
  zero_rows_after(x_grad, bounds);
  const PackedMatrix& matrix = which == 0 ? layout.gate_up : layout.down;
  const int32_t halves = which == 0 ? layout.halves() : 1;
  const int64_t offset = which == 0 ? layout.gate_up_offset : layout.down_offset;
  const int32_t threads = engine.options().threads;
  const auto visit = [&](int32_t index, std::span<const std::byte* const> records) {
    const int32_t tasks = matrix.depth_padded / kBlockColumns;
    const auto body = [&](int64_t begin, int64_t end) {
      for (int64_t i = begin; i < end; ++i) {
        const ExactProducts products(kernel_table(), matrix, halves, records[i / tasks] + offset);
        const int32_t expert = used[index + i / tasks];
        const int64_t from = first[expert];
        const auto count = static_cast<int32_t>(first[expert + 1] - from);
        products.inputs(static_cast<int32_t>(i % tasks),
                        {rows.const_data_ptr<float>() + from * out, out, count},
                        x_grad.mutable_data_ptr<float>() + from * in, in);
      }
    };
    parallel_for(torch_runtime(), std::ssize(records) * tasks, threads, body);
  };
  engine.visit_in_order(layer.layer, used, threads, visit);
  return x_grad.to(grad.scalar_type());
}

}  // namespace
}  // namespace torch_mesh

TORCH_LIBRARY_IMPL(torch_mesh, CPU, m) {
  m.impl("grouped_linear", torch_mesh::op<torch_mesh::grouped_linear>);
  m.impl("grouped_linear_backward", torch_mesh::op<torch_mesh::grouped_linear_backward>);
}
