// Assembles a target's kernels. A target's translation unit includes its simd header, defines its
// Dots and register constants, includes this file and calls make_table<Target>(name). A new format
// needs a FormatTrait.
#pragma once

#include <type_traits>
#include <utility>

#include "kernels/activations-inl.h"
#include "kernels/attention-inl.h"
#include "kernels/bf12_products-inl.h"
#include "kernels/exact_products-inl.h"
#include "kernels/gguf_products-inl.h"
#include "kernels/kernel_table.h"
#include "kernels/low_rank-inl.h"
#include "kernels/operands-inl.h"
#include "kernels/pack_bf12-inl.h"
#include "kernels/pack_group-inl.h"
#include "kernels/pack_lut4-inl.h"
#include "kernels/pack_trellis-inl.h"
#include "kernels/panel_products-inl.h"
#include "kernels/plain_products-inl.h"
#include "kernels/products-inl.h"
#include "kernels/quantize_group-inl.h"
#include "kernels/quantize_trellis-inl.h"

namespace torch_mesh {
namespace {

inline void clear_sums(const BlockProducts& products) {
  __builtin_memset(products.sums, 0,
                   sizeof(float) * kBlockColumns * static_cast<size_t>(products.rows.count));
}

template <typename Dot>
inline void block_products_bf16(const BlockProducts& products) {
  clear_sums(products);
  if constexpr (prefetches_streams<Dot>()) {
    if (reads_streams(products)) return bf16_row<Dot>(products);
  } else if constexpr (prefetches_lines<Dot>()) {
    if (products.rows.count >= min_rows_for_lines<Dot>()) {
      return bf16_products<typename WithoutPrefetching<Dot>::Type, LinesAhead>(products);
    }
  }
  bf16_products<Dot>(products);
}

template <typename Dot>
inline void block_products_bf12(const BlockProducts& products) {
  if constexpr (prefetches_streams<Dot>()) {
    constexpr int kStreams = kBf12RowBytes / kLineBytes;
    if (reads_streams(products)) {
      return bf12_row<Dot, Dot, 1>({&products}, StreamsAhead<kStreams>(products));
    }
  }
  if (products.rows.count == 1) return bf12_row<Dot, Dot, 1>({&products}, NothingAhead::Share{});
  clear_sums(products);
  bf12_products<Dot>(products);
}

template <void (*kPair)(const BlockProducts&, const BlockProducts&)>
inline void block_pair(const BlockProducts& first, const BlockProducts& second) {
  clear_sums(first);
  clear_sums(second);
  kPair(first, second);
}

template <typename Dot>
inline void block_pair_bf12(const BlockProducts& first, const BlockProducts& second) {
  bf12_row<Dot, HalfAsFar<Dot>, 2>({&first, &second}, NothingAhead::Share{});
}

template <typename Dot>
inline void block_products_fp8(const BlockProducts& products) {
  clear_sums(products);
  if constexpr (prefetches_streams<Dot>()) {
    if (reads_streams(products)) return fp8_row<Dot>(products);
  }
  fp8_products<Dot>(products);
}

template <void (*kPanels)(const BlockProducts&)>
inline void block_panels(const BlockProducts& products) {
  clear_sums(products);
  kPanels(products);
}

// Whether a Dot with kPrefetchesLines prefetches so many rows of int8 by lines. If it also
// prefetches words, only in groups whose next one is at least as far ahead as those words
// (docs/decisions/0012).
template <typename Dot>
inline bool int8_prefetches_lines(const BlockProducts& products) {
  if constexpr (prefetches_words<Dot>()) {
    if (products.shape.group_size * kBlockColumns < Dot::kPrefetchBytes) return false;
  }
  return products.rows.count >= min_rows_for_lines<Dot>();
}

template <typename Dot, typename Scales>
inline void block_products_int8(const BlockProducts& products) {
  clear_sums(products);
  using Group = IntegerGroup<Dot, Scales>;
  if constexpr (prefetches_streams<Dot>()) {
    if (reads_streams(products)) return integer_row<Dot, Scales>(products);
  } else if constexpr (prefetches_lines<Dot>()) {
    if (int8_prefetches_lines<Dot>(products)) {
      return integer_products<typename WithoutPrefetching<Dot>::Type, Scales, Group, LinesAhead>(
          products);
    }
  }
  integer_products<Dot, Scales, Group>(products);
}

// Levels is a Dot of the bytes that Dot expands nibbles to.
template <typename Dot, typename Levels, typename Scales>
inline void block_products_nibbles(const BlockProducts& products) {
  clear_sums(products);
  using Expanded = ExpandedGroup<Dot, Scales>;
  if constexpr (prefetches_streams<Dot>()) {
    if (reads_streams(products)) return integer_row<Dot, Scales>(products);
  }
  if (products.rows.count >= kExpandedRows) {
    using Ahead = std::conditional_t<prefetches_lines<Dot>(), LinesAhead, NothingAhead>;
    return integer_products<Levels, Scales, Expanded, Ahead>(products);
  }
  using Group = IntegerGroup<Dot, Scales>;
  if constexpr (prefetches_lines<Dot>() && !prefetches_words<Dot>()) {
    if (products.rows.count >= min_rows_for_lines<Dot>()) {
      return integer_products<Dot, Scales, Group, LinesAhead>(products);
    }
  }
  integer_products<Dot, Scales, Group>(products);
}

template <typename Levels, typename Code>
inline void block_products_trellis(const BlockProducts& products) {
  clear_sums(products);
  using Group = TrellisGroup<Code>;
  if (products.rows.count == 1) return trellis_row<Levels, Code>(products);
  integer_products<Levels, Bf16Scales, Group>(products);
}

// Signed is a Dot of int8, Unsigned one of levels.
template <typename Signed, template <typename> typename Unsigned, Format kFormat>
using GgufDot = std::conditional_t<
    gguf_type(kFormat).has_unsigned_bytes(),
    Unsigned<UnsignedBytes<gguf_type(kFormat).zero_byte(), gguf_type(kFormat).max_byte()>>,
    OfSignedBytes<Signed>>;

template <typename Dot, Format kFormat, typename Prefetches>
inline void block_products_gguf(const BlockProducts& products) {
  clear_sums(products);
  using Group = GgufGroup<kFormat>;
  if constexpr (prefetches_streams<Prefetches>()) {
    if (reads_streams(products)) {
      return gguf_row<Dot, kFormat, 1, Prefetches>({&products},
                                                   StreamsAhead<kGgufStreams>(products));
    }
  }
  if (products.rows.count == 1) {
    return gguf_row<Dot, kFormat, 1, Prefetches>({&products}, NothingAhead::Share{});
  }
  integer_products<Dot, HalfScales, Group>(products);
}

template <typename Dot, Format kFormat, typename Prefetches>
inline void gguf_pair(const BlockProducts& first, const BlockProducts& second) {
  gguf_row<Dot, kFormat, 2, HalfAsFar<Prefetches>>({&first, &second}, NothingAhead::Share{});
}

// The fewest rows for a target's tiles, by kind of format, and for panels; `panels` of 0: none.
struct ManyRows {
  int32_t tile_floats = kNoRows, tile_int8 = kNoRows, tile_nibbles = kNoRows,
          tile_trellis = kNoRows;
  int32_t panels = 0;
  int32_t tile_fp8 = tile_floats;
};

using Product = void (*)(const BlockProducts&);

// The Tiles of a target without many-row products of its own.
struct NoTiles {
  static constexpr void (*begin)(const OperandShape&) = nullptr;
  static constexpr void (*end)() = nullptr;
  static constexpr Product bf16 = nullptr;
  static constexpr Product bf12 = nullptr;
  static constexpr Product fp8 = nullptr;
  template <typename Scales>
  static constexpr Product bytes = nullptr;
  template <typename Codes, typename Scales>
  static constexpr Product nibbles = nullptr;
  template <typename Code>
  static constexpr Product trellis = nullptr;
  template <Format kFormat>
  static constexpr Product gguf = nullptr;
};

// kernels<Target>() returns a format's kernels. A format without a trait, or whose trait lacks a
// kernel that every format needs, does not compile. A Target has
//   Bf16, Int8, Fp8   its Dots
//   Nibbles<Codes>    its Dot of nibbles, by their values (Codes)
//   Levels<Codes>     its Dot of the bytes that they are expanded to
//   Tiles             its products of many rows, see NoTiles
//   kRows             ManyRows
template <Format kFormat>
struct FormatTrait;

template <>
struct FormatTrait<Format::kBf16> {
  template <typename Target>
  static constexpr FormatKernels kernels() {
    constexpr ManyRows kRows = Target::kRows;
    using Dot = typename Target::Bf16;
    FormatKernels kernels{.tile_rows = kRows.tile_floats,
                          .products = block_products_bf16<Dot>,
                          .tiles = Target::Tiles::bf16,
                          .panels = kRows.panels > 0 ? block_panels<bf16_panels> : nullptr,
                          .dequantize = dequantize_bf16,
                          .pack_group = pack_bf16_group};
    if constexpr (ReadsPairs<Dot>) kernels.pair = block_pair<bf16_pair<Dot>>;
    return kernels;
  }
};

template <>
struct FormatTrait<Format::kBf12> {
  template <typename Target>
  static constexpr FormatKernels kernels() {
    FormatKernels kernels = FormatTrait<Format::kBf16>::kernels<Target>();
    using Dot = typename Target::Bf16;
    kernels.products = block_products_bf12<Dot>;
    kernels.tiles = Target::Tiles::bf12;
    if (kernels.panels != nullptr) kernels.panels = block_panels<bf12_panels>;
    // Blocks read in turns gain nothing here.
    kernels.pair = nullptr;
    if constexpr (ReadsPairs<Dot> && kSumsPairs) kernels.pair = block_pair_bf12<Dot>;
    kernels.dequantize = dequantize_bf12;
    return kernels;
  }
};

template <>
struct FormatTrait<Format::kFp8> {
  template <typename Target>
  static constexpr FormatKernels kernels() {
    using Dot = typename Target::Fp8;
    FormatKernels kernels{.tile_rows = Target::kRows.tile_fp8,
                          .products = block_products_fp8<Dot>,
                          .tiles = Target::Tiles::fp8,
                          .panels = Target::kRows.panels > 0 ? block_panels<fp8_panels> : nullptr,
                          .dequantize = dequantize_fp8};
    if constexpr (ReadsPairs<Dot> && kSumsPairs) kernels.pair = block_pair<fp8_pair<Dot>>;
    return kernels;
  }
};

template <typename Scales>
struct Int8Trait {
  template <typename Target>
  static constexpr FormatKernels kernels() {
    using Dot = typename Target::Int8;
    FormatKernels kernels{.tile_rows = Target::kRows.tile_int8,
                          .products = block_products_int8<Dot, Scales>,
                          .tiles = Target::Tiles::template bytes<Scales>,
                          .dequantize = dequantize_integers<SignedBytes, Scales>};
    if constexpr (ReadsPairs<Dot>) kernels.pair = block_pair<integer_pair<Dot, Scales>>;
    return kernels;
  }
};

template <typename Codes, typename Scales>
struct NibbleTrait {
  template <typename Target>
  static constexpr FormatKernels kernels() {
    using Dot = typename Target::template Nibbles<Codes>;
    using Levels = typename Target::template Levels<Codes>;
    FormatKernels kernels{.tile_rows = Target::kRows.tile_nibbles,
                          .products = block_products_nibbles<Dot, Levels, Scales>,
                          .tiles = Target::Tiles::template nibbles<Codes, Scales>,
                          .dequantize = dequantize_integers<BytesOfNibbles<Codes>, Scales>};
    if constexpr (ReadsPairs<Dot>) kernels.pair = block_pair<integer_pair<Dot, Scales>>;
    return kernels;
  }
};

// A format to which weights are rounded in groups: Kernels and its packing.
template <typename Kernels, typename Codes, void (*kPackGroup)(const float*, int32_t, std::byte*)>
struct RoundedTrait {
  template <typename Target>
  static constexpr FormatKernels kernels() {
    FormatKernels kernels = Kernels::template kernels<Target>();
    kernels.pack_group = kPackGroup;
    kernels.quantizer = quantizer_of<Codes>();
    return kernels;
  }
};

template <typename Code>
struct TrellisTrait {
  template <typename Target>
  static constexpr FormatKernels kernels() {
    using Levels = typename Target::template Levels<TrellisLevels>;
    return {.tile_rows = Target::kRows.tile_trellis,
            .products = block_products_trellis<Levels, Code>,
            .tiles = Target::Tiles::template trellis<Code>,
            .dequantize = dequantize_trellis<Code>,
            .pack_trellis = trellis_packing<Code>()};
  }
};

template <>
struct FormatTrait<Format::kInt8>
    : RoundedTrait<Int8Trait<Bf16Scales>, Int8Codes, pack_int8_group> {};
template <>
struct FormatTrait<Format::kInt4>
    : RoundedTrait<NibbleTrait<EvenNibbles, Bf16Scales>, Int4Codes, pack_int4_group> {};
template <>
struct FormatTrait<Format::kLut4>
    : RoundedTrait<NibbleTrait<Lut4Nibbles, Bf16Scales>, Lut4Codes, pack_lut4_group> {};
template <>
struct FormatTrait<Format::kInt8Fp16> : Int8Trait<HalfScales> {};
template <>
struct FormatTrait<Format::kInt4Fp16> : NibbleTrait<EvenNibbles, HalfScales> {};
template <>
struct FormatTrait<Format::kMxfp4> : NibbleTrait<Fp4Nibbles, E8m0Scales> {};
template <>
struct FormatTrait<Format::kNvfp4> : NibbleTrait<Fp4Nibbles, E4m3Scales> {};
template <>
struct FormatTrait<Format::kTcq2> : TrellisTrait<Tcq2> {};
template <>
struct FormatTrait<Format::kTcq3> : TrellisTrait<Tcq3> {};

template <Format kFormat>
requires(is_gguf(kFormat)) struct FormatTrait<kFormat> {
  template <typename Target>
  static constexpr FormatKernels kernels() {
    constexpr GgufType kType = gguf_type(kFormat);
    using Dot = GgufDot<typename Target::Int8, Target::template Levels, kFormat>;
    using Prefetches = typename Target::Int8;
    FormatKernels kernels{.tile_rows = Target::kRows.tile_nibbles,
                          .products = block_products_gguf<Dot, kFormat, Prefetches>,
                          .tiles = Target::Tiles::template gguf<kFormat>,
                          .dequantize = dequantize_gguf<kFormat>};
    if constexpr (ReadsPairs<Prefetches>) {
      kernels.pair = block_pair<gguf_pair<Dot, kFormat, Prefetches>>;
    }
    // Products of 16 inputs fill a quarter of a tile, so they pay from more rows on, unless there
    // are mins.
    if constexpr (kType.group == 16 && !kType.has_mins()) {
      kernels.tile_rows = Target::kRows.tile_int8;
    }
    return kernels;
  }
};

template <typename Target, Format kFormat>
constexpr FormatKernels kernels_of() {
  constexpr FormatKernels kKernels = FormatTrait<kFormat>::template kernels<Target>();
  static_assert(kKernels.tile_rows > 0 && kKernels.products != nullptr &&
                kKernels.dequantize != nullptr);
  static_assert(is_trellis(kFormat) == (kKernels.pack_trellis.pack != nullptr));
  static_assert((is_made_of_codes(kFormat) || is_trellis(kFormat)) ==
                (kKernels.pack_group == nullptr));
  return kKernels;
}

template <typename Target>
constexpr KernelTable make_table(const char* name) {
  KernelTable table{.name = name,
                    .formats = {},
                    .tiles = {Target::Tiles::begin, Target::Tiles::end},
                    .panel_rows = Target::kRows.panels,
                    .plain = plain_products<Target::kPlainColumns>,
                    .to_floats = to_floats,
                    .transpose = transpose,
                    .pack_bf12_row = pack_bf12_row,
                    .store_operands = store_operands,
                    .activate = activate,
                    .finish = finish,
                    .attend = attend,
                    .multiply_square = multiply_square,
                    .low_rank_in = low_rank_in,
                    .low_rank_out = low_rank_out,
                    .feed_forward = feed_forward};
  [&]<size_t... kIndices>(std::index_sequence<kIndices...>) {
    ((table.formats[kIndices] = kernels_of<Target, static_cast<Format>(kIndices)>()), ...);
  }
  (std::make_index_sequence<kFormats>{});
  return table;
}

}  // namespace
}  // namespace torch_mesh
