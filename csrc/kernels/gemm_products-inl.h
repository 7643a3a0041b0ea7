// Multiplies rows with one block by the runtime's gemm, which reads the packed words as they are.
// Many rows are multiplied with fp8 weights expanded to bf16, by that gemm or by bf16's own
// products. Integer formats give the same bits as products-inl.h.
#pragma once

#include "kernels/products-inl.h"

namespace torch_mesh {
namespace {

// The runtime's gemm. TileGemm (tile_products-inl.h) has the same interface.
struct RuntimeGemm {
  static constexpr bool kSignedRows = false;   // else rows of bytes become value + 128
  static constexpr bool kWholeTiles = false;   // writes sums of missing rows too
  static constexpr int32_t kGroupsAhead = 0;   // groups ahead to prefetch while scaling sums
  static constexpr int32_t kBf16Depth = 2048;  // of one gemm: its rows are gathered on the stack

  const Runtime& runtime;

  explicit RuntimeGemm(const BlockProducts& products) : runtime(*products.gemm) {}

  // Copies `bytes` of each row from `at` on to `a`, one row after the other.
  template <bool kBytes>
  void gather(const BlockProducts& products, int64_t at, int32_t bytes, std::byte* a) const {
    for (int32_t r = 0; r < products.rows.count; ++r) {
      const std::byte* from = operand_row(products, r) + at;
      std::byte* to = a + r * bytes;
      if constexpr (!kBytes) {
        __builtin_memcpy(to, from, static_cast<size_t>(bytes));
        continue;
      }
      for (int32_t i = 0; i < bytes; i += 8) {
        uint64_t values;
        __builtin_memcpy(&values, from + i, 8);
        values ^= 0x8080808080808080;
        __builtin_memcpy(to + i, &values, 8);
      }
    }
  }
  void bf16(int32_t rows, int32_t depth, const std::byte* a, const std::byte* b, float* c,
            LinesAhead) const {
    runtime.gemm_bf16(rows, kBlockColumns, depth, depth, kBlockColumns, kBlockColumns,
                      reinterpret_cast<const uint16_t*>(a), reinterpret_cast<const uint16_t*>(b),
                      c);
  }
  void bytes(int32_t rows, int32_t depth, const std::byte* a, const std::byte* b,
             int32_t* c) const {
    runtime.gemm_u8s8(rows, kBlockColumns, depth, depth, kBlockColumns, kBlockColumns,
                      reinterpret_cast<const uint8_t*>(a), reinterpret_cast<const int8_t*>(b), c);
  }
};

// Words of bf16, and the bytes that the next ones are expanded from, if they are.
struct StepWords {
  const std::byte* words;
  LinesAhead ahead;
};

// Multiplies with words of bf16: words(k, depth) returns those of k-values [k, k + depth). `sums`
// has room for kTileRows rows, whatever their number.
template <typename Gemm, typename WordsOf>
inline void gemm_words(const BlockProducts& products, const Gemm& gemm, const WordsOf& words) {
  alignas(64) std::byte gathered[kTileRows * Gemm::kBf16Depth * 2];
  alignas(64) float part[kTileRows * kBlockColumns];
  const int32_t rows = products.rows.count;
  for (int32_t k = 0; k < products.shape.depth_padded; k += Gemm::kBf16Depth) {
    const int32_t left = products.shape.depth_padded - k;
    const int32_t depth = left < Gemm::kBf16Depth ? left : Gemm::kBf16Depth;
    gemm.template gather<false>(products, int64_t{k} * 2, depth * 2, gathered);
    const bool alone = k == 0 && !Gemm::kWholeTiles;
    const StepWords step = words(k, depth);
    gemm.bf16(rows, depth, gathered, step.words, alone ? products.sums : part, step.ahead);
    if (alone) continue;
    for (int32_t i = 0; i < rows * kBlockColumns; i += kLanes) {
      const Floats more = load(part + i);
      store(products.sums + i, k == 0 ? more : load(products.sums + i) + more);
    }
  }
}

template <typename Gemm>
inline void gemm_bf16(const BlockProducts& products, const Gemm& gemm) {
  gemm_words(products, gemm, [&](int32_t k, int32_t) {
    return StepWords{products.block + int64_t{k} * kBlockColumns * 2, {}};
  });
}

// Converts E4M3 to two vectors of words of bf16, which holds every number of E4M3.
template <typename Expanding>
inline void e4m3_to_bf16(const std::byte* pairs, Words (&words)[2]) {
  if constexpr (requires { Expanding::to_bf16(pairs); }) {
    for (int v = 0; v < 2; ++v) words[v] = Expanding::to_bf16(pairs + v * kLanes * 2);
  } else {
    const Floats unit = broadcast(Expanding::kUnit);
    ExpandedBf16Dot::Weights both[2];
    Fp8Dot<Expanding>::weights(pairs, both);
    Expanding::put_in_order(both[0].low, both[1].low);
    Expanding::put_in_order(both[0].high, both[1].high);
    for (int v = 0; v < 2; ++v) {
      words[v] = shift_right<16>(as_words(both[v].low * unit)) | as_words(both[v].high * unit);
    }
  }
}

// Expands fp8 to words of bf16. kScaled: also scales by `step`'s powers of two, which is exact
// unless the result is subnormal or infinite.
template <bool kScaled>
inline void expand_fp8_to_bf16(const std::byte* pairs, int32_t words, const Fp8Step* step,
                               std::byte* to) {
  const uint32_t before = E4m3::count_subnormals();
  for (int32_t c = 0; c < kBlockColumns; c += 2 * kLanes) {
    Floats scales[2] = {broadcast(1), broadcast(1)};
    for (int v = 0; kScaled && v < 2; ++v) scales[v] = step->scales_of(c + v * kLanes);
    for (int32_t i = c; i < words * kBlockColumns; i += kBlockColumns) {
      if (i * 2 % kLineBytes == 0) __builtin_prefetch(pairs + i * 2 + 4096);
      Words both[2];
      e4m3_to_bf16<E4m3>(pairs + i * 2, both);
      for (int v = 0; v < 2; ++v) {
        if constexpr (kScaled) {
          const auto values = ExpandedBf16Dot::expand(both[v]);
          const Words high = as_words(values.high * scales[v]);
          both[v] = shift_right<16>(as_words(values.low * scales[v])) |
                    (high & broadcast_word(0xffff0000));
        }
        store_words(to + (i + v * kLanes) * 4, both[v]);
      }
    }
  }
  E4m3::restore_subnormals(before);
}

// A step of a block as words of bf16, already scaled if scales are powers of two.
struct ExpandedFp8 {
  static constexpr int32_t kMaxDepth = 128;

  int32_t depth;
  bool is_scaled;
  alignas(64) std::byte words[kMaxDepth * kBlockColumns * 2];

  ExpandedFp8(const BlockProducts& products, int32_t k) {
    const OperandShape& shape = products.shape;
    const int32_t left = shape.depth_padded - k;
    depth = left < kMaxDepth ? left : kMaxDepth;
    is_scaled = shape.group_size == 32;
    const std::byte* from = fp8_pairs(products) + int64_t{k} * kBlockColumns;
    if (!is_scaled) expand_fp8_to_bf16<false>(from, depth / 2, nullptr, words);
    for (int32_t i = 0; is_scaled && i < depth; i += 32) {
      const Fp8Step own(products.block, shape.group_size, k + i, 1);
      expand_fp8_to_bf16<true>(from + i * kBlockColumns, 16, &own, words + i * kBlockColumns * 2);
    }
  }
};

template <typename Gemm>
inline void gemm_fp8(const BlockProducts& products, const Gemm& gemm) {
  constexpr int32_t kMaxDepth = ExpandedFp8::kMaxDepth;
  alignas(64) std::byte gathered[kTileRows * kMaxDepth * 2];
  alignas(64) float part[kTileRows * kBlockColumns];
  const OperandShape& shape = products.shape;
  const int32_t rows = products.rows.count;
  for (int32_t k = 0; k < shape.depth_padded; k += kMaxDepth) {
    const ExpandedFp8 expanded(products, k);
    const int32_t depth = expanded.depth;
    gemm.template gather<false>(products, int64_t{k} * 2, depth * 2, gathered);
    const LinesAhead ahead{fp8_pairs(products) + (int64_t{k} + depth) * kBlockColumns,
                           int64_t{depth} * kBlockColumns};
    gemm.bf16(rows, depth, gathered, expanded.words, part, ahead);
    const Fp8Step step(products.block, shape.group_size, k, 1);
    for (int32_t c = 0; c < kBlockColumns; c += kLanes) {
      const Floats scale = expanded.is_scaled ? broadcast(1) : step.scales_of(c);
      for (int32_t r = 0; r < rows; ++r) {
        float* sums = products.sums + r * kBlockColumns + c;
        store(sums, multiply_add(load(part + r * kBlockColumns + c), scale, load(sums)));
      }
    }
  }
}

// Multiplies many rows with fp8 by the Dot of bf16, for processors on which that is faster than the
// runtime's gemm. Sums have other bits than those of fp8's own Dot.
template <typename Dot>
inline void fp8_as_bf16(const BlockProducts& products) {
  const OperandShape& shape = products.shape;
  for (int32_t k = 0; k < shape.depth_padded; k += ExpandedFp8::kMaxDepth) {
    const ExpandedFp8 expanded(products, k);
    const int32_t words = expanded.depth / 2;
    const int64_t next = int64_t{k} + expanded.depth;
    const LinesAhead ahead{fp8_pairs(products) + next * kBlockColumns,
                           int64_t{expanded.depth} * kBlockColumns};
    if (expanded.is_scaled) {
      float_step<Dot>(products, k, words, expanded.words, Unscaled{}, ahead);
    } else {
      const Fp8Step step(products.block, shape.group_size, k, 1);
      float_step<Dot>(products, k, words, expanded.words, step, ahead);
    }
  }
}

template <typename Dot>
constexpr bool takes_signed_bytes() {
  return Dot::kRowWords == 1 || requires { Dot::kSigned; };
}

// Writes 128 times the sum of each column of a group, which gemm's u8 rows add.
template <typename Dot, typename Group>
inline void gemm_surplus(const Group& group, uint32_t* surplus) {
  alignas(8) static constexpr uint8_t kOnes[8] = {1, 1, 1, 1, 1, 1, 1, 1};
  const auto ones = Dot::row(reinterpret_cast<const std::byte*>(kOnes));
  for (int32_t c = 0; c < kBlockColumns; c += kLanes) {
    Words sum = broadcast_word(0);
    for (int32_t j = 0; j < group.count; ++j) {
      sum =
          Dot::add(sum, ones,
                   Dot::weights(group.words + (j * words_at_once<Dot>() * kBlockColumns + c) * 4));
    }
    // Signed bytes go to gemm as they are stored, wherever the Dot puts its zero.
    if constexpr (takes_signed_bytes<Dot>()) {
      const int32_t inputs = group.count * Dot::kRowWords * 4;
      sum = add_words(sum, Dot::start(Dot::zeros(group.scales_of(c)), inputs));
    }
    store_words(surplus + c, shift_left<7>(sum));
  }
}

// Multiplies with groups whose words are gemm's own operands. Bytes of nibbles stay unsigned: s8
// holds them too.
template <typename Dot, typename Scales, typename Group, typename Gemm>
inline void gemm_integer(const BlockProducts& products, const Gemm& gemm) {
  alignas(64) std::byte gathered[kTileRows * kMaxGroup];
  alignas(64) int32_t exact[kTileRows * kBlockColumns];
  alignas(64) uint32_t surplus[kBlockColumns];
  const int32_t size = products.shape.group_size;
  const int32_t count = products.rows.count;
  const float unit = block_unit<Scales>(products);
  for (int32_t g = 0; g < products.shape.depth_padded / size; ++g) {
    const Group group(products, g);
    const GroupRows rows = group_rows(products, g, unit);
    gemm.template gather<true>(products, int64_t{g} * size, size, gathered);
    if constexpr (!Gemm::kSignedRows) gemm_surplus<Dot>(group, surplus);
    gemm.bytes(count, size, gathered, group.words, exact);
    constexpr int kVectors = kBlockColumns / kLanes;
    Floats scale[kVectors];
    Words zeros[kVectors];
    for (int v = 0; v < kVectors; ++v) {
      scale[v] = group.scale(v * kLanes);
      zeros[v] = Dot::zeros(group.scales_of(v * kLanes));
    }
    const int64_t ahead = Gemm::kGroupsAhead * group.total_bytes();
    const int64_t lines_of_row = group.total_bytes() / kLineBytes / count + 1;
    for (int32_t r = 0; r < count; ++r) {
      for (int64_t i = r * lines_of_row; ahead > 0 && i < (r + 1) * lines_of_row; ++i) {
        __builtin_prefetch(group.scales + ahead + i * kLineBytes);
      }
      const Floats row_scale = broadcast(rows.scale[r]);
      [[maybe_unused]] const Floats min_of_row = broadcast(min_factor(rows.scale[r], rows.sum[r]));
      for (int v = 0; v < kVectors; ++v) {
        Words sum = load_words(exact + r * kBlockColumns + v * kLanes);
        if constexpr (!Gemm::kSignedRows) {
          sum = subtract_words(sum, load_words(surplus + v * kLanes));
        }
        if constexpr (!takes_signed_bytes<Dot>()) {
          sum = add_words(sum, Dot::start(zeros[v], rows.sum[r]));
        }
        float* sums = products.sums + r * kBlockColumns + v * kLanes;
        Floats total = multiply_add(words_to_floats(sum), row_scale * scale[v], load(sums));
        if constexpr (Group::kHasMins) {
          total = multiply_add(min_of_row, group.min(v * kLanes), total);
        }
        store(sums, total);
      }
    }
  }
}

}  // namespace
}  // namespace torch_mesh
