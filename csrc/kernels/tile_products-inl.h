// Rows times one block in the tiles of AMX: eight registers of 16 rows of 64 bytes. Include after
// gemm_products-inl.h, whose algorithms these are, with another multiplication.
#pragma once

#include <type_traits>

#include "kernels/bf12_products-inl.h"
#include "kernels/gemm_products-inl.h"
#include "kernels/table-inl.h"

namespace torch_mesh {
namespace {

constexpr int32_t kRegisterRows = 16;
constexpr int32_t kRegisterBytes = 64;  // of a row

// Tiles 0 to 3 are sums: 32 rows of 32 columns, or 16 of 64. 4 and 5 are rows, 6 and 7 weights.
struct alignas(64) TileConfig {
  uint8_t palette = 1;
  uint8_t start_row = 0;
  uint8_t reserved[14] = {};
  uint16_t row_bytes[16] = {};
  uint8_t rows[16] = {};

  explicit TileConfig(int32_t step_bytes) {
    for (int tile = 0; tile < 8; ++tile) {
      const bool is_rows = tile == 4 || tile == 5;
      const bool is_weights = tile == 6 || tile == 7;
      row_bytes[tile] = static_cast<uint16_t>(is_rows ? step_bytes : kRegisterBytes);
      rows[tile] = static_cast<uint8_t>(is_weights ? step_bytes / 4 : kRegisterRows);
    }
  }
};

// Bytes of a row that one product of tiles takes: a group where that is less than a register has.
inline int32_t tile_step(const OperandShape& shape) {
  const bool floats = has_float_products(shape.format);
  return floats || shape.group_size > kRegisterBytes ? kRegisterBytes : shape.group_size;
}

// GCC's intrinsics do not say what memory they read: what stands there has to be stored before.
inline void stored(const void* memory) { __asm__ volatile("" : : "r"(memory) : "memory"); }

inline void begin_tiles(const OperandShape& shape) {
  const TileConfig config(tile_step(shape));
  stored(&config);
  _tile_loadconfig(&config);
}

inline void end_tiles() { _tile_release(); }

template <bool kBytes>
inline void add_products_of_two_rows() {
  if constexpr (kBytes) {
    _tile_dpbssd(0, 4, 6);
    _tile_dpbssd(1, 4, 7);
    _tile_dpbssd(2, 5, 6);
    _tile_dpbssd(3, 5, 7);
  } else {
    _tile_dpbf16ps(0, 4, 6);
    _tile_dpbf16ps(1, 4, 7);
    _tile_dpbf16ps(2, 5, 6);
    _tile_dpbf16ps(3, 5, 7);
  }
}

template <bool kBytes, bool kUpper>
inline void add_products_of_one_row() {
  if constexpr (kBytes && !kUpper) {
    _tile_dpbssd(0, 4, 6);
    _tile_dpbssd(1, 4, 7);
  } else if constexpr (kBytes) {
    _tile_dpbssd(2, 4, 6);
    _tile_dpbssd(3, 4, 7);
  } else if constexpr (!kUpper) {
    _tile_dpbf16ps(0, 4, 6);
    _tile_dpbf16ps(1, 4, 7);
  } else {
    _tile_dpbf16ps(2, 4, 6);
    _tile_dpbf16ps(3, 4, 7);
  }
}

inline void zero_tiles() {
  _tile_zero(0);
  _tile_zero(1);
  _tile_zero(2);
  _tile_zero(3);
}

// The processor's own prefetchers see little of what tiles load.
constexpr int32_t kTileAhead = 4096;

// kDirect: the weights are the record's own, and not what they have been expanded to.
template <bool kDirect>
struct TileGemm {
  static constexpr bool kSignedRows = true;
  static constexpr bool kWholeTiles = true;
  static constexpr int32_t kGroupsAhead = kDirect ? 0 : 2;
  static constexpr int32_t kBf16Depth = 128;

  explicit TileGemm(const BlockProducts& products) : step_(tile_step(products.shape)) {}

  // Row after row, and zeros up to a whole tile.
  template <bool kBytes>
  void gather(const BlockProducts& products, int64_t at, int32_t bytes, std::byte* a) const {
    const int32_t rows = products.rows.count;
    for (int32_t r = 0; r < rows; ++r) {
      const std::byte* from = operand_row(products, r) + at;
      std::byte* to = a + r * bytes;
      int32_t i = 0;
      for (; i + kRegisterBytes <= bytes; i += kRegisterBytes) {
        store_words(to + i, load_words(from + i));
      }
      for (; i < bytes; i += 16) __builtin_memcpy(to + i, from + i, 16);
    }
    const int32_t missing = -rows & (kRegisterRows - 1);
    __builtin_memset(a + rows * bytes, 0, static_cast<size_t>(missing) * bytes);
  }
  void bf16(int32_t rows, int32_t depth, const std::byte* a, const std::byte* b, float* c,
            const LinesAhead& ahead) const {
    multiply<false>(rows, 2 * depth, a, b, reinterpret_cast<std::byte*>(c), ahead);
  }
  void bytes(int32_t rows, int32_t depth, const std::byte* a, const std::byte* b,
             int32_t* c) const {
    multiply<true>(rows, depth, a, b, reinterpret_cast<std::byte*>(c), {});
  }

 private:
  static constexpr int64_t kLine = kBlockColumns * 4;  // of weights, and of sums

  // What the first rows' products ask for: weights of the block further on, which are read as they
  // are and soon, into the first-level cache; or what the next step's are expanded from, into the
  // second. (Into the first it would take the place of words, rows and sums: 0.92 of the speed.)
  class Asking {
   public:
    Asking(bool first_rows, const LinesAhead& ahead, int64_t steps)
        : direct_(kDirect && first_rows),
          next_(ahead.from),
          lines_(first_rows ? static_cast<int32_t>(ahead.bytes / kLineBytes / steps) : 0) {}

    void ask(const std::byte* words, int32_t bytes, bool again) {
      for (int32_t i = 0; direct_ && !again && i < bytes; i += kLineBytes) {
        __builtin_prefetch(words + kTileAhead + i);
      }
      for (int32_t i = 0; i < lines_; ++i, next_ += kLineBytes) __builtin_prefetch(next_, 0, 2);
    }

   private:
    bool direct_;
    const std::byte* next_;
    int32_t lines_;
  };

  template <bool kBytes>
  void multiply(int32_t rows, int32_t row_bytes, const std::byte* a, const std::byte* b,
                std::byte* c, const LinesAhead& ahead) const {
    stored(a);
    stored(b);
    const int32_t steps = row_bytes / step_;
    int32_t row = 0;
    for (; rows - row > kRegisterRows; row += 2 * kRegisterRows) {
      multiply_two<kBytes>(row_bytes, a + row * row_bytes, b, c + row * kLine,
                           Asking(row == 0, ahead, 2 * steps));
    }
    if (row < rows)
      multiply_one<kBytes>(row_bytes, a + row * row_bytes, b, c + row * kLine,
                           Asking(row == 0, ahead, steps));
  }
  template <bool kBytes>
  void multiply_one(int32_t row_bytes, const std::byte* a, const std::byte* b, std::byte* c,
                    Asking asking) const {
    zero_tiles();
    for (int32_t at = 0; at < row_bytes; at += step_) {
      const std::byte* words = b + int64_t{at} / 4 * kLine;
      _tile_loadd(4, a + at, row_bytes);
      _tile_loadd(6, words, kLine);
      _tile_loadd(7, words + kRegisterBytes, kLine);
      asking.ask(words, step_ * kBlockColumns, false);
      add_products_of_one_row<kBytes, false>();
      _tile_loadd(6, words + 2 * kRegisterBytes, kLine);
      _tile_loadd(7, words + 3 * kRegisterBytes, kLine);
      add_products_of_one_row<kBytes, true>();
    }
    _tile_stored(0, c, kLine);
    _tile_stored(1, c + kRegisterBytes, kLine);
    _tile_stored(2, c + 2 * kRegisterBytes, kLine);
    _tile_stored(3, c + 3 * kRegisterBytes, kLine);
  }
  template <bool kBytes>
  void multiply_two(int32_t row_bytes, const std::byte* a, const std::byte* b, std::byte* c,
                    Asking asking) const {
    const std::byte* second = a + kRegisterRows * row_bytes;
    std::byte* lower = c + kRegisterRows * kLine;
    for (int32_t half = 0; half < kLine; half += 2 * kRegisterBytes) {
      zero_tiles();
      for (int32_t at = 0; at < row_bytes; at += step_) {
        const std::byte* words = b + int64_t{at} / 4 * kLine;
        _tile_loadd(4, a + at, row_bytes);
        _tile_loadd(5, second + at, row_bytes);
        _tile_loadd(6, words + half, kLine);
        _tile_loadd(7, words + half + kRegisterBytes, kLine);
        asking.ask(words, step_ * kBlockColumns, half > 0);
        add_products_of_two_rows<kBytes>();
      }
      _tile_stored(0, c + half, kLine);
      _tile_stored(1, c + half + kRegisterBytes, kLine);
      _tile_stored(2, lower + half, kLine);
      _tile_stored(3, lower + half + kRegisterBytes, kLine);
    }
  }

  int32_t step_;
};

template <typename Dot, typename Scales, typename Group>
inline void tile_integers(const BlockProducts& products) {
  clear_sums(products);
  constexpr bool kDirect = std::is_same_v<Group, IntegerGroup<Dot, Scales>>;
  gemm_integer<Dot, Scales, Group>(products, TileGemm<kDirect>(products));
}

inline void tile_bf16(const BlockProducts& products) {
  gemm_bf16(products, TileGemm<true>(products));
}

inline void tile_bf12(const BlockProducts& products) {
  gemm_bf12(products, TileGemm<false>(products));
}

inline void tile_fp8(const BlockProducts& products) {
  clear_sums(products);
  gemm_fp8(products, TileGemm<false>(products));
}

// Records of GGUF's types with groups of 32, two groups at a time: what tiles take of the rows, the
// codes as signed bytes without their zero, and a sum for each group, which is scaled in registers.
template <Format kFormat>
class GgufTiles {
 public:
  explicit GgufTiles(const BlockProducts& products) : products_(products) {
    for (int32_t r = 0; r < products.rows.count; ++r) rows_[r] = operand_row(products, r);
  }

  void multiply() {
    const int32_t groups = products_.shape.depth_padded / kType.group;
    for (int32_t group = 0; group < groups; group += kGroups) {
      const int32_t count = groups - group < kGroups ? groups - group : kGroups;
      gather(group, count);
      for (int32_t g = 0; g < count; ++g) expand(group + g, g);
      for (int32_t g = 0; g < count; ++g) multiply_group(g);
      if (count == kGroups) {
        add<kGroups>(group);
      } else {
        add<1>(group);
      }
    }
  }

 private:
  static constexpr GgufType kType = gguf_type(kFormat);
  static_assert(kType.part_groups() == 1);
  static constexpr int32_t kGroups = 2;
  static constexpr int32_t kDepth = kGroups * kType.group;
  static_assert(kDepth == kRegisterBytes);
  static constexpr int64_t kLine = kBlockColumns * 4;  // of weights, and of sums

  // Row after row, and zeros up to a whole tile.
  void gather(int32_t group, int32_t count) {
    const int32_t rows = products_.rows.count;
    for (int32_t r = 0; r < rows; ++r) {
      const std::byte* from = rows_[r] + group * kType.group;
      if (count == kGroups) {
        store_words(gathered_ + r * kDepth, load_words(from));
      } else {
        __builtin_memcpy(gathered_ + r * kDepth, from, kType.group);
      }
    }
    const int32_t missing = -rows & (kRegisterRows - 1);
    __builtin_memset(gathered_ + rows * kDepth, 0, static_cast<size_t>(missing) * kDepth);
  }

  void expand(int32_t group, int32_t g) {
    const GgufPlace<kFormat> place(products_.block, group);
    std::byte* to = codes_ + g * kType.group * kBlockColumns;
    const Words zero = broadcast_word(kType.levels == nullptr ? kType.zero * 0x01010101 : 0);
    static_assert(kLanes == kGgufColumns);
    for (int32_t c = 0; c < kBlockColumns; c += kLanes) {
      const std::byte* words = place.words + c * kType.bits * 4;
      read_gguf<kFormat, 0, 4>(words, [&](auto eight, Words low, Words high) {
        std::byte* at = to + eight.value * 2 * kLine + c * 4;
        store_words(at, _mm512_sub_epi8(low, zero));
        store_words(at + kLine, _mm512_sub_epi8(high, zero));
      });
      store(scale_[g] + c, place.scale(c));
      if constexpr (kType.has_mins()) store(min_[g] + c, place.min(c));
    }
  }

  void multiply_group(int32_t g) {
    const std::byte* rows = gathered_ + g * kType.group;
    const std::byte* words = codes_ + g * kType.group * kBlockColumns;
    auto* to = reinterpret_cast<std::byte*>(exact_[g]);
    stored(rows);
    stored(words);
    for (int32_t row = 0; row < products_.rows.count; row += 2 * kRegisterRows) {
      const bool two = products_.rows.count - row > kRegisterRows;
      _tile_loadd(4, rows + row * kDepth, kDepth);
      if (two) _tile_loadd(5, rows + (row + kRegisterRows) * kDepth, kDepth);
      for (int32_t half = 0; half < kLine; half += 2 * kRegisterBytes) {
        std::byte* upper = to + row * kLine + half;
        std::byte* lower = upper + kRegisterRows * kLine;
        zero_tiles();
        _tile_loadd(6, words + half, kLine);
        _tile_loadd(7, words + half + kRegisterBytes, kLine);
        add_products_of_one_row<true, false>();
        _tile_stored(0, upper, kLine);
        _tile_stored(1, upper + kRegisterBytes, kLine);
        if (!two) continue;
        _tile_dpbssd(2, 5, 6);
        _tile_dpbssd(3, 5, 7);
        _tile_stored(2, lower, kLine);
        _tile_stored(3, lower + kRegisterBytes, kLine);
      }
    }
  }

  // As add_scaled and subtract_min, one group after the other.
  template <int32_t kCount>
  void add(int32_t group) const {
    const int32_t rows = products_.rows.count;
    const int64_t of_sums = int64_t{products_.shape.depth_padded} / kType.group * 4;
    const std::byte* ahead = GgufPlace<kFormat>(products_.block, group).steps + kGgufAhead;
    const int64_t lines_of_row = kGroups * kType.part_bytes() / kLineBytes / rows + 1;
    for (int32_t r = 0; r < rows; ++r) {
      for (int64_t i = r * lines_of_row; i < (r + 1) * lines_of_row; ++i) {
        __builtin_prefetch(ahead + i * kLineBytes);
      }
      const std::byte* at = rows_[r] + products_.shape.depth_padded + group * 4;
      float row_scale[kCount];
      int32_t row_sum[kCount];
      __builtin_memcpy(row_scale, at, sizeof(row_scale));
      __builtin_memcpy(row_sum, at + of_sums, sizeof(row_sum));
      float* sums = products_.sums + r * kBlockColumns;
      for (int32_t c = 0; c < kBlockColumns; c += kLanes) {
        Floats sum = load(sums + c);
        for (int32_t g = 0; g < kCount; ++g) {
          const Words exact = load_words(exact_[g] + r * kBlockColumns + c);
          const Floats scale = broadcast(row_scale[g]) * load(scale_[g] + c);
          sum = multiply_add(words_to_floats(exact), scale, sum);
          if constexpr (kType.has_mins()) {
            const float minus = -(row_scale[g] * static_cast<float>(row_sum[g]));
            sum = multiply_add(broadcast(minus), load(min_[g] + c), sum);
          }
        }
        store(sums + c, sum);
      }
    }
  }

  const BlockProducts& products_;
  const std::byte* rows_[kTileRows];
  alignas(64) std::byte gathered_[kTileRows * kDepth];
  alignas(64) std::byte codes_[kDepth * kBlockColumns];
  alignas(64) int32_t exact_[kGroups][kTileRows * kBlockColumns];
  alignas(64) float scale_[kGroups][kBlockColumns];
  alignas(64) float min_[kGroups][kBlockColumns];
};

template <typename Dot, Format kFormat>
inline void tile_gguf(const BlockProducts& products) {
  if constexpr (gguf_type(kFormat).part_groups() == 1) {
    clear_sums(products);
    GgufTiles<kFormat>(products).multiply();
  } else {
    tile_integers<Dot, HalfScales, GgufGroup<kFormat>>(products);
  }
}

}  // namespace
}  // namespace torch_mesh
