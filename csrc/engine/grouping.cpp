#include "engine/grouping.h"

#include <algorithm>

#include "base/error.h"

namespace torch_mesh {
namespace {

[[noreturn]] void throw_bad_id(int64_t id, int64_t pair, int32_t top_k, int32_t experts) {
  throw_invalid("expert id ", id, " of token ", pair / top_k, ", choice ", pair % top_k,
                " is outside [0, ", experts, ")");
}

}  // namespace

void group_by_expert(const int64_t* ids, const float* weights, int32_t tokens, int32_t top_k,
                     int32_t experts, bool sentinels, Grouping& grouping) {
  const int64_t pairs = int64_t{tokens} * top_k;
  auto& cursor = grouping.cursor;
  cursor.assign(experts, 0);
  for (int64_t i = 0; i < pairs; ++i) {
    if (ids[i] >= 0 && ids[i] < experts) {
      ++cursor[ids[i]];
    } else if (ids[i] < 0 || !sentinels) {
      throw_bad_id(ids[i], i, top_k, experts);
    }
  }

  grouping.experts.clear();
  for (int32_t expert = 0; expert < experts; ++expert) {
    if (cursor[expert] > 0) grouping.experts.push_back(expert);
  }
  std::sort(grouping.experts.begin(), grouping.experts.end(), [&](int32_t a, int32_t b) {
    return cursor[a] != cursor[b] ? cursor[a] > cursor[b] : a < b;
  });
  grouping.first.assign(1, 0);
  for (int32_t expert : grouping.experts) {
    const int32_t rows = cursor[expert];
    cursor[expert] = grouping.first.back();
    grouping.first.push_back(grouping.first.back() + rows);
  }

  grouping.tokens.resize(grouping.first.back());
  grouping.out_rows.resize(grouping.first.back());
  grouping.weights.resize(grouping.first.back());
  for (int64_t i = 0; i < pairs; ++i) {
    if (ids[i] >= experts) continue;
    const int32_t at = cursor[ids[i]]++;
    grouping.tokens[at] = static_cast<int32_t>(i / top_k);
    grouping.out_rows[at] = static_cast<int32_t>(i);
    grouping.weights[at] = weights[i];
  }
}

void check_expert_ids(const int64_t* ids, int32_t tokens, int32_t top_k, int32_t experts,
                      bool sentinels) {
  for (int64_t i = 0; i < int64_t{tokens} * top_k; ++i) {
    if (ids[i] < 0 || (ids[i] >= experts && !sentinels)) throw_bad_id(ids[i], i, top_k, experts);
  }
}

void check_offsets(const int64_t* offsets, int32_t experts) {
  if (offsets[0] != 0) throw_invalid("offsets[0] is ", offsets[0], "; it must be 0");
  for (int32_t expert = 0; expert < experts; ++expert) {
    if (offsets[expert] <= offsets[expert + 1]) continue;
    throw_invalid("offsets must not decrease; offsets[", expert, "] is ", offsets[expert],
                  " and the next is ", offsets[expert + 1]);
  }
}

}  // namespace torch_mesh
