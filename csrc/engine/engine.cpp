#include "engine/engine.h"

#include <algorithm>
#include <array>
#include <utility>

#include "base/error.h"
#include "engine/grouping.h"
#include "engine/placement.h"
#include "engine/task_queue.h"
#include "kernels/convert.h"
#include "kernels/task_products.h"

namespace torch_mesh {
namespace {

constexpr int64_t kReduceColumns = 1024;  // added up by one task

}  // namespace

LowRank AdapterStack::of(int32_t expert) const {
  LowRank own = first;
  if (own.rank == 0) return own;
  const int64_t position = positions == nullptr ? expert : positions[expert];
  own.a += position * a_expert;
  own.b += position * b_expert;
  return own;
}

int32_t tokens_per_chunk(const ExpertFfn& ffn, const RecordLayout& layout, int32_t top_k,
                         int64_t workspace, const Adapters& adapters) {
  const int64_t per_choice = int64_t{layout.hidden} * sizeof(float) +
                             round_up(ffn.scratch_bytes(1), 64) +
                             ffn.adapted_bytes(1, adapters.gate_up.rank(), adapters.down.rank());
  const int64_t per_token = ffn.prepared_bytes(1) + top_k * per_choice;
  // The number of pairs is an int32.
  const int64_t max_tokens = INT32_MAX / std::max(top_k, 1);
  return static_cast<int32_t>(std::clamp<int64_t>(workspace / per_token, 1, max_tokens));
}

namespace {

void check_limits(const EngineOptions& options, int32_t layers) {
  if (options.threads < 1 || options.threads > kMaxThreads) {
    throw_invalid("threads is ", options.threads, "; allowed: 1 to ", kMaxThreads);
  }
  if (options.workspace < 1) {
    throw_invalid("workspace is ", options.workspace, " bytes; allowed: 1 or more");
  }
  const size_t given = options.activations.size();
  if (given > 1 && given != static_cast<size_t>(layers)) {
    throw_invalid("activation names ", given, " functions for ", layers,
                  " layers; name one for all layers, or one for each");
  }
  if (!options.layouts.empty() && options.layouts.size() != static_cast<size_t>(layers)) {
    throw_invalid("format names ", options.layouts.size(), " formats for ", layers,
                  " layers; name one for all layers, or one for each");
  }
}

std::vector<ExpertFfn> make_ffns(const EngineOptions& options, const Runtime& runtime,
                                 int32_t layers) {
  check_limits(options, layers);
  std::vector<ExpertFfn> ffns;
  const size_t activations = options.activations.size();
  const size_t count = std::max({activations, options.layouts.size(), size_t{1}});
  for (size_t i = 0; i < count; ++i) {
    const Activation activation = activations == 0 ? Activation(Activation::kSilu)
                                                   : options.activations[activations == 1 ? 0 : i];
    ffns.emplace_back(options.layout_of(static_cast<int32_t>(i)), activation, runtime,
                      kernel_table());
  }
  return ffns;
}

}  // namespace

void check(const EngineOptions& options, const Runtime& runtime, int32_t layers) {
  static_cast<void>(make_ffns(options, runtime, layers));
}

Engine::Engine(const EngineOptions& options, const Runtime& runtime, Owned<Pool> pool)
    : options_(options),
      runtime_(runtime),
      pool_(std::move(pool)),
      ffns_(make_ffns(options, runtime, pool_->layers())),
      few_rows_ffns_(make_ffns(options, for_few_rows(runtime), pool_->layers())),
      last_used_(pool_->layers(), pool_->experts()) {}

const Activation& Engine::activation(int32_t layer) const {
  if (options_.activations.empty()) {
    throw_invalid("these experts have an activation of their own; use grouped_linear");
  }
  return options_.activations[layer_index(layer, options_.activations.size())];
}

int64_t Engine::workspace_bytes() const {
  pool_->check_process();
  return workspaces_.bytes();
}

int32_t Engine::in_features(int32_t projection) const {
  return projection == 0 ? layout().hidden : layout().intermediate;
}

int32_t Engine::out_features(int32_t projection) const {
  return projection == 0 ? layout().halves() * layout().intermediate : layout().hidden;
}

int32_t Engine::rows_per_chunk(const LinearCall& call) const {
  const ExpertFfn& products = ffn(call.layer, Phase::kPrefill);
  const int64_t prepared =
      call.projection == 0 ? products.prepared_bytes(1) : products.prepared_hidden_bytes(1);
  const int64_t per_row = prepared + int64_t{out_features(call.projection)} * sizeof(float);
  return static_cast<int32_t>(std::clamp<int64_t>(options_.workspace / per_row, 1, INT32_MAX));
}

void Engine::experts(const ExpertsCall& call) {
  static_cast<void>(activation(call.layer));
  pool_->check_process();
  WorkspacePool::Lease lease(workspaces_);
  // Chunks have equal lengths: a short last one would need few experts, and read nothing ahead.
  const int32_t max_chunk = tokens_per_chunk(ffn(call.layer, phase_of(call.tokens)), layout(),
                                             call.top_k, options_.workspace, call.adapters);
  const int32_t chunks = 1 + (call.tokens - 1) / max_chunk;
  const int32_t chunk = 1 + (call.tokens - 1) / chunks;
  for (int32_t begin = 0; begin < call.tokens; begin += chunk) {
    ExpertsCall part = call;
    part.tokens = std::min(chunk, call.tokens - begin);
    part.x.data = row_pointer(call.x.data, call.x.type, call.x.row_stride, begin);
    part.out.data = row_pointer(call.out.data, call.out.type, call.out.row_stride, begin);
    part.ids += int64_t{begin} * call.top_k;
    part.weights += int64_t{begin} * call.top_k;
    if (begin > 0) part.reads_queued = nullptr;
    const bool last = begin + part.tokens == call.tokens;
    if (!last) part.deferral.experts = {};
    const ForwardPart forward{.phase = phase_of(call.tokens),
                              .last = last && !call.deferred,
                              .rows = call.tokens,
                              .kind = call.deferred ? ClaimKind::kDeferred : ClaimKind::kForward};
    experts_chunk(part, forward, *lease);
    if (phase_of(call.tokens) == Phase::kPrefill) {
      last_used_.note(call.layer, (*lease).grouping.experts, begin > 0);
    }
  }
}

template <typename Body>
void Engine::for_each_batch(Claim& claim, int32_t count, const Body& body) const {
  std::array<ReadyExpert, kReadyBatch> batch;
  int32_t computed = 0;
  do {
    const std::span<const ReadyExpert> ready(batch.data(), claim.next(batch, options_.threads));
    const Part part{.first = computed == 0,
                    .last = computed + static_cast<int32_t>(ready.size()) == count};
    body(ready, part);
    computed += static_cast<int32_t>(ready.size());
  } while (computed < count);
}

void Engine::experts_chunk(const ExpertsCall& call, ForwardPart forward, Workspace& workspace) {
  Grouping& grouping = workspace.grouping;
  group_by_expert(call.ids, call.weights, call.tokens, call.top_k, pool_->experts(), call.sentinels,
                  grouping);
  const auto count = static_cast<int32_t>(grouping.experts.size());
  workspace.products.reserve(int64_t{call.tokens} * call.top_k * layout().hidden * sizeof(float));
  const ExpertFfn& products = ffn(call.layer, forward.phase);
  workspace.prepared.reserve(products.prepared_bytes(call.tokens));
  workspace.entries.resize(count);
  workspace.scratch_offset.resize(count);
  workspace.adapted_offset.resize(count);
  int64_t scratch = 0;
  for (int32_t i = 0; i < count; ++i) {
    workspace.scratch_offset[i] = scratch;
    scratch += round_up(products.scratch_bytes(grouping.rows(i)), 64);
    workspace.adapted_offset[i] = scratch;
    scratch += products.adapted_bytes(grouping.rows(i), call.adapters.gate_up.rank(),
                                      call.adapters.down.rank());
  }
  workspace.scratch.reserve(scratch);

  if (forward.phase == Phase::kPrefill) {
    forward.ids = {call.ids, static_cast<size_t>(call.tokens) * call.top_k};
    forward.top_k = call.top_k;
  }
  forward.streams = !call.backwards;
  forward.deferral = call.deferral;
  const std::span<const int32_t> left_out = call.deferral.experts;
  grouping.experts.insert(grouping.experts.end(), left_out.begin(), left_out.end());
  Claim claim(*pool_, call.layer, grouping.experts, workspace.entries, forward);
  // Runs the callback once no read waits for a slot: at once, or after released slots have served
  // the last one.
  auto reads_queued = call.reads_queued;
  const auto tell = [&] {
    if (reads_queued == nullptr || !claim.has_all_slots()) return;
    std::exchange(reads_queued, nullptr)(call.context);
  };
  tell();
  for_each_batch(claim, count, [&](std::span<const ReadyExpert> ready, Part part) {
    tell();
    compute(call, forward.phase, ready, part, workspace);
    // The next chunk needs the same experts. All have slots, so none is evicted: they stay pinned
    // until this claim ends. At least half of the pool is left to others.
    const bool keep_pinned = claim.reads_next_layer() && !forward.last && claim.has_all_slots() &&
                             2 * pool_->experts() <= pool_->slots();
    // The claim's end releases the last ones, unless reads ahead wait for their slots.
    const bool at_end = part.last && !claim.reads_next_layer();
    if (!keep_pinned && !at_end) claim.release(ready);
    tell();
  });
}

// Computes one batch in one parallel region. The first batch also prepares the rows, the last one
// also adds up the products. An expert's down tasks come after all gate_up tasks of its node, so
// that its own have ended by then.
void Engine::compute(const ExpertsCall& call, Phase phase, std::span<const ReadyExpert> ready,
                     Part part, Workspace& workspace) const {
  std::array<ExpertRows, kReadyBatch> experts;
  int64_t rows = 0;
  for (size_t i = 0; i < ready.size(); ++i) {
    experts[i] = rows_of(ready[i], call.adapters, workspace);
    rows += experts[i].rows;
  }
  const Placement placement(pool_->topology(), ready);
  TaskQueue queue;
  if (part.first) queue.add(tasks_for(call.tokens, kPrepareRows), {0, 0});
  const int32_t operands = queue.stages();
  if (call.adapters.gate_up.rank() > 0) {
    for (size_t i = 0; i < ready.size(); ++i) {
      queue.add(ExpertFfn::adapter_tasks(experts[i].rows), {0, 0});
    }
  }
  const int32_t prepared = queue.stages();
  struct Step {
    int32_t expert;
    bool down;
  };
  std::array<Step, TaskQueue::kMaxStages> steps;
  const ExpertFfn& products = ffn(call.layer, phase);
  placement.add_lanes(queue, [&](int32_t begin, int32_t end) {
    const int32_t gate_up = queue.stages();
    for (int32_t i = begin; i < end; ++i) {
      steps[queue.add(products.gate_up_tasks(), {0, prepared})] = {placement[i], false};
    }
    for (int32_t i = begin; i < end; ++i) {
      const int32_t needed = gate_up + i - begin;
      const int32_t at_once = blocks_at_once(experts[placement[i]].rows);
      steps[queue.add(products.down_tasks(), {needed, needed + 1}, at_once)] = {placement[i], true};
    }
  });
  const int32_t reduce = queue.stages();
  const int64_t strips = tasks_for(layout().hidden, kReduceColumns);
  if (part.last) queue.add(call.tokens * strips, {0, reduce});

  const int32_t team = team_for(rows * products.multiply_adds_per_row(), options_.threads);
  const auto current_node = [&] { return placement.current_node(); };
  queue.run(runtime_, team, current_node, [&](int32_t stage, int64_t at, int32_t count) {
    const auto task = static_cast<int32_t>(at);
    if (stage < operands) {
      const int32_t begin = task * kPrepareRows;
      products.prepare(call.x.data, call.x.type, call.x.row_stride, begin,
                       std::min(begin + kPrepareRows, call.tokens), workspace.prepared.data());
    } else if (stage < prepared) {
      products.adapt(task, call.x, experts[stage - operands]);
    } else if (stage < reduce) {
      const Step step = steps[stage];
      if (step.down) {
        products.down(task, count, experts[step.expert]);
      } else {
        products.gate_up(task, workspace.prepared.data(), experts[step.expert]);
      }
    } else {
      const int64_t column = at % strips * kReduceColumns;
      this->reduce(call, at / strips, column,
                   std::min(column + kReduceColumns, int64_t{layout().hidden}), workspace);
    }
  });
}

ExpertRows Engine::rows_of(const ReadyExpert& ready, const Adapters& adapters,
                           Workspace& workspace) const {
  const Grouping& grouping = workspace.grouping;
  const int32_t expert = grouping.experts[ready.index];
  std::byte* adapted = workspace.scratch.data() + workspace.adapted_offset[ready.index];
  const int32_t first = grouping.first[ready.index];
  return {.record = ready.record,
          .rows = grouping.rows(ready.index),
          .tokens = &grouping.tokens[first],
          .weights = &grouping.weights[first],
          .out_rows = &grouping.out_rows[first],
          .products = reinterpret_cast<float*>(workspace.products.data()),
          .scratch = workspace.scratch.data() + workspace.scratch_offset[ready.index],
          .gate_up_adapter = adapters.gate_up.of(expert),
          .down_adapter = adapters.down.of(expert),
          .adapted = reinterpret_cast<float*>(adapted)};
}

// Sums columns of one token's products in the order of its choices, whatever order they were
// computed in. The sum is in the first choice's row.
void Engine::reduce(const ExpertsCall& call, int64_t token, int64_t begin, int64_t end,
                    Workspace& workspace) const {
  const int64_t hidden = layout().hidden;
  float* products =
      reinterpret_cast<float*>(workspace.products.data()) + token * call.top_k * hidden;
  bool empty = true;
  for (int32_t choice = 0; choice < call.top_k; ++choice) {
    if (call.ids[token * call.top_k + choice] >= pool_->experts()) continue;
    const float* product = products + choice * hidden;
    if (empty) {
      if (choice > 0) std::copy(product + begin, product + end, products + begin);
      empty = false;
    } else {
      for (int64_t i = begin; i < end; ++i) products[i] += product[i];
    }
  }
  if (empty) std::fill(products + begin, products + end, 0.0f);
  void* row = row_pointer(call.out.data, call.out.type, call.out.row_stride, token);
  store_row(products + begin, end - begin, row_pointer(row, call.out.type, 1, begin),
            call.out.type);
}

void Engine::grouped_linear(const LinearCall& call) {
  if (call.projection != 0 && call.projection != 1) {
    throw_invalid("projection is ", call.projection, "; allowed: 0 (gate_up), 1 (down)");
  }
  if (call.top_k < 1) throw_invalid("top_k is ", call.top_k, "; allowed: 1 or more");
  check_offsets(call.offsets, pool_->experts());
  pool_->check_process();
  WorkspacePool::Lease lease(workspaces_);
  const int64_t rows = call.offsets[pool_->experts()];
  const int64_t chunk = rows_per_chunk(call);
  const Phase phase = phase_of(rows / call.top_k);
  for (int64_t begin = 0; begin < rows; begin += chunk) {
    const int64_t end = std::min(begin + chunk, rows);
    linear_chunk(call, begin, end, {phase, call.projection == 1 && end == rows}, *lease);
    if (phase == Phase::kPrefill) last_used_.note(call.layer, (*lease).grouping.experts, begin > 0);
  }
}

void Engine::linear_chunk(const LinearCall& call, int64_t begin, int64_t end, ForwardPart forward,
                          Workspace& workspace) {
  const auto rows = static_cast<int32_t>(end - begin);
  const int64_t width = out_features(call.projection);
  const bool up = call.projection == 0;
  const ExpertFfn& products = ffn(call.layer, forward.phase);
  workspace.prepared.reserve(up ? products.prepared_bytes(rows)
                                : products.prepared_hidden_bytes(rows));
  workspace.products.reserve(rows * width * sizeof(float));
  Grouping& grouping = workspace.grouping;
  grouping.experts.clear();
  grouping.first.assign(1, 0);
  for (int32_t expert = 0; expert < pool_->experts(); ++expert) {
    const int64_t last = std::min(call.offsets[expert + 1], end) - begin;
    if (last <= grouping.first.back()) continue;
    grouping.experts.push_back(expert);
    grouping.first.push_back(static_cast<int32_t>(last));
  }

  const auto count = static_cast<int32_t>(grouping.experts.size());
  workspace.entries.resize(count);
  Claim claim(*pool_, call.layer, grouping.experts, workspace.entries, forward);
  LinearCall chunk = call;
  chunk.x.data = row_pointer(call.x.data, call.x.type, call.x.row_stride, begin);
  chunk.out.data = row_pointer(call.out.data, call.out.type, call.out.row_stride, begin);
  for_each_batch(claim, count, [&](std::span<const ReadyExpert> ready, Part part) {
    compute_linear(chunk, forward.phase, rows, ready, part, workspace);
    if (!part.last) claim.release(ready);  // the claim's end releases the last ones
  });
}

void Engine::compute_linear(const LinearCall& call, Phase phase, int32_t rows,
                            std::span<const ReadyExpert> ready, Part part,
                            Workspace& workspace) const {
  const Grouping& grouping = workspace.grouping;
  const int64_t width = out_features(call.projection);
  std::byte* prepared = workspace.prepared.data();
  auto* products = reinterpret_cast<float*>(workspace.products.data());
  int64_t work = 0;
  const Placement placement(pool_->topology(), ready);
  const ExpertFfn& products_of = ffn(call.layer, phase);
  TaskQueue queue;
  if (part.first) queue.add(tasks_for(rows, kPrepareRows), {0, 0});
  const int32_t linear = queue.stages();
  placement.add_lanes(queue, [&](int32_t begin, int32_t end) {
    for (int32_t i = begin; i < end; ++i) {
      const int32_t of_expert = grouping.rows(ready[placement[i]].index);
      queue.add(products_of.linear_tasks(call.projection), {0, linear}, blocks_at_once(of_expert));
      work += of_expert * width * in_features(call.projection);
    }
  });
  const int32_t store = queue.stages();
  if (part.last) queue.add(rows, {0, store});

  const int32_t team = team_for(work, options_.threads);
  const auto current_node = [&] { return placement.current_node(); };
  queue.run(runtime_, team, current_node, [&](int32_t stage, int64_t at, int32_t count) {
    const auto task = static_cast<int32_t>(at);
    if (stage < linear) {
      const auto prepare = call.projection == 0 ? &ExpertFfn::prepare : &ExpertFfn::prepare_hidden;
      const int32_t begin = task * kPrepareRows;
      (products_of.*prepare)(call.x.data, call.x.type, call.x.row_stride, begin,
                             std::min(begin + kPrepareRows, rows), prepared);
    } else if (stage < store) {
      const ReadyExpert& expert = ready[placement[stage - linear]];
      const int32_t first = grouping.first[expert.index];
      products_of.linear(call.projection, task, count, prepared, expert.record, first,
                         grouping.rows(expert.index), products + first * width, width);
    } else {
      store_row(products + at * width, width,
                row_pointer(call.out.data, call.out.type, call.out.row_stride, at), call.out.type);
    }
  });
}

}  // namespace torch_mesh
