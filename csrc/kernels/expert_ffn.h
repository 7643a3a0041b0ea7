// One expert: (x · gate and x · up combined by its activation) · down * routing weight, on packed
// bytes, cut into tasks that any thread may run in any order. All gate_up tasks of an expert come
// before its down tasks.
//
// A product's bits depend on the weights, the row and the number of rows of the expert. They depend
// neither on the thread, nor on what else runs, nor on the record's address.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string_view>
#include <vector>

#include "base/runtime.h"
#include "kernels/activation.h"
#include "kernels/low_rank.h"
#include "kernels/matrix_view.h"
#include "store/record.h"

namespace torch_mesh {

// One instruction set's kernels; opaque here, see kernel_table.h.
struct KernelTable;

// The best table this processor runs, or the one that TORCH_MESH_ISA names when the process starts:
// "scalar", "avx2", "avx_vnni", "avx512", "avx512_vnni", "avx512_bf16", "amx". Error(kInvalid) for
// an unknown name or one the processor lacks.
const KernelTable& kernel_table();
const KernelTable& kernel_table(std::string_view name);
std::vector<std::string_view> kernel_tables();  // those this processor runs, scalar first
const char* kernel_table_name(const KernelTable& table);

// The rows one expert computes.
struct ExpertRows {
  const std::byte* record;
  int32_t rows;
  const int32_t* tokens;    // [rows] the prepared row each one reads
  const float* weights;     // [rows] routing weights
  const int32_t* out_rows;  // [rows] the row of `products` each one writes
  float* products;          // [...][hidden]
  std::byte* scratch;       // scratch_bytes(rows), 64-byte aligned, from gate_up to down
  LowRank gate_up_adapter = {};
  LowRank down_adapter = {};
  float* adapted = nullptr;  // adapted_bytes(rows, ...), from the first of its tasks to down
};

class ExpertFfn {
 public:
  // Error(kInvalid) for an activation that needs a gate, where the layout has none.
  ExpertFfn(const RecordLayout& layout, const Activation& activation, const Runtime& runtime,
            const KernelTable& table);

  const RecordLayout& layout() const { return layout_; }
  int64_t multiply_adds_per_row() const {
    return int64_t{layout_.halves() + 1} * layout_.hidden * layout_.intermediate;
  }

  // Activations in the operand form of the products (bf16, or int8 with a scale per group), made
  // once per layer and shared by all of its experts. Rows are independent: ranges may be prepared
  // by different threads.
  int64_t prepared_bytes(int32_t rows) const;
  void prepare(const void* x, ScalarType type, int64_t row_stride, int32_t begin, int32_t end,
               std::byte* prepared) const;

  int64_t scratch_bytes(int32_t rows) const;
  // Bytes of the adapters' low-rank intermediates of the rows.
  int64_t adapted_bytes(int32_t rows, int32_t gate_up_rank, int32_t down_rank) const;
  // Tasks of an expert with a gate_up adapter: they compute scaling * x · a^T, before its gate_up
  // tasks. `x` is what `prepare` gets.
  static int32_t adapter_tasks(int32_t rows);
  void adapt(int32_t task, ConstRows x, const ExpertRows& expert) const;

  int32_t gate_up_tasks() const;
  int32_t down_tasks() const;
  void gate_up(int32_t task, const std::byte* prepared, const ExpertRows& expert) const;
  // Tasks [task, task + count), blocks_at_once(rows) at most.
  void down(int32_t task, int32_t count, const ExpertRows& expert) const;

  // One projection alone: out[row][columns] = x · W^T + bias for `rows` prepared rows beginning at
  // `first`. projection 0 is gate_up ([gate | up], without padding), 1 is down. `prepared` for
  // projection 1 is made by prepare_hidden, whose rows are `intermediate` long.
  int64_t prepared_hidden_bytes(int32_t rows) const;
  void prepare_hidden(const void* x, ScalarType type, int64_t row_stride, int32_t begin,
                      int32_t end, std::byte* prepared) const;
  int32_t linear_tasks(int32_t projection) const;
  void linear(int32_t projection, int32_t task, int32_t count, const std::byte* prepared,
              const std::byte* record, int32_t first, int32_t rows, float* out,
              int64_t out_stride) const;

 private:
  void add_hidden(const ExpertRows& expert, int32_t row, float* sums) const;

  RecordLayout layout_;
  Activation activation_;
  Runtime runtime_;
  const KernelTable& table_;
};

}  // namespace torch_mesh
