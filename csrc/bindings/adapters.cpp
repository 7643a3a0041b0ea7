#include "bindings/adapters.h"

#include <ATen/ops/index_select.h>
#include <ATen/ops/tensor.h>
#include <c10/util/Exception.h>

#include "bindings/tensors.h"
#include "kernels/low_rank.h"

namespace torch_mesh {
namespace {

void check_factor(const at::Tensor& factor, at::IntArrayRef after_rank, int64_t experts,
                  const char* name) {
  std::vector<int64_t> wanted{experts, factor.dim() > 1 ? factor.size(1) : 0};
  wanted.insert(wanted.end(), after_rank.begin(), after_rank.end());
  TORCH_CHECK_VALUE(factor.sizes() == at::IntArrayRef(wanted), name, " must be [experts=", experts,
                    ", rank] and ", after_rank, "; got ", factor.sizes());
  TORCH_CHECK_VALUE(factor.device().is_cpu(), name, " is on ", factor.device(), "; allowed: cpu");
  scalar_type(factor, name);
}

void check_pair(const OptionalTensor& a, const OptionalTensor& b, at::IntArrayRef a_sizes,
                at::IntArrayRef b_sizes, int64_t experts, const char* a_name, const char* b_name) {
  TORCH_CHECK_VALUE(a.has_value() == b.has_value(), a_name, " and ", b_name,
                    " belong together; got one of them");
  if (!a) return;
  check_factor(*a, a_sizes, experts, a_name);
  check_factor(*b, b_sizes, experts, b_name);
  TORCH_CHECK_VALUE(a->size(1) == b->size(1), a_name, " has rank ", a->size(1), " and ", b_name,
                    " has rank ", b->size(1));
  TORCH_CHECK_VALUE(a->size(1) >= 1 && a->size(1) <= kMaxRank, a_name, " has rank ", a->size(1),
                    "; allowed: 1 to ", kMaxRank);
}

bool lies_as_engine_reads(const at::Tensor& factor) {
  return factor.scalar_type() == at::kFloat && (factor.size(-1) <= 1 || factor.stride(-1) == 1);
}

}  // namespace

void check_adapters(const AdapterArguments& adapters, Engine& engine) {
  const RecordLayout& layout = engine.layout();
  const int64_t experts = engine.pool().experts();
  check_pair(adapters.gate_up_a, adapters.gate_up_b, {layout.hidden},
             {layout.halves(), layout.intermediate}, experts, "gate_up_a", "gate_up_b");
  check_pair(adapters.down_a, adapters.down_b, {layout.intermediate}, {layout.hidden}, experts,
             "down_a", "down_b");
}

EngineAdapters::EngineAdapters(const AdapterArguments& adapters, const at::Tensor& ids,
                               Engine& engine) {
  bool all_lie = true;
  for (const OptionalTensor* factor :
       {&adapters.gate_up_a, &adapters.gate_up_b, &adapters.down_a, &adapters.down_b}) {
    all_lie = all_lie && (!*factor || lies_as_engine_reads(**factor));
  }
  if (!all_lie) {
    indices_.assign(engine.pool().experts(), -1);
    std::vector<int64_t> used;
    const at::Tensor flat = contiguous_as(ids, at::kLong);
    for (const int64_t id : const_values_of<int64_t>(flat)) {
      // The engine refuses or skips ids that name no expert.
      if (id < 0 || id >= static_cast<int64_t>(indices_.size()) || indices_[id] >= 0) continue;
      indices_[id] = static_cast<int32_t>(used.size());
      used.push_back(id);
    }
    used_ = at::tensor(used, at::kLong);
  }
  if (adapters.gate_up_a) {
    adapters_.gate_up = stack(*adapters.gate_up_a, *adapters.gate_up_b, adapters.gate_up_scaling);
  }
  if (adapters.down_a) {
    adapters_.down = stack(*adapters.down_a, *adapters.down_b, adapters.down_scaling);
  }
}

AdapterStack EngineAdapters::stack(const at::Tensor& a, const at::Tensor& b, double scaling) {
  AdapterStack stack;
  const auto laid_out = [&](const at::Tensor& factor) {
    if (!used_.defined()) return factor;
    stack.positions = indices_.data();
    return at::index_select(factor, 0, used_).to(at::kFloat).contiguous();
  };
  const at::Tensor& a_kept = kept_.emplace_back(laid_out(a));
  const at::Tensor b_kept = laid_out(b);
  stack.a_expert = a_kept.stride(0);
  stack.b_expert = b_kept.stride(0);
  stack.first = {.rank = static_cast<int32_t>(a_kept.size(1)),
                 .scaling = static_cast<float>(scaling),
                 .a = a_kept.const_data_ptr<float>(),
                 .a_stride = a_kept.stride(1),
                 .b = b_kept.const_data_ptr<float>(),
                 .b_stride = b_kept.stride(1),
                 .half_stride = b_kept.dim() == 4 ? b_kept.stride(2) : 0};
  kept_.push_back(b_kept);
  return stack;
}

}  // namespace torch_mesh
