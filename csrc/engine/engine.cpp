#include "engine/engine.h"

#include <algorithm>
#include <array>
#include <string>
#include <utility>

#include "base/error.h"
#include "engine/grouping.h"
#include "engine/tasks.h"
#include "kernels/convert.h"

namespace torch_mesh {
namespace {

// Experts computed between two looks at what else has landed. Enough that a decode step of any
// model runs in one go, few enough that a prefill gives slots back while it computes.
constexpr int32_t kReadyBatch = 16;

}  // namespace

Engine::Engine(const EngineOptions& options, const Runtime& runtime, std::unique_ptr<Pool> pool)
    : options_(options),
      runtime_(runtime),
      pool_(std::move(pool)),
      ffn_(options.layout, options.activation.value_or(Activation::kSilu), runtime,
           kernel_table()) {
  if (options.threads < 1) {
    throw Error(ErrorKind::kInvalid,
                "threads is " + std::to_string(options.threads) + "; allowed: 1 or more");
  }
  if (options.workspace < 1) {
    throw Error(ErrorKind::kInvalid,
                "workspace is " + std::to_string(options.workspace) + " bytes; allowed: 1 or more");
  }
}

int64_t Engine::workspace_bytes() const { return workspaces_.bytes(); }

int32_t Engine::in_features(int32_t projection) const {
  return projection == 0 ? layout().hidden : layout().intermediate;
}

int32_t Engine::out_features(int32_t projection) const {
  return projection == 0 ? layout().halves() * layout().intermediate : layout().hidden;
}

int32_t Engine::tokens_per_chunk(int32_t top_k) const {
  const int64_t per_choice =
      int64_t{layout().hidden} * sizeof(float) + round_up(ffn_.scratch_bytes(1), 64);
  const int64_t per_token = ffn_.prepared_bytes(1) + top_k * per_choice;
  // The number of pairs is an int32.
  const int64_t most = INT32_MAX / std::max(top_k, 1);
  return static_cast<int32_t>(std::clamp<int64_t>(options_.workspace / per_token, 1, most));
}

int32_t Engine::rows_per_chunk(int32_t projection) const {
  const int64_t prepared = projection == 0 ? ffn_.prepared_bytes(1) : ffn_.prepared_hidden_bytes(1);
  const int64_t per_row = prepared + int64_t{out_features(projection)} * sizeof(float);
  return static_cast<int32_t>(std::clamp<int64_t>(options_.workspace / per_row, 1, INT32_MAX));
}

void Engine::experts(const ExpertsCall& call) {
  if (!options_.activation) {
    throw Error(ErrorKind::kInvalid,
                "these experts have an activation of their own; use grouped_linear");
  }
  WorkspacePool::Lease lease(workspaces_);
  const int32_t chunk = tokens_per_chunk(call.top_k);
  for (int32_t begin = 0; begin < call.tokens; begin += chunk) {
    ExpertsCall part = call;
    part.tokens = std::min(chunk, call.tokens - begin);
    part.x.data = row_pointer(call.x.data, call.x.type, call.x.row_stride, begin);
    part.out.data = row_pointer(call.out.data, call.out.type, call.out.row_stride, begin);
    part.ids += int64_t{begin} * call.top_k;
    part.weights += int64_t{begin} * call.top_k;
    experts_chunk(part, *lease);
  }
}

void Engine::experts_chunk(const ExpertsCall& call, Workspace& workspace) {
  group_by_expert(call.ids, call.weights, call.tokens, call.top_k, pool_->experts(), call.sentinels,
                  workspace.grouping);
  workspace.products.at_least(int64_t{call.tokens} * call.top_k * layout().hidden * sizeof(float));
  std::byte* prepared = workspace.prepared.at_least(ffn_.prepared_bytes(call.tokens));
  parallel_for(runtime_, call.tokens, options_.threads, [&](int64_t begin, int64_t end) {
    ffn_.prepare(call.x.data, call.x.type, call.x.row_stride, call.tokens,
                 static_cast<int32_t>(begin), static_cast<int32_t>(end), prepared);
  });
  compute(call, workspace);
  reduce(call, workspace);
}

void Engine::compute(const ExpertsCall& call, Workspace& workspace) {
  const Grouping& grouping = workspace.grouping;
  const auto count = static_cast<int32_t>(grouping.experts.size());
  workspace.entries.resize(count);
  workspace.scratch_offset.resize(count);
  int64_t scratch = 0;
  for (int32_t i = 0; i < count; ++i) {
    workspace.scratch_offset[i] = scratch;
    scratch += round_up(ffn_.scratch_bytes(grouping.rows(i)), 64);
  }
  workspace.scratch.at_least(scratch);

  Claim claim(*pool_, call.layer, grouping.experts, workspace.entries);
  std::array<ReadyExpert, kReadyBatch> batch;
  while (const int32_t ready = claim.next(batch)) {
    const std::span<const ReadyExpert> experts(batch.data(), ready);
    compute_ready(experts, call.tokens, workspace);
    for (const ReadyExpert& expert : experts) claim.release(expert.index);
  }
}

void Engine::compute_ready(std::span<const ReadyExpert> ready, int32_t tokens,
                           Workspace& workspace) {
  std::array<ExpertRows, kReadyBatch> rows;
  const Grouping& grouping = workspace.grouping;
  for (size_t i = 0; i < ready.size(); ++i) {
    const int32_t index = ready[i].index;
    const int32_t first = grouping.first[index];
    rows[i] = ExpertRows{.record = ready[i].record,
                         .rows = grouping.rows(index),
                         .tokens = &grouping.tokens[first],
                         .weights = &grouping.weights[first],
                         .places = &grouping.places[first],
                         .products = reinterpret_cast<float*>(workspace.products.data()),
                         .scratch = workspace.scratch.data() + workspace.scratch_offset[index]};
  }
  const auto count = static_cast<int64_t>(ready.size());
  const int64_t gate_up_tasks = ffn_.gate_up_tasks();
  run_tasks(runtime_, count * gate_up_tasks, options_.threads, [&](int64_t task) {
    ffn_.gate_up(static_cast<int32_t>(task % gate_up_tasks), workspace.prepared.data(), tokens,
                 rows[task / gate_up_tasks]);
  });
  const int64_t down_tasks = ffn_.down_tasks();
  run_tasks(runtime_, count * down_tasks, options_.threads, [&](int64_t task) {
    ffn_.down(static_cast<int32_t>(task % down_tasks), rows[task / down_tasks]);
  });
}

// Sums each token's products in the order of its choices, whatever order they were computed in. The
// first product's place holds the sum.
void Engine::reduce(const ExpertsCall& call, const Workspace& workspace) const {
  auto* products = reinterpret_cast<float*>(const_cast<std::byte*>(workspace.products.data()));
  const int64_t hidden = layout().hidden;
  const int32_t experts = pool_->experts();
  parallel_for(runtime_, call.tokens, options_.threads, [&](int64_t begin, int64_t end) {
    for (int64_t token = begin; token < end; ++token) {
      float* sum = products + token * call.top_k * hidden;
      bool empty = true;
      for (int32_t choice = 0; choice < call.top_k; ++choice) {
        if (call.ids[token * call.top_k + choice] >= experts) continue;
        const float* product = products + (token * call.top_k + choice) * hidden;
        if (empty) {
          std::copy_n(product, hidden, sum);
          empty = false;
        } else {
          for (int64_t i = 0; i < hidden; ++i) sum[i] += product[i];
        }
      }
      if (empty) std::fill_n(sum, hidden, 0.0f);
      store_row(sum, hidden, row_pointer(call.out.data, call.out.type, call.out.row_stride, token),
                call.out.type);
    }
  });
}

void Engine::grouped_linear(const LinearCall& call) {
  if (call.projection != 0 && call.projection != 1) {
    throw Error(ErrorKind::kInvalid, "projection is " + std::to_string(call.projection) +
                                         "; allowed: 0 (gate_up), 1 (down)");
  }
  check_offsets(call.offsets, pool_->experts());
  WorkspacePool::Lease lease(workspaces_);
  const int64_t rows = call.offsets[pool_->experts()];
  const int64_t chunk = rows_per_chunk(call.projection);
  for (int64_t begin = 0; begin < rows; begin += chunk) {
    linear_chunk(call, begin, std::min(begin + chunk, rows), *lease);
  }
}

void Engine::linear_chunk(const LinearCall& call, int64_t begin, int64_t end,
                          Workspace& workspace) {
  const auto rows = static_cast<int32_t>(end - begin);
  const int64_t width = out_features(call.projection);
  const bool up = call.projection == 0;
  std::byte* prepared = workspace.prepared.at_least(up ? ffn_.prepared_bytes(rows)
                                                       : ffn_.prepared_hidden_bytes(rows));
  auto* products =
      reinterpret_cast<float*>(workspace.products.at_least(rows * width * sizeof(float)));
  const void* x = row_pointer(call.x.data, call.x.type, call.x.row_stride, begin);
  parallel_for(runtime_, rows, options_.threads, [&](int64_t first, int64_t last) {
    const auto prepare = up ? &ExpertFfn::prepare : &ExpertFfn::prepare_hidden;
    (ffn_.*prepare)(x, call.x.type, call.x.row_stride, rows, static_cast<int32_t>(first),
                    static_cast<int32_t>(last), prepared);
  });

  Grouping& grouping = workspace.grouping;
  grouping.experts.clear();
  grouping.first.assign(1, 0);
  for (int32_t expert = 0; expert < pool_->experts(); ++expert) {
    const int64_t last = std::min(call.offsets[expert + 1], end) - begin;
    if (last <= grouping.first.back()) continue;
    grouping.experts.push_back(expert);
    grouping.first.push_back(static_cast<int32_t>(last));
  }

  workspace.entries.resize(grouping.experts.size());
  Claim claim(*pool_, call.layer, grouping.experts, workspace.entries);
  std::array<ReadyExpert, kReadyBatch> batch;
  const int64_t tasks = ffn_.linear_tasks(call.projection);
  while (const int32_t ready = claim.next(batch)) {
    run_tasks(runtime_, ready * tasks, options_.threads, [&](int64_t task) {
      const ReadyExpert& expert = batch[task / tasks];
      const int32_t first = grouping.first[expert.index];
      ffn_.linear(call.projection, static_cast<int32_t>(task % tasks), prepared, rows,
                  expert.record, first, grouping.rows(expert.index), products + first * width,
                  width);
    });
    for (int32_t i = 0; i < ready; ++i) claim.release(batch[i].index);
  }

  parallel_for(runtime_, rows, options_.threads, [&](int64_t first, int64_t last) {
    for (int64_t row = first; row < last; ++row) {
      store_row(products + row * width, width,
                row_pointer(call.out.data, call.out.type, call.out.row_stride, begin + row),
                call.out.type);
    }
  });
}

}  // namespace torch_mesh
