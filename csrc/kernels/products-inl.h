// Multiplies rows with one block, by the same algorithm on every target. A target's simd header
// says how much it sums in registers. Its translation unit defines a Dot for each format:
//
//   Sum      its accumulator, one per column: Floats for bf16, Sums for the integers
//   Weights  one word of kLanes columns, expanded into operands
//   Row      the activations that meet this word, broadcast to all columns
//   kRowWords  how many 32-bit words of activations that is
//   kColumnBytes  bytes of a column's word, if not 4
//   add(sum, row, weights)
//   kVectorsAtOnce  vectors of columns that weights(words, Weights (&)[]) expands together, where
//                   that is cheaper than one; Expanding::put_in_order restores their order
//   zeros(scales)   the operand of a weight of zero, per column (integers)
//   start(zeros, row_sum)   a sum's first value: minus what the zeros will add
//   kWordsAtOnce  words of a column that weights() takes; the second is behind all columns' first
//   kPrefetchBytes, kReadsPairs, kPrefetchesLines, kPrefetchesStreams  how it prefetches, if it
//   does
//                   (Prefetching, PrefetchingFar, PrefetchingLines, PrefetchingStreams)
#pragma once

#include <type_traits>

#include "kernels/dots-inl.h"
#include "kernels/kernel_table.h"
#include "kernels/rounding-inl.h"

namespace torch_mesh {
namespace {

template <int kValue>
struct Constant {
  static constexpr int value = kValue;
  constexpr operator int() const { return kValue; }
};

constexpr int32_t kLineBytes = 64;  // of a cache line

constexpr int32_t vectors_at_once(const TileShape& tile, int32_t rows) {
  const int32_t all = kBlockColumns / kLanes;
  const int32_t room = rows == 1 ? tile.single_row_vectors : tile.vectors;
  return all < room ? all : room;
}

template <typename Dot>
constexpr int32_t column_bytes() {
  if constexpr (requires { Dot::kColumnBytes; }) {
    return Dot::kColumnBytes;
  } else {
    return 4;
  }
}

// Words of a column that weights() takes; the second one is behind the first ones of all columns.
template <typename Dot>
constexpr int32_t words_at_once() {
  if constexpr (requires { Dot::kWordsAtOnce; }) {
    return Dot::kWordsAtOnce;
  } else {
    return 1;
  }
}

template <typename Dot>
constexpr int vectors_expanded() {
  if constexpr (requires { Dot::kVectorsAtOnce; }) {
    return Dot::kVectorsAtOnce;
  } else {
    return 1;
  }
}

template <typename Dot>
inline void expand_weights(const std::byte* words,
                           typename Dot::Weights (&weights)[vectors_expanded<Dot>()]) {
  if constexpr (vectors_expanded<Dot>() == 1) {
    weights[0] = Dot::weights(words);
  } else {
    Dot::weights(words, weights);
  }
}

// Whether a Dot prefetches kPrefetchBytes ahead of words that it multiplies or expands.
template <typename Dot>
constexpr bool prefetches_words() {
  return requires { Dot::kPrefetchBytes; };
}

template <typename Dot>
inline void prefetch_ahead(const std::byte* words) {
  if constexpr (prefetches_words<Dot>()) __builtin_prefetch(words + Dot::kPrefetchBytes);
}

template <typename Dot>
constexpr bool prefetches_lines() {
  return requires { Dot::kPrefetchesLines; };
}

// The fewest rows for which a Dot with kPrefetchesLines prefetches by lines, and no longer by
// words.
template <typename Dot>
constexpr int32_t min_rows_for_lines() {
  return prefetches_words<Dot>() ? 12 : 8;
}

// The bytes that tiles prefetch while they go over other weights: `bytes` from `from` on. Each tile
// prefetches the share of its rows, two lines at a step of its products. (With two tiles that is a
// line less than the share, if scales precede the words.)
struct LinesAhead {
  struct Share {
    const std::byte *next, *end;

    void ask() {
      if (next >= end) return;
      __builtin_prefetch(next);
      __builtin_prefetch(next + kLineBytes);
      next += 2 * kLineBytes;
    }
  };
  const std::byte* from;
  int64_t bytes;

  Share share(int32_t first, int32_t rows, int32_t of) const {
    return {from + bytes * first / of, from + bytes * (first + rows) / of};
  }
};

// Prefetches the next block while one row is multiplied with a block. The next block is divided
// into several streams, which are prefetched one line of each in turn. The prefetchers of AMD's
// cores with AVX2 have more reads in flight then (docs/decisions/0012). A large block has parts
// that the second-level cache holds; each is prefetched while the part before it is multiplied.
template <int kStreams>
class StreamsAhead {
 public:
  explicit StreamsAhead(const BlockProducts& products) {
    const int64_t bytes = products.shape.block_bytes;
    const int64_t parts = bytes / kMaxPartBytes + 1;
    stream_bytes_ = round_up((bytes + parts * kStreams - 1) / (parts * kStreams), kLineBytes);
    if ((stream_bytes_ + kSkewBytes / 2) % kWayBytes < kSkewBytes) stream_bytes_ += kSkewBytes;
    next_ = products.block + kStreams * stream_bytes_;
    end_ = next_ + stream_bytes_;
  }

  // Call it once for each kStreams lines that are read.
  void ask() {
    for (int i = 0; i < kStreams; ++i) __builtin_prefetch(next_ + i * stream_bytes_);
    next_ += kLineBytes;
    if (next_ == end_) {
      next_ += (kStreams - 1) * stream_bytes_;
      end_ = next_ + stream_bytes_;
    }
  }

 private:
  static constexpr int64_t kMaxPartBytes = 128 << 10;
  // Streams whose distance is near a multiple of kWayBytes share sets of the first-level cache.
  // These are moved apart, with up to 1 KiB between them that only their own prefetchers read.
  static constexpr int64_t kWayBytes = 4096;
  static constexpr int64_t kSkewBytes = 1024;

  const std::byte *next_, *end_;
  int64_t stream_bytes_;
};

template <typename Dot>
constexpr bool prefetches_streams() {
  constexpr bool kDoes = requires { Dot::kPrefetchesStreams; };
  static_assert(!kDoes || vectors_at_once(kTile, 1) * kLanes == kBlockColumns,
                "one row has to go over the words once");
  return kDoes;
}

// Whether a Dot with kPrefetchesStreams does. Smaller blocks are soon read.
inline bool reads_streams(const BlockProducts& products) {
  return products.rows.count == 1 && products.shape.block_bytes >= 16 << 10;
}

struct NothingAhead {
  struct Share {
    void ask() {}
  };
  const std::byte* from;
  int64_t bytes;

  Share share(int32_t, int32_t, int32_t) const { return {}; }
};

template <typename Dot, int kRows, int kVectors, typename Share>
inline void add_words_of_block(const std::byte* words, int32_t count, const std::byte* const* rows,
                               Share& ahead, typename Dot::Sum (&sums)[kRows][kVectors]) {
  constexpr int kAtOnce = vectors_expanded<Dot>();
  static_assert(kVectors % kAtOnce == 0);
  for (int32_t j = 0; j < count; ++j) {
    typename Dot::Row row[kRows];
    for (int r = 0; r < kRows; ++r) row[r] = Dot::row(rows[r] + j * Dot::kRowWords * 4);
    ahead.ask();
    // All sums are in registers only if the loops over them are unrolled, which GCC does by itself
    // up to some number of instructions.
#pragma GCC unroll 8
    for (int v = 0; v < kVectors; v += kAtOnce) {
      const int32_t column = j * words_at_once<Dot>() * kBlockColumns + v * kLanes;
      const std::byte* at = words + column * column_bytes<Dot>();
      if (v * kLanes * column_bytes<Dot>() % kLineBytes == 0) prefetch_ahead<Dot>(at);
      typename Dot::Weights weights[kAtOnce];
      expand_weights<Dot>(at, weights);
#pragma GCC unroll 2
      for (int i = 0; i < kAtOnce; ++i) {
#pragma GCC unroll 8
        for (int r = 0; r < kRows; ++r) {
          sums[r][v + i] = Dot::add(sums[r][v + i], row[r], weights[i]);
        }
      }
    }
  }
}

// A Dot with kReadsPairs multiplies one row with two blocks at once: two streams keep more reads in
// flight, and sums wait less for one another (docs/decisions/0012).
template <typename Dot>
concept ReadsPairs = requires {
  Dot::kReadsPairs;
};

constexpr bool kSumsPairs = kTile.single_row_blocks == 2;
static_assert(!kSumsPairs || kTile.single_row_vectors * kLanes == kBlockColumns);
// If only one block's sums fit into registers, blocks take turns of so many words.
constexpr int32_t kTurnWords = 8;

// Multiplies one row with the words of two blocks, one of each in turn.
template <typename Dot, int kVectors>
inline void add_words_of_pair(const std::byte* const (&words)[2], int32_t count,
                              const std::byte* row, typename Dot::Sum (&sums)[2][kVectors]) {
  constexpr int kAtOnce = vectors_expanded<Dot>();
  for (int32_t j = 0; j < count; ++j) {
    const typename Dot::Row values = Dot::row(row + j * Dot::kRowWords * 4);
#pragma GCC unroll 2
    for (int b = 0; b < 2; ++b) {
#pragma GCC unroll 8
      for (int v = 0; v < kVectors; v += kAtOnce) {
        const std::byte* at =
            words[b] + (int64_t{j} * kBlockColumns + v * kLanes) * column_bytes<Dot>();
        if (v * kLanes * column_bytes<Dot>() % kLineBytes == 0) {
          prefetch_ahead<HalfAsFar<Dot>>(at);
        }
        typename Dot::Weights weights[kAtOnce];
        expand_weights<Dot>(at, weights);
        for (int i = 0; i < kAtOnce; ++i) {
          sums[b][v + i] = Dot::add(sums[b][v + i], values, weights[i]);
        }
      }
    }
  }
}

// One group of each row's activations: with its sum or, if weights have mins, their factor.
struct GroupRows {
  const std::byte* bytes[kTileRows];
  float scale[kTileRows];
  union {
    int32_t sum[kTileRows];
    float min_factor[kTileRows];
  };
};

inline const std::byte* operand_row(const BlockProducts& products, int32_t r) {
  const OperandRows& rows = products.rows;
  const int64_t index = rows.index == nullptr ? r : rows.index[r];
  return rows.data + index * products.shape.row_bytes;
}

// `unit` is a factor of this block's sums besides its scales.
inline GroupRows group_rows(const BlockProducts& products, int32_t group, float unit) {
  GroupRows rows;
  const OperandShape& shape = products.shape;
  const int32_t groups = shape.depth_padded / shape.group_size;
  for (int32_t r = 0; r < products.rows.count; ++r) {
    const std::byte* row = operand_row(products, r);
    rows.bytes[r] = row + group * shape.group_size;
    const std::byte* scale = row + shape.depth_padded + group * 4;
    __builtin_memcpy(&rows.scale[r], scale, 4);
    rows.scale[r] *= unit;
    __builtin_memcpy(&rows.sum[r], scale + groups * 4, 4);
  }
  return rows;
}

template <typename Scales>
constexpr int32_t header_bytes() {
  if constexpr (requires { Scales::kHeaderBytes; }) {
    return Scales::kHeaderBytes;
  } else {
    return 0;
  }
}

// The factor of all scales: kUnit, times the header's factor over its divisor, which are 1 if
// unused.
template <typename Scales>
inline float block_unit(const BlockProducts& products) {
  if constexpr (header_bytes<Scales>() > 0) {
    float factor[2];
    __builtin_memcpy(factor, products.block, sizeof(factor));
    return Scales::kUnit * (factor[0] / factor[1]);
  } else {
    return Scales::kUnit;
  }
}

// The parts of one group of an integer block.
template <typename Dot, typename Scales>
struct IntegerGroup {
  static constexpr int32_t kWeightsPerWord = Dot::kRowWords * 4;
  static constexpr bool kHasMins = false;

  const std::byte* scales;
  const std::byte* words;
  int32_t count;  // of words per column

  IntegerGroup(const BlockProducts& products, int32_t group) {
    const int32_t size = products.shape.group_size;
    count = size / kWeightsPerWord;
    scales = products.block + header_bytes<Scales>() +
             static_cast<int64_t>(group) * kBlockColumns * (Scales::kBytes + count * 4);
    words = scales + kBlockColumns * Scales::kBytes;
  }

  const std::byte* scales_of(int32_t column) const { return scales + column * Scales::kBytes; }
  Floats scale(int32_t column) const { return Scales::load(scales_of(column)); }
  int64_t total_bytes() const { return int64_t{kBlockColumns} * (Scales::kBytes + count * 4); }
};

// The same with its words expanded to bytes, once for all rows: [2 * count][kBlockColumns]. A Dot
// of the expanded bytes (OfBytes) multiplies these.
template <typename Dot, typename Scales>
struct ExpandedGroup : IntegerGroup<Dot, Scales> {
  alignas(64) std::byte bytes[kMaxGroup * kBlockColumns];

  ExpandedGroup(const BlockProducts& products, int32_t group)
      : IntegerGroup<Dot, Scales>(products, group) {
    for (int32_t j = 0; j < this->count; ++j) {
      std::byte* to = bytes + j * kBlockColumns * 8;
      for (int32_t c = 0; c < kBlockColumns; c += kLanes) {
        const std::byte* at = this->words + (j * kBlockColumns + c) * 4;
        if (c * 4 % kLineBytes == 0) prefetch_ahead<Dot>(at);
        const auto weights = Dot::weights(at);
        store_words(to + c * 4, weights.low);
        store_words(to + (kBlockColumns + c) * 4, weights.high);
      }
    }
    this->words = bytes;
  }
  ExpandedGroup(const ExpandedGroup&) = delete;
  ExpandedGroup& operator=(const ExpandedGroup&) = delete;
};

inline Floats plus_scaled(Floats sums, Sums exact, float row_scale, Floats scale) {
  return multiply_add(words_to_floats(words_of(exact)), broadcast(row_scale) * scale, sums);
}

inline void add_scaled(float* sums, Sums exact, float row_scale, Floats scale) {
  store(sums, plus_scaled(load(sums), exact, row_scale, scale));
}

// Adds the products of a Dot in 16 bits.
template <typename Dot>
struct NarrowSums : Dot {
  using Sum = Shorts;
  static Sum add(Sum sum, const typename Dot::Row& row, const typename Dot::Weights& weights) {
    return add_int16(sum, Dot::narrow(row, weights));
  }
};

// Whether a Dot's products of `eights` times eight inputs fit into 16 bits.
template <typename Dot>
constexpr bool narrow_sums_fit(int32_t eights) {
  if constexpr (requires { Dot::kNarrowEights; }) {
    return eights <= Dot::kNarrowEights;
  } else {
    return false;
  }
}

// kNarrow: the products of a group are summed in 16 bits.
template <int kRows, typename Dot, bool kNarrow, typename Group, typename Share>
inline void integer_tile(const Group& group, const GroupRows& rows, int32_t first, Share&& ahead,
                         float* sums) {
  constexpr int kVectors = vectors_at_once(kTile, kRows);
  constexpr bool kMins = Group::kHasMins;  // zeros are 0 then
  using Adds = std::conditional_t<kNarrow, NarrowSums<Dot>, Dot>;
  const auto start = [&](int r, int32_t column) {
    if constexpr (kMins) {
      return as_sums(broadcast_word(0));
    } else {
      return Dot::start(Dot::zeros(group.scales_of(column)), rows.sum[first + r]);
    }
  };
  for (int32_t c = 0; c < kBlockColumns; c += kVectors * kLanes) {
    typename Adds::Sum exact[kRows][kVectors];
    for (int v = 0; v < kVectors; ++v) {
      for (int r = 0; r < kRows; ++r) {
        if constexpr (kNarrow) {
          exact[r][v] = as_shorts(broadcast_word(0));
        } else {
          exact[r][v] = start(r, c + v * kLanes);
        }
      }
    }
    add_words_of_block<Adds>(group.words + c * 4, group.count, rows.bytes + first, ahead, exact);
    Floats min_factors[kRows];
    if constexpr (kMins) {
      for (int r = 0; r < kRows; ++r) min_factors[r] = broadcast(rows.min_factor[first + r]);
    }
    for (int v = 0; v < kVectors; ++v) {
      const int32_t column = c + v * kLanes;
      const Floats scale = group.scale(column);
      Floats min;
      if constexpr (kMins) min = group.min(column);
      for (int r = 0; r < kRows; ++r) {
        float* to = sums + (first + r) * kBlockColumns + column;
        Sums whole;
        if constexpr (kNarrow) {
          whole = Dot::widen(start(r, column), exact[r][v]);
        } else {
          whole = exact[r][v];
        }
        Floats total = plus_scaled(load(to), whole, rows.scale[first + r], scale);
        if constexpr (kMins) total = multiply_add(min_factors[r], min, total);
        store(to, total);
      }
    }
  }
}

// Runs tile(rows at once, first row) over all rows, as many at once as the registers hold.
template <int kMax, typename Tile>
inline void for_each_tile(int32_t rows, const Tile& tile, int32_t first = 0) {
  for (; first + kMax <= rows; first += kMax) tile(Constant<kMax>{}, first);
  if constexpr (kMax > 1) {
    if (first < rows) for_each_tile<kMax - 1>(rows, tile, first);
  }
}

template <typename Dot, typename Scales, bool kNarrow, typename Group, typename Ahead>
inline void products_of_groups(const BlockProducts& products) {
  const int32_t groups = products.shape.depth_padded / products.shape.group_size;
  const float unit = block_unit<Scales>(products);
  for (int32_t g = 0; g < groups; ++g) {
    const Group group(products, g);
    const GroupRows rows = group_rows(products, g, unit);
    const int32_t count = products.rows.count;
    const Ahead ahead{group.scales + group.total_bytes(), group.total_bytes()};
    for_each_tile<kTile.rows>(count, [&](auto at_once, int32_t first) {
      integer_tile<at_once.value, Dot, kNarrow>(
          group, rows, first, ahead.share(first, at_once.value, count), products.sums);
    });
  }
}

template <typename Dot, typename Scales, typename Group, typename Ahead = NothingAhead>
inline void integer_products(const BlockProducts& products) {
  constexpr int32_t kMinGroup = 16;
  if constexpr (narrow_sums_fit<Dot>(kMinGroup / 8)) {
    if (narrow_sums_fit<Dot>(products.shape.group_size / 8)) {
      return products_of_groups<Dot, Scales, true, Group, Ahead>(products);
    }
  }
  products_of_groups<Dot, Scales, false, Group, Ahead>(products);
}

// Multiplies one row.
template <typename Dot, typename Scales>
inline void integer_row(const BlockProducts& products) {
  constexpr int kStreams = kBlockColumns * 4 / kLineBytes;
  constexpr int32_t kGroupsPerAsk = kStreams * kLineBytes / (kBlockColumns * Scales::kBytes);
  const int32_t groups = products.shape.depth_padded / products.shape.group_size;
  const float unit = block_unit<Scales>(products);
  StreamsAhead<kStreams> ahead(products);
  for (int32_t g = 0; g < groups; ++g) {
    const IntegerGroup<Dot, Scales> group(products, g);
    if (g % kGroupsPerAsk == 0) ahead.ask();  // for scales
    integer_tile<1, Dot, false>(group, group_rows(products, g, unit), 0, ahead, products.sums);
  }
}

// Multiplies one row with one group of both blocks; rows[b] is in the units of block b.
template <typename Dot, typename Group>
inline void integer_pair_tile(const Group (&groups)[2], const GroupRows (&rows)[2],
                              float* const (&sums)[2]) {
  constexpr int kVectors = vectors_at_once(kTile, 1);
  Sums exact[2][kVectors];
  for (int b = 0; b < 2; ++b) {
    for (int v = 0; v < kVectors; ++v) {
      const Words zeros = Dot::zeros(groups[b].scales_of(v * kLanes));
      exact[b][v] = Dot::start(zeros, rows[b].sum[0]);
    }
  }
  const std::byte* words[2] = {groups[0].words, groups[1].words};
  add_words_of_pair<Dot>(words, groups[0].count, rows[0].bytes[0], exact);
  for (int b = 0; b < 2; ++b) {
    for (int v = 0; v < kVectors; ++v) {
      const int32_t column = v * kLanes;
      add_scaled(sums[b] + column, exact[b][v], rows[b].scale[0], groups[b].scale(column));
    }
  }
}

template <typename Dot, typename Scales>
inline void integer_pair(const BlockProducts& first, const BlockProducts& second) {
  using Group = IntegerGroup<Dot, Scales>;
  const int32_t count = first.shape.depth_padded / first.shape.group_size;
  const float units[2] = {block_unit<Scales>(first), block_unit<Scales>(second)};
  for (int32_t g = 0; g < count; ++g) {
    const Group groups[2] = {{first, g}, {second, g}};
    const GroupRows rows[2] = {group_rows(first, g, units[0]), group_rows(second, g, units[1])};
    if constexpr (kSumsPairs) {
      integer_pair_tile<Dot>(groups, rows, {first.sums, second.sums});
    } else {
      integer_tile<1, Dot, false>(groups[0], rows[0], 0, NothingAhead::Share{}, first.sums);
      integer_tile<1, Dot, false>(groups[1], rows[1], 0, NothingAhead::Share{}, second.sums);
    }
  }
}

// Products of floats take steps of 32 words. In bf16 these are 8 KiB of the block: they stay in L1
// while the tiles go over them.
constexpr int32_t kStepWords = 32;
constexpr int32_t kStepDepth = 2 * kStepWords;

// bf16 has no groups: a step continues the sums of the one before.
struct Unscaled {
  struct Scales {};
  static Floats begin(const float* sums) { return load(sums); }
  static Scales scales_of(int32_t) { return {}; }
  static void end(float* sums, Floats tile, Scales) { store(sums, tile); }
};

// A step of fp8 with its scales, whose sums are in units of `unit`.
struct Fp8Step {
  const std::byte* scales;
  int32_t group_size;
  float unit;

  Fp8Step(const std::byte* block, int32_t group_size, int32_t depth, float unit)
      : group_size(group_size), unit(unit) {
    const int64_t group = group_size == 0 ? 0 : depth / group_size;
    scales = block + group * (group_size == 32 ? kBlockColumns : 4);
  }

  using Scales = Floats;
  Scales scales_of(int32_t column) const {
    if (group_size == 0) return load(reinterpret_cast<const float*>(scales) + column);
    if (group_size == 32) return as_floats(shift_left<23>(load_bytes(scales + column)));
    float scale;
    __builtin_memcpy(&scale, scales, sizeof(scale));
    return broadcast(scale);
  }

  static Floats begin(const float*) { return broadcast(0.0f); }
  void end(float* sums, Floats tile, Scales scale) const {
    store(sums, multiply_add(tile * broadcast(unit), scale, load(sums)));
  }
};

constexpr int32_t fp8_step_depth(int32_t group_size) {
  return group_size == 32 ? group_size : kStepDepth;
}

inline const std::byte* fp8_pairs(const BlockProducts& products) {
  const OperandShape& shape = products.shape;
  return products.block + block_header_bytes(shape.format, shape.group_size, shape.depth_padded);
}

template <typename Dot, int kRows, typename Step, typename Share>
inline void float_tile(const std::byte* words, int32_t count, const Step& step,
                       const std::byte* const* rows, Share&& ahead, float* sums) {
  constexpr int kVectors = vectors_at_once(kTile, kRows);
  for (int32_t c = 0; c < kBlockColumns; c += kVectors * kLanes) {
    Floats tile[kRows][kVectors];
    for (int r = 0; r < kRows; ++r) {
      for (int v = 0; v < kVectors; ++v) {
        tile[r][v] = step.begin(sums + r * kBlockColumns + c + v * kLanes);
      }
    }
    add_words_of_block<Dot>(words + c * column_bytes<Dot>(), count, rows, ahead, tile);
    if constexpr (vectors_expanded<Dot>() == 2) {
      for (int r = 0; r < kRows; ++r) {
        for (int v = 0; v < kVectors; v += 2) {
          Dot::Expanding::put_in_order(tile[r][v], tile[r][v + 1]);
        }
      }
    }
    for (int v = 0; v < kVectors; ++v) {
      const int32_t column = c + v * kLanes;
      const auto scales = step.scales_of(column);
      for (int r = 0; r < kRows; ++r) {
        step.end(sums + r * kBlockColumns + column, tile[r][v], scales);
      }
    }
  }
}

// `words` is an integer, or a Constant for which the compiler makes a function of its own.
template <typename Dot, typename Count, typename Step, typename Ahead>
inline void float_step(const BlockProducts& products, int32_t depth, Count words,
                       const std::byte* at, const Step& step, const Ahead& ahead) {
  const std::byte* rows[kTileRows];
  for (int32_t r = 0; r < products.rows.count; ++r) {
    rows[r] = operand_row(products, r) + int64_t{depth} * 2;
  }
  const int32_t count = products.rows.count;
  for_each_tile<kTile.rows>(count, [&](auto at_once, int32_t first) {
    float_tile<Dot, at_once.value>(at, words, step, rows + first,
                                   ahead.share(first, at_once.value, count),
                                   products.sums + first * kBlockColumns);
  });
}

template <typename Dot, typename Ahead = NothingAhead>
inline void bf16_products(const BlockProducts& products) {
  for (int32_t depth = 0; depth < products.shape.depth_padded; depth += kStepDepth) {
    constexpr int64_t kBytes = kStepDepth * kBlockColumns * 2;
    const std::byte* words = products.block + int64_t{depth} * kBlockColumns * 2;
    float_step<Dot>(products, depth, Constant<kStepWords>{}, words, Unscaled{},
                    Ahead{words + kBytes, kBytes});
  }
}

template <typename Dot>
inline void bf16_row(const BlockProducts& products) {
  StreamsAhead<kBlockColumns * 4 / kLineBytes> ahead(products);
  const std::byte* row = operand_row(products, 0);
  float_tile<Dot, 1>(products.block, products.shape.depth_padded / 2, Unscaled{}, &row, ahead,
                     products.sums);
}

template <typename Dot>
inline void bf16_pair(const BlockProducts& first, const BlockProducts& second) {
  const std::byte* row = operand_row(first, 0);
  const int32_t words = first.shape.depth_padded / 2;
  if constexpr (kSumsPairs) {
    constexpr int kVectors = vectors_at_once(kTile, 1);
    Floats sums[2][kVectors];
    for (int v = 0; v < kVectors; ++v) sums[0][v] = sums[1][v] = broadcast(0.0f);
    const std::byte* blocks[2] = {first.block, second.block};
    add_words_of_pair<Dot>(blocks, words, row, sums);
    for (int v = 0; v < kVectors; ++v) {
      store(first.sums + v * kLanes, sums[0][v]);
      store(second.sums + v * kLanes, sums[1][v]);
    }
  } else {
    for (int32_t word = 0; word < words; word += kTurnWords) {
      const std::byte* values = row + word * 4;
      for (const BlockProducts* products : {&first, &second}) {
        float_tile<Dot, 1>(products->block + int64_t{word} * kBlockColumns * 4, kTurnWords,
                           Unscaled{}, &values, NothingAhead::Share{}, products->sums);
      }
    }
  }
}

template <typename Dot>
inline void fp8_products(const BlockProducts& products) {
  const std::byte* pairs = fp8_pairs(products);
  const int32_t deep = fp8_step_depth(products.shape.group_size);
  const uint32_t before = Dot::Expanding::count_subnormals();
  for (int32_t depth = 0; depth < products.shape.depth_padded; depth += deep) {
    float_step<Dot>(products, depth, deep / 2, pairs + int64_t{depth} * kBlockColumns,
                    Fp8Step(products.block, products.shape.group_size, depth, Dot::kUnit),
                    NothingAhead{});
  }
  Dot::Expanding::restore_subnormals(before);
}

template <typename Dot>
inline void fp8_row(const BlockProducts& products) {
  const std::byte* pairs = fp8_pairs(products);
  const int32_t deep = fp8_step_depth(products.shape.group_size);
  StreamsAhead<kBlockColumns * 2 / kLineBytes> ahead(products);
  const uint32_t before = Dot::Expanding::count_subnormals();
  for (int32_t depth = 0; depth < products.shape.depth_padded; depth += deep) {
    const std::byte* row = operand_row(products, 0) + int64_t{depth} * 2;
    float_tile<Dot, 1>(pairs + int64_t{depth} * kBlockColumns, deep / 2,
                       Fp8Step(products.block, products.shape.group_size, depth, Dot::kUnit), &row,
                       ahead, products.sums);
  }
  Dot::Expanding::restore_subnormals(before);
}

template <typename Dot>
inline void fp8_pair(const BlockProducts& first, const BlockProducts& second) {
  constexpr int kVectors = vectors_at_once(kTile, 1);
  const OperandShape& shape = first.shape;
  const std::byte* row = operand_row(first, 0);
  const std::byte* pairs[2] = {fp8_pairs(first), fp8_pairs(second)};
  const int32_t deep = fp8_step_depth(shape.group_size);
  const uint32_t before = Dot::Expanding::count_subnormals();
  for (int32_t depth = 0; depth < shape.depth_padded; depth += deep) {
    Floats tile[2][kVectors];
    for (int v = 0; v < kVectors; ++v) tile[0][v] = tile[1][v] = broadcast(0.0f);
    add_words_of_pair<Dot>(pairs, deep / 2, row + int64_t{depth} * 2, tile);
    for (int b = 0; b < 2; ++b) {
      const BlockProducts& products = b == 0 ? first : second;
      const Fp8Step step(products.block, shape.group_size, depth, Dot::kUnit);
      for (int v = 0; v < kVectors; v += 2) {
        Dot::Expanding::put_in_order(tile[b][v], tile[b][v + 1]);
      }
      for (int v = 0; v < kVectors; ++v) {
        step.end(products.sums + v * kLanes, tile[b][v], step.scales_of(v * kLanes));
      }
      pairs[b] += int64_t{deep} * kBlockColumns;
    }
  }
  Dot::Expanding::restore_subnormals(before);
}

}  // namespace
}  // namespace torch_mesh
