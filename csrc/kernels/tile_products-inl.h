// Multiplies many rows with one block in the tiles of AMX: eight registers of 16 rows of 64 bytes.
// They read the packed words as they are. Integer formats give the same bits as products-inl.h.
#pragma once

#include <type_traits>

#include "kernels/bf12_products-inl.h"
#include "kernels/fp8_as_bf16-inl.h"
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

// Bytes of a row that one product of tiles takes: a register's row, or a group if that is less.
inline int32_t tile_step(const OperandShape& shape) {
  const bool floats = has_float_products(shape.format);
  return floats || shape.group_size > kRegisterBytes ? kRegisterBytes : shape.group_size;
}

// Makes the compiler store `memory` before tiles load it: GCC's intrinsics do not say what they
// read.
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

// kDirect: the weights are multiplied as the record holds them, without being expanded.
template <bool kDirect>
struct TileGemm {
  static constexpr int32_t kGroupsAhead = kDirect ? 0 : 2;  // to prefetch while sums are scaled
  static constexpr int32_t kBf16Depth = 128;  // of one gemm: its rows are gathered on the stack

  explicit TileGemm(const BlockProducts& products) : step_(tile_step(products.shape)) {}

  // Copies row after row, and pads with zero rows to whole tiles.
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

  // The prefetches of the first rows' products. Weights that are soon read as they are go into the
  // first-level cache. Bytes that the next step's weights are expanded from go into the second. (In
  // the first they would displace words, rows and sums: 0.92 of the speed.) Products of expanded
  // bytes prefetch nothing here: gemm_integer does.
  template <bool kBytes>
  class Asking {
   public:
    Asking(bool first_rows, const LinesAhead& ahead, int64_t steps) : first_rows_(first_rows) {
      if constexpr (kLines) {
        next_ = ahead.from;
        lines_ = first_rows ? static_cast<int32_t>(ahead.bytes / kLineBytes / steps) : 0;
      }
    }

    void ask(const std::byte* words, int32_t bytes, bool again) {
      if constexpr (kDirect) {
        for (int32_t i = 0; first_rows_ && !again && i < bytes; i += kLineBytes) {
          __builtin_prefetch(words + kTileAhead + i);
        }
      } else if constexpr (kLines) {
        for (int32_t i = 0; i < lines_; ++i, next_ += kLineBytes) __builtin_prefetch(next_, 0, 2);
      }
    }

   private:
    static constexpr bool kLines = !kDirect && !kBytes;

    bool first_rows_;
    const std::byte* next_ = nullptr;
    int32_t lines_ = 0;
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
                           Asking<kBytes>(row == 0, ahead, 2 * steps));
    }
    if (row < rows)
      multiply_one<kBytes>(row_bytes, a + row * row_bytes, b, c + row * kLine,
                           Asking<kBytes>(row == 0, ahead, steps));
  }
  template <bool kBytes>
  void multiply_one(int32_t row_bytes, const std::byte* a, const std::byte* b, std::byte* c,
                    Asking<kBytes> asking) const {
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
                    Asking<kBytes> asking) const {
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

// Below Gemm is a TileGemm.

// Words of bf16, and the bytes that the next ones are expanded from, if they are.
struct StepWords {
  const std::byte* words;
  LinesAhead ahead;
};

// Multiplies with words of bf16: words(k, depth) returns those of k-values [k, k + depth).
template <typename Gemm, typename WordsOf>
inline void gemm_words(const BlockProducts& products, const Gemm& gemm, const WordsOf& words) {
  alignas(64) std::byte gathered[kTileRows * Gemm::kBf16Depth * 2];
  alignas(64) float part[kTileRows * kBlockColumns];
  const int32_t rows = products.rows.count;
  for (int32_t k = 0; k < products.shape.depth_padded; k += Gemm::kBf16Depth) {
    const int32_t left = products.shape.depth_padded - k;
    const int32_t depth = left < Gemm::kBf16Depth ? left : Gemm::kBf16Depth;
    gemm.template gather<false>(products, int64_t{k} * 2, depth * 2, gathered);
    const StepWords step = words(k, depth);
    gemm.bf16(rows, depth, gathered, step.words, part, step.ahead);
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

template <typename Gemm>
inline void gemm_bf12(const BlockProducts& products, const Gemm& gemm) {
  const Bf12 block = bf12_block(products.block, products.shape.depth_padded);
  alignas(64) std::byte words[Gemm::kBf16Depth * kBlockColumns * 2];
  gemm_words(products, gemm, [&](int32_t k, int32_t depth) {
    for (int32_t i = 0; i < depth; i += kBf12Depth) {
      expand_bf12_tile(block, (k + i) / kBf12Depth, words + i * kBlockColumns * 2);
    }
    const int32_t next = (k + depth) / kBf12Depth;
    return StepWords{words, {block.tile(next), int64_t{depth} / kBf12Depth * kBf12TileBytes}};
  });
}

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

// Multiplies with groups whose words are tiles' operands. Bytes of nibbles stay unsigned: s8 holds
// them too.
template <typename Dot, typename Scales, typename Group, typename Gemm>
inline void gemm_integer(const BlockProducts& products, const Gemm& gemm) {
  constexpr bool kUnsigned = Dot::kRowWords == 2;
  alignas(64) std::byte gathered[kTileRows * kMaxGroup];
  alignas(64) int32_t exact[kTileRows * kBlockColumns];
  const int32_t size = products.shape.group_size;
  const int32_t count = products.rows.count;
  const float unit = block_unit<Scales>(products);
  for (int32_t g = 0; g < products.shape.depth_padded / size; ++g) {
    const Group group(products, g);
    const GroupRows rows = group_rows(products, g, unit);
    gemm.template gather<true>(products, int64_t{g} * size, size, gathered);
    gemm.bytes(count, size, gathered, group.words, exact);
    constexpr int kVectors = kBlockColumns / kLanes;
    Floats scale[kVectors];
    [[maybe_unused]] Words zeros[kVectors];  // of formats whose codes are unsigned
    for (int v = 0; v < kVectors; ++v) {
      scale[v] = group.scale(v * kLanes);
      if constexpr (kUnsigned) zeros[v] = Dot::zeros(group.scales_of(v * kLanes));
    }
    const int64_t ahead = Gemm::kGroupsAhead * group.total_bytes();
    const int64_t lines_of_row = group.total_bytes() / kLineBytes / count + 1;
    for (int32_t r = 0; r < count; ++r) {
      for (int64_t i = r * lines_of_row; ahead > 0 && i < (r + 1) * lines_of_row; ++i) {
        __builtin_prefetch(group.scales + ahead + i * kLineBytes);
      }
      const Floats row_scale = broadcast(rows.scale[r]);
      for (int v = 0; v < kVectors; ++v) {
        Words sum = load_words(exact + r * kBlockColumns + v * kLanes);
        if constexpr (kUnsigned) sum = add_words(sum, words_of(Dot::start(zeros[v], rows.sum[r])));
        float* sums = products.sums + r * kBlockColumns + v * kLanes;
        store(sums, multiply_add(words_to_floats(sum), row_scale * scale[v], load(sums)));
      }
    }
  }
}

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

// Multiplies records of GGUF's types, 64 inputs at a time, as many as a tile has of a row. Codes
// are signed bytes with their zero subtracted. Each group has a sum of its own, which is scaled in
// registers. Loads and stores of tiles take 8 and 15 cycles, whatever runs beside them; products
// take none unless they wait for each other. So the products of an item, 16 rows with two groups,
// begin before the sums of the item before are scaled. Data that is used again stays in the
// first-level cache.
template <Format kFormat>
class GgufTiles {
 public:
  explicit GgufTiles(const BlockProducts& products)
      : products_(products), items_(round_up(products.rows.count) / kRegisterRows * kPairs) {
    const int32_t rows = products.rows.count;
    for (int32_t r = 0; r < rows; ++r) source_[r] = operand_row(products, r);
    const int32_t missing = round_up(rows) - rows;
    __builtin_memset(rows_ + rows * kDepth, 0, static_cast<size_t>(missing) * kDepth);
  }

  void multiply() {
    const int32_t depth = products_.shape.depth_padded;
    prepare(0);
    multiply_item(0, exact_[0]);
    int32_t turn = 0;
    for (int32_t k = 0; k < depth; k += kDepth) {
      for (int32_t item = 0; item < items_; ++item, turn = 1 - turn) {
        if (item + 1 < items_) {
          multiply_item(item + 1, exact_[1 - turn]);
        } else if (k + kDepth < depth) {
          prepare(k + kDepth);  // overwrites what this step's products have read
          multiply_item(0, exact_[1 - turn]);
        }
        if (depth - k >= kDepth) {
          add<kAtOnce>(k, item, exact_[turn]);
        } else {
          add<kPartGroups>(k, item, exact_[turn]);
        }
      }
    }
  }

 private:
  static constexpr GgufType kType = gguf_type(kFormat);
  static constexpr int32_t kDepth = kRegisterBytes;
  static constexpr int32_t kGroups = kDepth / kType.group;
  static constexpr int32_t kPartGroups = kType.part_groups();
  static constexpr int32_t kAtOnce = 2;
  static constexpr int32_t kPairs = kGroups / kAtOnce;
  static constexpr int32_t kVectors = kBlockColumns / kLanes;
  static constexpr int32_t kTileWords = kRegisterRows * kLanes;
  static constexpr int32_t kScaleGroups = 16;  // groups of a row whose scales are gathered at once
  static constexpr int64_t kLine = kBlockColumns * 4;  // of weights
  static_assert(kLanes == kGgufColumns && kLanes == kScaleGroups);

  // Scales of the columns, for 64 inputs.
  struct Scales {
    alignas(64) float scale[kGroups][kBlockColumns];
    alignas(64) float min[kType.has_mins() ? kGroups : 1][kBlockColumns];
  };
  // Factors of the rows, for sums and for mins.
  struct RowScales {
    alignas(64) float scale[kTileRows][kScaleGroups];
    alignas(64) float minus[kType.has_mins() ? kTileRows : 1][kScaleGroups];
  };
  // Sums of an item: 16 rows with two groups.
  using Exact = int32_t[kAtOnce][kVectors * kTileWords];

  static constexpr int32_t round_up(int32_t rows) {
    return (rows + kRegisterRows - 1) / kRegisterRows * kRegisterRows;
  }
  static constexpr int32_t first_row(int32_t item) { return item / kPairs * kRegisterRows; }
  static constexpr int32_t first_group(int32_t item) { return item % kPairs * kAtOnce; }
  Scales& scales_of(int32_t k) { return scales_[k / kDepth % 2]; }
  RowScales& row_scales_of(int32_t group) { return row_scales_[group / kScaleGroups % 2]; }

  // Prepares 64 inputs, or the last 32. Those are one group; products with the bytes behind it are
  // not used.
  void prepare(int32_t k) {
    static_assert(kType.depth % kDepth == 0 || kPartGroups == 1);
    if (k / kType.group % kScaleGroups == 0) gather_scales(k / kType.group);
    const bool whole = products_.shape.depth_padded - k >= kDepth;
    for (int32_t r = 0; r < products_.rows.count; ++r) {
      if (whole) {
        store_words(rows_ + r * kDepth, load_words(source_[r] + k));
      } else {
        __builtin_memcpy(rows_ + r * kDepth, source_[r] + k, kGgufPart);
      }
    }
    for (int32_t c = 0; c < kBlockColumns; c += kLanes) {
      expand(k, 0, c);
      if (whole) expand(k, 1, c);
    }
  }

  // Gathers the rows' scales, and their factors of mins. Each row's own cache lines would not stay
  // in the cache from one step to the next.
  void gather_scales(int32_t group) {
    const int32_t groups = products_.shape.depth_padded / kType.group;
    const int32_t left = groups - group < kScaleGroups ? groups - group : kScaleGroups;
    const auto mask = static_cast<Mask>((1u << left) - 1);
    RowScales& to = row_scales_of(group);
    for (int32_t r = 0; r < products_.rows.count; ++r) {
      const std::byte* at = source_[r] + products_.shape.depth_padded + group * 4;
      store(to.scale[r], _mm512_maskz_loadu_ps(mask, at));
      if constexpr (kType.has_mins()) {
        store(to.minus[r], _mm512_maskz_loadu_ps(mask, at + groups * 4));
      }
    }
  }

  // Expands kLanes columns of a part.
  void expand(int32_t k, int32_t part, int32_t c) {
    const int32_t group = k / kType.group + part * kPartGroups;
    const GgufPlace<kFormat> place(products_.block, group);
    std::byte* to = codes_ + part * kGgufPart * kBlockColumns + c * 4;
    const Words zero = broadcast_word(kType.levels == nullptr ? kType.zero * 0x01010101 : 0);
    const std::byte* words = place.words + c * kType.bits * 4;
    read_gguf<GgufCodes<kFormat, false>, 0, 4>(words, [&](auto eight, Words low, Words high) {
      std::byte* at = to + eight.value * 2 * kLine;
      store_words(at, _mm512_sub_epi8(low, zero));
      store_words(at + kLine, _mm512_sub_epi8(high, zero));
    });
    Scales& scales = scales_of(k);
    for (int32_t g = 0; g < kPartGroups; ++g) {
      const GgufPlace<kFormat> own(products_.block, group + g);
      store(scales.scale[part * kPartGroups + g] + c, own.scale(c));
      if constexpr (kType.has_mins()) store(scales.min[part * kPartGroups + g] + c, own.min(c));
    }
  }

  void multiply_item(int32_t item, Exact& exact) const {
    for (int32_t g = 0; g < kAtOnce; ++g) {
      const int32_t inputs = (first_group(item) + g) * kType.group;
      const std::byte* rows = rows_ + first_row(item) * kDepth + inputs;
      const std::byte* words = codes_ + inputs * kBlockColumns;
      int32_t* to = exact[g];
      stored(rows);
      stored(words);
      zero_tiles();
      _tile_loadd(4, rows, kDepth);
      _tile_loadd(6, words, kLine);
      _tile_loadd(7, words + kRegisterBytes, kLine);
      add_products_of_one_row<true, false>();
      _tile_loadd(6, words + 2 * kRegisterBytes, kLine);
      _tile_loadd(7, words + 3 * kRegisterBytes, kLine);
      add_products_of_one_row<true, true>();
      _tile_stored(0, to, kRegisterBytes);
      _tile_stored(1, to + kTileWords, kRegisterBytes);
      _tile_stored(2, to + 2 * kTileWords, kRegisterBytes);
      _tile_stored(3, to + 3 * kTileWords, kRegisterBytes);
    }
  }

  // Adds an item's sums as integer_tile does, one group after the other.
  template <int32_t kCount>
  void add(int32_t k, int32_t item, const Exact& exact) {
    const int32_t first = first_row(item);
    const int32_t left = products_.rows.count - first;
    const int32_t rows = left < kRegisterRows ? left : kRegisterRows;
    Floats scale[kCount][kVectors], min[kCount][kVectors];
    const Scales& scales = scales_of(k);
    for (int32_t g = 0; g < kCount; ++g) {
      for (int v = 0; v < kVectors; ++v) {
        const int32_t of_step = first_group(item) + g;
        scale[g][v] = load(scales.scale[of_step] + v * kLanes);
        if constexpr (kType.has_mins()) min[g][v] = load(scales.min[of_step] + v * kLanes);
      }
    }
    const int32_t group = k / kType.group + first_group(item);
    const RowScales& row_scales = row_scales_of(group);
    // Prefetches what the step after the next expands.
    constexpr int64_t kBytes = kType.stretch_bytes() * kDepth / kType.depth;
    const int64_t lines = kBytes / kLineBytes / items_ + 1;
    const int64_t lines_of_row = lines / rows + 1;
    const std::byte* ahead = GgufPlace<kFormat>(products_.block, k / kType.group).steps +
                             2 * kBytes + item * lines * kLineBytes;
    for (int32_t r = 0; r < rows; ++r) {
      for (int64_t i = 0; i < lines_of_row; ++i, ahead += kLineBytes) {
        __builtin_prefetch(ahead, 0, 2);  // the first-level cache has no room
      }
      float* sums = products_.sums + (first + r) * kBlockColumns;
      Floats sum[kVectors];
      for (int v = 0; v < kVectors; ++v) sum[v] = load(sums + v * kLanes);
      for (int32_t g = 0; g < kCount; ++g) {
        const int32_t place = group % kScaleGroups + g;
        const Floats row_scale = broadcast(row_scales.scale[first + r][place]);
        for (int v = 0; v < kVectors; ++v) {
          const Words own = load_words(exact[g] + v * kTileWords + r * kLanes);
          sum[v] = multiply_add(words_to_floats(own), row_scale * scale[g][v], sum[v]);
        }
        if constexpr (kType.has_mins()) {
          const Floats minus = broadcast(row_scales.minus[first + r][place]);
          for (int v = 0; v < kVectors; ++v) sum[v] = multiply_add(minus, min[g][v], sum[v]);
        }
      }
      for (int v = 0; v < kVectors; ++v) store(sums + v * kLanes, sum[v]);
    }
  }

  const BlockProducts& products_;
  int32_t items_;  // of a step
  const std::byte* source_[kTileRows];
  alignas(64) std::byte rows_[kTileRows * kDepth];
  alignas(64) std::byte codes_[kDepth * kBlockColumns];
  Scales scales_[2];
  RowScales row_scales_[2];
  alignas(64) Exact exact_[2];
};

template <Format kFormat>
inline void tile_gguf(const BlockProducts& products) {
  clear_sums(products);
  GgufTiles<kFormat>(products).multiply();
}

}  // namespace
}  // namespace torch_mesh
