#include "engine/attention.h"

#include <algorithm>
#include <cmath>
#include <limits>

#include "engine/task_queue.h"
#include "kernels/convert.h"
#include "kernels/expert_ffn.h"
#include "kernels/kernel_table.h"

namespace torch_mesh {
namespace {

constexpr float kMinusInfinity = -std::numeric_limits<float>::infinity();
// From this many rows on, one row per lane costs less than adding up the lanes of each product.
// Heads are counted and not rows, so that a token's bits do not depend on the number of tokens.
constexpr int32_t kHeadsForLanes = 6;

// One call, cut into chunks of keys, groups of heads that share them, and tiles of query rows.
class Plan {
 public:
  Plan(const AttentionCall& call, Workspace& workspace)
      : call_(call),
        group_(call.heads / call.key_value_heads),
        rows_(group_ * call.tokens),
        tiles_((rows_ + kAttentionRows - 1) / kAttentionRows),
        chunks_((call.keys + kAttentionKeys - 1) / kAttentionKeys) {
    const int64_t parts = groups() * chunks_ * rows_;
    largest_ = reinterpret_cast<float*>(
        workspace.products.reserve(parts * (2 + call.value_dim) * int64_t{sizeof(float)}));
    total_ = largest_ + parts;
    out_ = total_ + parts;
  }

  int64_t groups() const { return int64_t{call_.batch} * call_.key_value_heads; }
  int64_t parts() const { return groups() * chunks_ * tiles_; }
  int64_t multiply_adds() const {
    return groups() * rows_ * call_.keys * (call_.key_dim + call_.value_dim);
  }

  void attend(const KernelTable& table, int64_t task) const {
    const int64_t group = task / (chunks_ * tiles_);
    const auto chunk = static_cast<int32_t>(task / tiles_ % chunks_);
    const auto tile = static_cast<int32_t>(task % tiles_);
    const auto batch = static_cast<int32_t>(group / call_.key_value_heads);
    const auto head = static_cast<int32_t>(group % call_.key_value_heads);
    const int32_t first_row = tile * kAttentionRows;
    const int32_t rows = std::min(kAttentionRows, rows_ - first_row);
    const int32_t first_key = chunk * kAttentionKeys;
    const int64_t place = (group * chunks_ + chunk) * rows_ + first_row;

    alignas(64) float mask[kAttentionRows * kAttentionKeys];
    int32_t count = std::min(kAttentionKeys, call_.keys - first_key);
    if (call_.mask.data != nullptr) {
      count = expand_masks(table, batch, first_row, masks(rows), first_key, count, mask);
    }
    if (count == 0) {
      std::fill_n(largest_ + place, rows, kMinusInfinity);
      std::fill_n(total_ + place, rows, 0.0f);
      return;
    }

    alignas(64) float queries[kAttentionRows * kMaxHeadDim];
    for (int32_t i = 0; i < rows; ++i) {
      const int32_t token = (first_row + i) / group_, member = (first_row + i) % group_;
      float* query = queries + i * call_.key_dim;
      const ConstRows from = rows_of(call_.query, batch, head * group_ + member, token);
      table.to_floats(from.data, from.type, call_.key_dim, query);
      for (int32_t d = 0; d < call_.key_dim; ++d) query[d] *= call_.scale;
    }
    table.attend({.queries = queries,
                  .rows = rows,
                  .keys = rows_of(call_.key, batch, head, first_key),
                  .values = rows_of(call_.value, batch, head, first_key),
                  .count = count,
                  .key_dim = call_.key_dim,
                  .value_dim = call_.value_dim,
                  .mask = call_.mask.data == nullptr ? nullptr : mask,
                  .mask_stride = masks(rows) == 1 ? 0 : kAttentionKeys,
                  .by_lane = group_ >= kHeadsForLanes,
                  .largest = largest_ + place,
                  .total = total_ + place,
                  .out = out_ + place * call_.value_dim});
  }

  // Adds the chunks of one group of heads, in order.
  void combine(int64_t group) const {
    alignas(64) float sums[kMaxHeadDim];
    const int64_t batch = group / call_.key_value_heads;
    const int64_t first_head = group % call_.key_value_heads * group_;
    for (int32_t row = 0; row < rows_; ++row) {
      const int64_t first = group * chunks_ * rows_ + row;
      float largest = kMinusInfinity;
      for (int32_t chunk = 0; chunk < chunks_; ++chunk) {
        largest = std::max(largest, largest_[first + int64_t{chunk} * rows_]);
      }
      float total = 0.0f;
      std::fill_n(sums, call_.value_dim, 0.0f);
      for (int32_t chunk = 0; chunk < chunks_; ++chunk) {
        const int64_t part = first + int64_t{chunk} * rows_;
        if (total_[part] == 0.0f) continue;  // the chunk's keys are all masked; out_ may be stale
        const float factor = largest_[part] == largest ? 1.0f : std::exp(largest_[part] - largest);
        total += factor * total_[part];
        const float* out = out_ + part * call_.value_dim;
        for (int32_t d = 0; d < call_.value_dim; ++d) sums[d] += factor * out[d];
      }
      if (total != 0.0f) {
        for (int32_t d = 0; d < call_.value_dim; ++d) sums[d] /= total;
      }
      const int64_t token = row / group_, head = first_head + row % group_;
      const int64_t to = (batch * call_.tokens + token) * call_.heads + head;
      store_row(sums, call_.value_dim, row_pointer(call_.out, call_.out_type, call_.value_dim, to),
                call_.out_type);
    }
  }

 private:
  ConstRows rows_of(const HeadRows& heads, int64_t batch, int64_t head, int64_t row) const {
    const int64_t offset =
        batch * heads.batch_stride + head * heads.head_stride + row * heads.row_stride;
    return {row_pointer(heads.data, heads.type, 1, offset), heads.type, heads.row_stride};
  }

  // The number of masks of `rows` rows: one for all if there is one token.
  int32_t masks(int32_t rows) const { return call_.tokens == 1 ? 1 : rows; }

  // Writes mask[row][kAttentionKeys], which is added to the scores. Returns the number of keys up
  // to the last one that a row sees: a cache of a fixed size ends with keys that no row sees.
  int32_t expand_masks(const KernelTable& table, int64_t batch, int32_t first_row, int32_t rows,
                       int32_t first_key, int32_t count, float* mask) const {
    const AttentionMask& from = call_.mask;
    int32_t seen = 0;
    for (int32_t i = 0; i < rows; ++i) {
      const int32_t token = (first_row + i) / group_;
      float* to = mask + i * kAttentionKeys;
      if (i > 0 && (first_row + i) % group_ != 0) {
        std::copy_n(to - kAttentionKeys, count, to);
        continue;
      }
      const int64_t offset = batch * from.batch_stride + token * from.token_stride + first_key;
      if (from.boolean) {
        const auto* sees = static_cast<const bool*>(from.data) + offset;
        for (int32_t k = 0; k < count; ++k) to[k] = sees[k] ? 0.0f : kMinusInfinity;
      } else {
        table.to_floats(row_pointer(from.data, from.type, 1, offset), from.type, count, to);
      }
      int32_t last = count;
      while (last > seen && to[last - 1] == kMinusInfinity) --last;
      seen = std::max(seen, last);
    }
    return seen;
  }

  const AttentionCall& call_;
  int32_t group_;   // query heads that share a head of keys
  int32_t rows_;    // query rows of a group: tokens times heads
  int32_t tiles_;   // of those rows
  int32_t chunks_;  // of keys
  // [groups][chunks][rows]; out_ has [value_dim] for each.
  float* largest_;
  float* total_;
  float* out_;
};

}  // namespace

void decode_attention(const AttentionCall& call, const Runtime& runtime, int32_t threads,
                      WorkspacePool& workspaces) {
  WorkspacePool::Lease lease(workspaces);
  const Plan plan(call, *lease);
  const KernelTable& table = kernel_table();
  TaskQueue queue;
  const int32_t attend = queue.add(plan.parts(), {0, 0});
  queue.add(plan.groups(), {attend, attend + 1});
  queue.run(runtime, team_for(plan.multiply_adds(), threads),
            [&](int32_t stage, int64_t task, int32_t) {
              if (stage == attend) return plan.attend(table, task);
              plan.combine(task);
            });
}

}  // namespace torch_mesh
