// Packs one group of 64 columns. Lanes are columns and each lane runs the same sequence of
// roundings, so that every target packs the same bits.
#pragma once

#include "kernels/kernel_table.h"
#include "kernels/rounding-inl.h"

namespace torch_mesh {
namespace {

// The scales that are tried put the group's largest magnitude at these quantized values. Least
// squares then improves each; the best after rounding to bf16 is kept. int8 gains only from a
// slight clipping. int4 has one more negative value than positive ones, and the group's largest
// magnitude gets it whatever its sign, as in ggml's Q4_0: the other sign of the scale, twice the
// work, takes 0.04 % off the error at most (docs/decisions/0010-lut4.md).
struct Int8Grid {
  static constexpr bool kSigned = false;
  static constexpr float kLow = -127, kHigh = 127;
  static constexpr int kCandidates = 20;
  static constexpr float candidate(int i) { return 125.0f + 0.25f * static_cast<float>(i); }
};

struct Int4Grid {
  static constexpr bool kSigned = true;
  static constexpr float kLow = -8, kHigh = 7;
  static constexpr int kCandidates = 10;
  static constexpr float candidate(int i) { return -6.86f - 0.26f * static_cast<float>(i); }
};

template <typename Grid>
inline Floats quantize(Floats x, Floats inverse) {
  return round_to_integer(clamp(x * inverse, Grid::kLow, Grid::kHigh));
}

// kLanes columns of one group, brought into [1, 2) by a power of two, so that sums of squares stay
// finite and tiny groups round like others. A group that is negligible or not finite is all zeros
// here.
struct Columns {
  alignas(64) float values[kMaxGroup * kLanes];
  int32_t depth;
  Floats amax;     // of `values`; 1 where they are zeros
  Floats extreme;  // the value that has it, the positive one of two; -1 where they are zeros
  Floats restore;  // scales times this; 0 or NaN where the values are zeros

  Columns(const float* panel, int32_t depth_) : depth(depth_) {
    Words bits = broadcast_word(0);
    Floats highest = broadcast(0.0f);
    for (int32_t k = 0; k < depth; ++k) {
      const Floats value = load(panel + k * kBlockColumns);
      bits = maximum_words(bits, magnitude_bits(value));
      highest = maximum(highest, value);
    }
    const Floats largest = as_floats(bits);
    const Mask finite = less(largest, broadcast(__builtin_inff()));
    const Mask sizeable = less(broadcast(0x1p-100f), largest);
    // Up to 2^126, so that the factor is not subnormal.
    const Words exponent = shift_right<23>(as_words(minimum(broadcast(0x1p126f), largest)));
    const Floats factor = as_floats(shift_left<23>(subtract_words(broadcast_word(254), exponent)));
    for (int32_t k = 0; k < depth; ++k) {
      const Floats value = keep(finite, sizeable, load(panel + k * kBlockColumns) * factor, 0.0f);
      store(values + k * kLanes, value);
    }
    amax = keep(finite, sizeable, largest * factor, 1.0f);
    const Floats signed_largest = select(less(highest, largest), broadcast(0.0f) - amax, amax);
    extreme = keep(finite, sizeable, signed_largest, -1.0f);
    const Floats none = select(finite, broadcast(0.0f), broadcast(__builtin_nanf("")));
    restore = select(sizeable, as_floats(shift_left<23>(exponent)), none);
    restore = select(finite, restore, none);
  }

  Floats row(int32_t k) const { return load(values + k * kLanes); }

 private:
  static Floats keep(Mask finite, Mask sizeable, Floats value, float otherwise) {
    return select(finite, select(sizeable, value, broadcast(otherwise)), broadcast(otherwise));
  }
};

// The value that is scaled to a candidate.
template <typename Grid>
inline Floats reach(const Columns& columns) {
  return Grid::kSigned ? columns.extreme : columns.amax;
}

inline Floats to_bf16(Floats x) { return as_floats(shift_left<16>(bf16_bits(x))); }

struct Fit {
  Floats scale;
  Floats gain;
};

// The weight of the squared error of input k of the group: the same for all, or importance[k].
struct Flat {
  Floats operator()(int32_t, Floats value) const { return value; }
};
struct Weighted {
  const float* importance;
  Floats operator()(int32_t k, Floats value) const { return value * broadcast(importance[k]); }
};

// Candidates that are fitted in one pass: their chains of additions overlap.
constexpr int kTogether = 2;

// The least-squares scales for the integers that kTogether candidates give. |x - s q|^2 = |x|^2 -
// (2 s xq - s^2 qq): the gain is the error that a scale removes.
template <typename Grid, typename Cost>
inline void fit_scales(const Columns& columns, const Cost& cost, int first,
                       Fit (&fits)[kTogether]) {
  Floats inverse[kTogether], xq[kTogether], qq[kTogether];
  for (int i = 0; i < kTogether; ++i) {
    inverse[i] = broadcast(Grid::candidate(first + i)) / reach<Grid>(columns);
    xq[i] = qq[i] = broadcast(0.0f);
  }
  for (int32_t k = 0; k < columns.depth; ++k) {
    const Floats x = columns.row(k);
    for (int i = 0; i < kTogether; ++i) {
      const Floats q = quantize<Grid>(x, inverse[i]);
      const Floats costly = cost(k, q);
      xq[i] = multiply_add(x, costly, xq[i]);
      qq[i] = multiply_add(q, costly, qq[i]);
    }
  }
  for (int i = 0; i < kTogether; ++i) {
    const Floats scale = to_bf16(xq[i] / qq[i]);
    fits[i] = {scale, scale * (xq[i] + xq[i] - scale * qq[i])};
  }
}

template <typename Grid, typename Cost = Flat>
inline Floats best_scale(const Columns& columns, const Cost& cost = {}) {
  static_assert(Grid::kCandidates % kTogether == 0);
  Fit best{to_bf16(reach<Grid>(columns) * broadcast(1.0f / Grid::candidate(0))), broadcast(-1.0f)};
  for (int first = 0; first < Grid::kCandidates; first += kTogether) {
    Fit fits[kTogether];
    fit_scales<Grid>(columns, cost, first, fits);
    for (const Fit& fit : fits) {
      const Mask better = less(best.gain, fit.gain);
      best.scale = select(better, fit.scale, best.scale);
      best.gain = select(better, fit.gain, best.gain);
    }
  }
  return best.scale;
}

// Replaces the values by their integers for the chosen scale, as floats.
template <typename Grid>
inline void quantize_columns(Columns& columns, Floats scale) {
  const Floats inverse = broadcast(1.0f) / scale;
  for (int32_t k = 0; k < columns.depth; ++k) {
    store(columns.values + k * kLanes, quantize<Grid>(columns.row(k), inverse));
  }
}

inline Words byte_of_word(Words value, int byte) {
  value = value & broadcast_word(0xff);
  switch (byte) {
    case 1:
      return shift_left<8>(value);
    case 2:
      return shift_left<16>(value);
    case 3:
      return shift_left<24>(value);
    default:
      return value;
  }
}

// Returns codes k .. k + 3 in the bytes of a word, each plus `offset`.
template <typename Codes>
inline Words four_bytes(const Codes& codes, int32_t k, uint32_t offset) {
  Words word = broadcast_word(0);
  for (int byte = 0; byte < 4; ++byte) {
    const Words value = to_integers(codes.row(k + byte));
    word = word | byte_of_word(add_words(value, broadcast_word(offset)), byte);
  }
  return word;
}

inline void store_scale(std::byte* group, int32_t column, const Columns& columns, Floats scale) {
  store_uint16(reinterpret_cast<uint16_t*>(group) + column, bf16_bits(scale * columns.restore));
}

template <typename Codes>
inline void store_nibbles(std::byte* group, int32_t column, const Codes& codes, uint32_t offset) {
  std::byte* words = group + kBlockColumns * 2;
  for (int32_t k = 0; k < codes.depth; k += 8) {
    const Words low = four_bytes(codes, k, offset);
    const Words high = four_bytes(codes, k + 4, offset);
    store_words(words + (k / 8 * kBlockColumns + column) * 4, low | shift_left<4>(high));
  }
}

template <typename Codes>
inline void store_bytes_of(std::byte* group, int32_t column, const Codes& codes) {
  std::byte* words = group + kBlockColumns * 2;
  for (int32_t k = 0; k < codes.depth; k += 4) {
    store_words(words + (k / 4 * kBlockColumns + column) * 4, four_bytes(codes, k, 0));
  }
}

inline void pack_int8_group(const float* panel, int32_t depth, std::byte* group) {
  for (int32_t c = 0; c < kBlockColumns; c += kLanes) {
    Columns columns(panel + c, depth);
    const Floats scale = best_scale<Int8Grid>(columns);
    quantize_columns<Int8Grid>(columns, scale);
    store_scale(group, c, columns, scale);
    store_bytes_of(group, c, columns);
  }
}

inline void pack_int4_group(const float* panel, int32_t depth, std::byte* group) {
  for (int32_t c = 0; c < kBlockColumns; c += kLanes) {
    Columns columns(panel + c, depth);
    const Floats scale = best_scale<Int4Grid>(columns);
    quantize_columns<Int4Grid>(columns, scale);
    store_scale(group, c, columns, scale);
    store_nibbles(group, c, columns, 8);
  }
}

inline void pack_bf16_group(const float* panel, int32_t depth, std::byte* words) {
  for (int32_t k = 0; k < depth; k += 2) {
    for (int32_t c = 0; c < kBlockColumns; c += kLanes) {
      const Words low = bf16_bits(load(panel + k * kBlockColumns + c));
      const Words high = bf16_bits(load(panel + (k + 1) * kBlockColumns + c));
      store_words(words + (k / 2 * kBlockColumns + c) * 4, low | shift_left<16>(high));
    }
  }
}

}  // namespace
}  // namespace torch_mesh
