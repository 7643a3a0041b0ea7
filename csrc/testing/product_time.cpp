#include "testing/product_time.h"

#include <algorithm>
#include <array>
#include <chrono>
#include <vector>

#include "base/error.h"
#include "engine/workspace.h"
#include "kernels/kernel_table.h"
#include "kernels/linear.h"
#include "kernels/task_products.h"

namespace torch_mesh {
std::map<std::string, int32_t> product_ways(const std::string& isa, const std::string& name) {
  const Format format = format_from_name(name);
  const KernelTable& table = kernel_table(isa);
  std::map<std::string, int32_t> ways{{"few", 0}};
  const FormatKernels& kernels = table.of(format);
  if (kernels.panels != nullptr) ways["panels"] = table.panel_rows;
  if (kernels.tiles != nullptr) ways["tiles"] = kernels.tile_rows;
  return ways;
}

double product_seconds(const Runtime& runtime, const std::string& isa, const std::string& format,
                       int32_t group_size, int32_t in_features, int32_t out_features, int32_t rows,
                       const std::string& way) {
  const PackedMatrix matrix =
      PackedMatrix::make(format_from_name(format), group_size, out_features, in_features);
  if (rows < 1) {
    throw_invalid("rows is ", rows, "; allowed: 1 or more");
  }
  const std::map<std::string, int32_t> ways = product_ways(isa, format);
  if (!ways.contains(way)) {
    throw_invalid("products of ", format, " with ", isa, " do not go by \"", way,
                  "\" on this machine");
  }
  KernelTable table = kernel_table(isa);
  table.formats[static_cast<int>(matrix.format)].tile_rows = way == "tiles" ? 0 : kNoRows;
  table.panel_rows = way == "panels" ? 0 : kNoRows;

  // Written to, so that each page has memory of its own. Zeros take as long as other weights.
  Buffer weights, prepared, out;
  weights.reserve(matrix.bytes());
  std::fill_n(weights.data(), matrix.bytes(), std::byte{0});
  const std::vector<float> x(static_cast<size_t>(rows) * matrix.depth, 1.0f);
  prepared.reserve(operand_shape(matrix).row_bytes * rows);
  prepare_rows(table, matrix, x.data(), ScalarType::kFloat32, matrix.depth, 0, rows,
               prepared.data());
  out.reserve((int64_t{rows} + 1) * kBlockColumns * static_cast<int64_t>(sizeof(float)));

  const auto begin = std::chrono::steady_clock::now();
  const int32_t at_once = blocks_at_once(rows);
  for (int32_t block = 0; block < matrix.blocks; block += at_once) {
    std::array<LinearBlock, 2> blocks;
    for (int32_t i = 0; i < at_once; ++i) {
      blocks[i] = {weights.data() + (block + i) * matrix.block_bytes, kBlockColumns, nullptr,
                   out.data() + i * kBlockColumns * 4};
    }
    const auto count = static_cast<size_t>(std::min(at_once, matrix.blocks - block));
    linear_blocks(table, runtime, matrix, {blocks.data(), count}, prepared.data(), rows,
                  ScalarType::kFloat32, kBlockColumns);
  }
  return std::chrono::duration<double>(std::chrono::steady_clock::now() - begin).count();
}

}  // namespace torch_mesh
