// The formats' quantizers, one input at a time: see GroupQuantizer. As in pack_group-inl.h lanes
// are columns, and every target gives the same bits.
#pragma once

#include "kernels/pack_group-inl.h"
#include "kernels/pack_lut4-inl.h"

namespace torch_mesh {
namespace {

// Codes of kLanes columns, as store_nibbles and store_bytes_of take them.
struct CodesOfColumns {
  const float* codes;
  int32_t depth;
  Floats row(int32_t k) const { return load(codes + k * kBlockColumns); }
};

// Keeps the scale, rounded to bf16. If it is zero or NaN its inverse is 0, so that codes are those
// of zero.
inline void keep_scale(QuantizedGroup& group, int32_t column, Floats scale) {
  const Floats stored = as_floats(shift_left<16>(bf16_bits(scale)));
  const Floats size = as_floats(magnitude_bits(stored));
  const Mask some = less(broadcast(0.0f), size);
  store(group.scale + column, stored);
  const Floats safe = select(some, stored, broadcast(1.0f));
  store(group.inverse + column, select(some, broadcast(1.0f) / safe, broadcast(0.0f)));
}

template <typename Grid, uint32_t kOffset, bool kNibbles>
struct IntegerCodes {
  static void choose_scale(const Columns& columns, const Weighted& cost, int32_t column,
                           QuantizedGroup& group) {
    keep_scale(group, column, best_scale<Grid>(columns, cost) * columns.restore);
  }

  // Returns the code of `target`; `level` is its value before the scale.
  static Floats code(Floats target, const QuantizedGroup& group, int32_t column, Floats& level) {
    level = quantize<Grid>(target, load(group.inverse + column));
    return level;
  }

  static void store_codes(std::byte* to, int32_t column, const CodesOfColumns& codes) {
    kNibbles ? store_nibbles(to, column, codes, kOffset) : store_bytes_of(to, column, codes);
  }
};
using Int8Codes = IntegerCodes<Int8Grid, 0, false>;
using Int4Codes = IntegerCodes<Int4Grid, 8, true>;

struct Lut4Codes {
  static void choose_scale(const Columns& columns, const Weighted& cost, int32_t column,
                           QuantizedGroup& group) {
    const Lut4Fit fit = best_lut4(columns, cost);
    keep_scale(group, column, fit.scale * columns.restore);
    store(group.zero + column, fit.zero);
  }

  static Floats code(Floats target, const QuantizedGroup& group, int32_t column, Floats& level) {
    const Floats zero = load(group.zero + column);
    const Words found = nearest_codes(multiply_add(target, load(group.inverse + column), zero));
    level = look_up(kLut4Tree.levels, found) - zero;
    return words_to_floats(found);
  }

  static void store_codes(std::byte* to, int32_t column, const CodesOfColumns& codes) {
    store_nibbles(to, column, codes, 0);
  }
};

template <typename Codes>
inline void begin_group(const float* targets, QuantizedGroup& group) {
  const Weighted cost{group.importance};
  for (int32_t c = 0; c < kBlockColumns; c += kLanes) {
    Codes::choose_scale(Columns(targets + c, group.depth), cost, c, group);
  }
}

template <typename Codes>
inline void quantize_input(const float* targets, int32_t k, QuantizedGroup& group, float* values) {
  for (int32_t c = 0; c < kBlockColumns; c += kLanes) {
    Floats level;
    const Floats code = Codes::code(load(targets + c), group, c, level);
    store(group.codes + k * kBlockColumns + c, code);
    store(values + c, level * load(group.scale + c));
  }
}

template <typename Codes>
inline void finish_group(const QuantizedGroup& group, std::byte* to) {
  for (int32_t c = 0; c < kBlockColumns; c += kLanes) {
    store_uint16(reinterpret_cast<uint16_t*>(to) + c, bf16_bits(load(group.scale + c)));
    Codes::store_codes(to, c, CodesOfColumns{group.codes + c, group.depth});
  }
}

template <typename Codes>
constexpr GroupQuantizer quantizer_of() {
  return {begin_group<Codes>, quantize_input<Codes>, finish_group<Codes>};
}

inline void feed_forward(const float* errors, int32_t count, const float* feedback, int64_t stride,
                         int32_t rows, float* targets) {
  constexpr int kVectors = kBlockColumns / kLanes < 8 ? kBlockColumns / kLanes : 8;
  for (int32_t c = 0; c < kBlockColumns; c += kVectors * kLanes) {
    for (int32_t r = 0; r < rows; ++r) {
      float* to = targets + r * kBlockColumns + c;
      Floats sums[kVectors];
      for (int v = 0; v < kVectors; ++v) sums[v] = load(to + v * kLanes);
      for (int32_t i = 0; i < count; ++i) {
        const Floats share = broadcast(feedback[r * stride + i]);
        for (int v = 0; v < kVectors; ++v) {
          const Floats error = load(errors + i * kBlockColumns + c + v * kLanes);
          sums[v] = multiply_add(share, error, sums[v]);
        }
      }
      for (int v = 0; v < kVectors; ++v) store(to + v * kLanes, sums[v]);
    }
  }
}

}  // namespace
}  // namespace torch_mesh
