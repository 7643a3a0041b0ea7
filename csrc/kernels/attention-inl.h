// Attention of a few query rows over many keys. Every table adds in the same order, sixteen partial
// sums at a time, so that all agree to the bit. Include after the target's simd header.
#pragma once

#include "kernels/activations-inl.h"
#include "kernels/kernel_table.h"
#include "kernels/operands-inl.h"

namespace torch_mesh {
namespace {

constexpr int32_t kPartials = 16;
constexpr int32_t kPartialVectors = kPartials / kLanes;
constexpr int32_t kKeysAtOnce = 16;  // expanded to fp32 in L1, for all rows
constexpr float kMinusInfinity = -__builtin_inff();

using Partials = Floats[kPartialVectors];
using Expanded = float[kKeysAtOnce * kMaxHeadDim];

inline float sum_of(const Partials& partials) {
  alignas(64) float lanes[kPartials];
  for (int v = 0; v < kPartialVectors; ++v) store(lanes + v * kLanes, partials[v]);
  for (int half = kPartials / 2; half > 0; half /= 2) {
    for (int i = 0; i < half; ++i) lanes[i] += lanes[i + half];
  }
  return lanes[0];
}

// Prefetches the next rows meanwhile: one row is too short for the processor to predict the next.
inline void expand_rows(const ConstRows& rows, int32_t first, int32_t count, int32_t dim,
                        float* to) {
  constexpr int64_t kLine = 64;
  const int64_t stride = rows.row_stride * scalar_bytes(rows.type);
  const int64_t bytes = dim * scalar_bytes(rows.type);
  const auto* from = static_cast<const std::byte*>(rows.data) + first * stride;
  for (int32_t i = 0; i < count; ++i) {
    const std::byte* row = from + i * stride;
    for (int64_t at = 0; at < bytes; at += kLine) {
      __builtin_prefetch(row + kKeysAtOnce * stride + at);
    }
    to_floats(row, rows.type, dim, to + i * dim);
  }
}

// scores[r][kAttentionKeys] for kRows rows and one key.
template <int kRows>
inline void score_key(const float* queries, const float* key, int32_t dim, float* scores) {
  Partials sums[kRows];
  for (int r = 0; r < kRows; ++r) {
    for (int v = 0; v < kPartialVectors; ++v) sums[r][v] = broadcast(0.0f);
  }
  for (int32_t d = 0; d < dim; d += kPartials) {
    for (int v = 0; v < kPartialVectors; ++v) {
      const Floats value = load(key + d + v * kLanes);
      for (int r = 0; r < kRows; ++r) {
        sums[r][v] = multiply_add(load(queries + r * dim + d + v * kLanes), value, sums[r][v]);
      }
    }
  }
  for (int r = 0; r < kRows; ++r) scores[r * kAttentionKeys] = sum_of(sums[r]);
}

inline void score_by_key(const AttentionPart& part, const float* keys, int32_t count,
                         float* scores) {
  constexpr int kRowsAtOnce = 4;
  const int32_t dim = part.key_dim;
  for (int32_t i = 0; i < count; ++i) {
    const float* key = keys + i * dim;
    int32_t row = 0;
    for (; row + kRowsAtOnce <= part.rows; row += kRowsAtOnce) {
      score_key<kRowsAtOnce>(part.queries + row * dim, key, dim, scores + row * kAttentionKeys + i);
    }
    for (; row < part.rows; ++row) {
      score_key<1>(part.queries + row * dim, key, dim, scores + row * kAttentionKeys + i);
    }
  }
}

// queries[rows][dim] -> [dim][kAttentionRows], zeros behind the last row.
inline void transpose_queries(const AttentionPart& part, float* transposed) {
  for (int32_t d = 0; d < part.key_dim; ++d) {
    for (int32_t row = 0; row < kAttentionRows; ++row) {
      transposed[d * kAttentionRows + row] =
          row < part.rows ? part.queries[row * part.key_dim + d] : 0.0f;
    }
  }
}

// `keys` has kKeysAtOnce rows; the values of those behind `count` do not matter.
inline void score_by_lane(const AttentionPart& part, const float* transposed, const float* keys,
                          int32_t count, float* scores) {
  constexpr int kSums = 8;  // enough to hide the latency of a multiplication
  const int32_t dim = part.key_dim;
  for (int32_t first_row = 0; first_row < part.rows; first_row += kLanes) {
    for (int32_t first = 0; first < count; first += kSums) {
      Floats sums[kSums];
      for (int i = 0; i < kSums; ++i) sums[i] = broadcast(0.0f);
      for (int32_t d = 0; d < dim; ++d) {
        const Floats queries = load(transposed + d * kAttentionRows + first_row);
        for (int i = 0; i < kSums; ++i) {
          sums[i] = multiply_add(queries, broadcast(keys[(first + i) * dim + d]), sums[i]);
        }
      }
      alignas(64) float lanes[kLanes];
      for (int32_t i = 0; i < kSums && first + i < count; ++i) {
        store(lanes, sums[i]);
        for (int32_t lane = 0; lane < kLanes && first_row + lane < part.rows; ++lane) {
          scores[(first_row + lane) * kAttentionKeys + first + i] = lanes[lane];
        }
      }
    }
  }
}

inline void score_keys(const AttentionPart& part, float* scores) {
  alignas(64) Expanded keys;
  alignas(64) float transposed[kAttentionRows * kMaxHeadDim];
  if (part.by_lane) transpose_queries(part, transposed);
  for (int32_t first = 0; first < part.count; first += kKeysAtOnce) {
    const int32_t left = part.count - first;
    const int32_t count = left < kKeysAtOnce ? left : kKeysAtOnce;
    expand_rows(part.keys, first, count, part.key_dim, keys);
    if (part.by_lane) {
      __builtin_memset(keys + count * part.key_dim, 0,
                       sizeof(float) * static_cast<size_t>((kKeysAtOnce - count) * part.key_dim));
      score_by_lane(part, transposed, keys, count, scores + first);
    } else {
      score_by_key(part, keys, count, scores + first);
    }
  }
}

// scores -> e^(score - largest), whose sum is returned. `count` is a multiple of kPartials.
inline float exponentials(float* scores, int32_t count, float largest) {
  Partials sums;
  for (int v = 0; v < kPartialVectors; ++v) sums[v] = broadcast(0.0f);
  for (int32_t i = 0; i < count; i += kPartials) {
    for (int v = 0; v < kPartialVectors; ++v) {
      float* at = scores + i + v * kLanes;
      const Floats weight = exponential(load(at) - broadcast(largest));
      store(at, weight);
      sums[v] = sums[v] + weight;
    }
  }
  return sum_of(sums);
}

// Ignores a score that is NaN; its exponential is NaN. `count` is a multiple of kPartials.
inline float largest_of(const float* scores, int32_t count) {
  Partials largest;
  for (int v = 0; v < kPartialVectors; ++v) largest[v] = broadcast(kMinusInfinity);
  for (int32_t i = 0; i < count; i += kPartials) {
    for (int v = 0; v < kPartialVectors; ++v) {
      largest[v] = maximum(load(scores + i + v * kLanes), largest[v]);
    }
  }
  alignas(64) float lanes[kPartials];
  for (int v = 0; v < kPartialVectors; ++v) store(lanes + v * kLanes, largest[v]);
  for (int i = 1; i < kPartials; ++i) lanes[0] = lanes[i] > lanes[0] ? lanes[i] : lanes[0];
  return lanes[0];
}

// out[kRows][kVectors of dim] += weights · values, for `count` keys.
template <int kRows, int kVectors>
inline void add_weighted(const float* weights, const float* values, int32_t count, int32_t dim,
                         float* out) {
  Floats sums[kRows][kVectors];
  for (int r = 0; r < kRows; ++r) {
    for (int v = 0; v < kVectors; ++v) sums[r][v] = load(out + r * dim + v * kLanes);
  }
  for (int32_t i = 0; i < count; ++i) {
    Floats factors[kRows];
    for (int r = 0; r < kRows; ++r) factors[r] = broadcast(weights[r * kAttentionKeys + i]);
    for (int v = 0; v < kVectors; ++v) {
      const Floats value = load(values + i * dim + v * kLanes);
      for (int r = 0; r < kRows; ++r) sums[r][v] = multiply_add(factors[r], value, sums[r][v]);
    }
  }
  for (int r = 0; r < kRows; ++r) {
    for (int v = 0; v < kVectors; ++v) store(out + r * dim + v * kLanes, sums[r][v]);
  }
}

template <int kRows>
inline void add_weighted_rows(const float* weights, const float* values, int32_t count, int32_t dim,
                              float* out) {
  constexpr int kVectors = 4;
  int32_t d = 0;
  for (; d + kVectors * kLanes <= dim; d += kVectors * kLanes) {
    add_weighted<kRows, kVectors>(weights, values + d, count, dim, out + d);
  }
  for (; d < dim; d += kLanes) add_weighted<kRows, 1>(weights, values + d, count, dim, out + d);
}

inline void add_values(const AttentionPart& part, const float* weights) {
  constexpr int kRowsAtOnce = 2;
  alignas(64) Expanded values;
  const int32_t dim = part.value_dim;
  for (int32_t first = 0; first < part.count; first += kKeysAtOnce) {
    const int32_t left = part.count - first;
    const int32_t count = left < kKeysAtOnce ? left : kKeysAtOnce;
    expand_rows(part.values, first, count, dim, values);
    const float* from = weights + first;
    int32_t row = 0;
    for (; row + kRowsAtOnce <= part.rows; row += kRowsAtOnce) {
      add_weighted_rows<kRowsAtOnce>(from + row * kAttentionKeys, values, count, dim,
                                     part.out + row * dim);
    }
    for (; row < part.rows; ++row) {
      add_weighted_rows<1>(from + row * kAttentionKeys, values, count, dim, part.out + row * dim);
    }
  }
}

inline void attend(const AttentionPart& part) {
  alignas(64) float scores[kAttentionRows * kAttentionKeys];
  const int32_t padded = (part.count + kPartials - 1) / kPartials * kPartials;
  score_keys(part, scores);
  for (int32_t row = 0; row < part.rows; ++row) {
    float* own = scores + row * kAttentionKeys;
    if (part.mask != nullptr) {
      const float* mask = part.mask + row * part.mask_stride;
      for (int32_t i = 0; i < part.count; ++i) own[i] += mask[i];
    }
    for (int32_t i = part.count; i < padded; ++i) own[i] = kMinusInfinity;
    const float largest = largest_of(own, padded);
    part.largest[row] = largest;
    // Where every key is masked any finite number will do: each weight is e^-inf.
    part.total[row] = exponentials(own, padded, largest == kMinusInfinity ? 0.0f : largest);
  }
  __builtin_memset(part.out, 0, sizeof(float) * static_cast<size_t>(part.rows * part.value_dim));
  add_values(part, scores);
}

}  // namespace
}  // namespace torch_mesh
