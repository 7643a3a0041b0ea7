// gather_rows and prefetch_rows.
#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>
#include <c10/util/Exception.h>
#include <torch/library.h>

#include <cstdint>
#include <limits>
#include <memory>
#include <optional>
#include <utility>

#include "bindings/errors.h"
#include "bindings/handles.h"
#include "bindings/tables.h"
#include "bindings/tensors.h"

namespace torch_mesh {
namespace {

struct TableHandle {
  std::shared_ptr<Live<Tables>> live;  // keeps the tables while a gather runs
  int32_t table;

  Tables& tables() const { return *live->object; }
};

TableHandle table_of(const at::Tensor& handle) {
  const HandleIds ids = ids_of(handle);
  std::shared_ptr<Live<Tables>> live = Handles<Tables>::find(ids, "the tables of this handle");
  const int32_t tables = live->object->tables();
  TORCH_CHECK_VALUE(ids.layer >= 0 && ids.layer < tables, "the handle names table ", ids.layer,
                    "; there are tables [0, ", tables, ")");
  return {std::move(live), static_cast<int32_t>(ids.layer)};
}

at::ScalarType dtype_of(ScalarType type) {
  switch (type) {
    case ScalarType::kBf16:
      return at::kBFloat16;
    case ScalarType::kFloat16:
      return at::kHalf;
    case ScalarType::kFloat32:
      break;
  }
  return at::kFloat;
}

// Returns contiguous int64 ids. Raises IndexError, as torch's embedding, for ids that are no rows.
at::Tensor checked_ids(const at::Tensor& ids, int64_t rows) {
  TORCH_CHECK_VALUE(ids.scalar_type() == at::kLong || ids.scalar_type() == at::kInt,
                    "row ids have dtype ", ids.scalar_type(), "; allowed: int32, int64");
  TORCH_CHECK_VALUE(ids.numel() <= std::numeric_limits<int32_t>::max(), "there are ", ids.numel(),
                    " row ids; at most 2147483647 are allowed");
  at::Tensor checked = ids.to(at::kLong).contiguous();
  for (const int64_t id : const_values_of<int64_t>(checked)) {
    TORCH_CHECK_INDEX(id >= 0 && id < rows, "row ", id, " is outside the table's [0, ", rows, ")");
  }
  return checked;
}

at::Tensor gather_rows(const at::Tensor& ids, const at::Tensor& handle, int64_t dim,
                       at::ScalarType dtype) {
  const TableHandle table = table_of(handle);
  Tables& tables = table.tables();
  const int64_t bytes = tables.value_bytes(table.table);
  const auto width = static_cast<int64_t>(c10::elementSize(dtype));
  TORCH_CHECK_VALUE(dim > 0 && bytes % width == 0 && dim == bytes / width, "the table's rows have ",
                    bytes, " bytes, which are not ", dim, " values of ", dtype);
  const std::optional<RowCodes>& codes = tables.codes(table.table);
  TORCH_CHECK_VALUE(!codes || dtype_of(codes->type) == dtype, "the table's codes stand for values ",
                    "of ", dtype_of(codes->type), ", not of ", dtype);
  const at::Tensor checked = checked_ids(ids, tables.rows(table.table));
  at::DimVector shape(ids.sizes().begin(), ids.sizes().end());
  shape.push_back(dim);
  at::Tensor out = at::empty(shape, at::TensorOptions().dtype(dtype));
  tables.gather(table.table, const_values_of<int64_t>(checked),
                static_cast<std::byte*>(out.mutable_data_ptr()));
  return out;
}

void prefetch_rows(const at::Tensor& ids, at::Tensor& handle) {
  const TableHandle table = table_of(handle);
  const at::Tensor checked = checked_ids(ids, table.tables().rows(table.table));
  table.tables().prefetch(table.table, const_values_of<int64_t>(checked));
}

}  // namespace
}  // namespace torch_mesh

TORCH_LIBRARY_IMPL(torch_mesh, CPU, m) {
  m.impl("gather_rows", torch_mesh::op<torch_mesh::gather_rows>);
  m.impl("prefetch_rows", torch_mesh::op<torch_mesh::prefetch_rows>);
}
