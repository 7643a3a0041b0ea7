// Puts a target's kernels together. A target's translation unit includes its simd header, defines
// its Dots and register constants, includes this file and says make_table<...>(name, ...).
#pragma once

#include <type_traits>
#include <utility>

#include "kernels/activations-inl.h"
#include "kernels/attention-inl.h"
#include "kernels/exact_products-inl.h"
#include "kernels/gemm_products-inl.h"
#include "kernels/gguf_products-inl.h"
#include "kernels/kernel_table.h"
#include "kernels/low_rank-inl.h"
#include "kernels/operands-inl.h"
#include "kernels/pack_group-inl.h"
#include "kernels/pack_lut4-inl.h"
#include "kernels/pack_trellis-inl.h"
#include "kernels/panel_products-inl.h"
#include "kernels/plain_products-inl.h"
#include "kernels/products-inl.h"
#include "kernels/quantise_group-inl.h"
#include "kernels/quantise_trellis-inl.h"

namespace torch_mesh {
namespace {

inline void clear_sums(const BlockProducts& products) {
  __builtin_memset(products.sums, 0,
                   sizeof(float) * kBlockColumns * static_cast<size_t>(products.rows.count));
}

template <typename Dot>
inline void block_products_bf16(const BlockProducts& products) {
  if (products.gemm != nullptr) return gemm_bf16(products, RuntimeGemm(products));
  clear_sums(products);
  if constexpr (prefetches_groups<Dot>()) {
    if (products.rows.count >= kPrefetchingFloatRows) {
      return bf16_products<Dot, LinesAhead>(products);
    }
  }
  bf16_products<Dot>(products);
}

template <typename Dot>
inline void block_products_fp8(const BlockProducts& products) {
  clear_sums(products);
  if (products.gemm != nullptr) return gemm_fp8(products, RuntimeGemm(products));
  fp8_products<Dot>(products);
}

template <typename Dot>
inline void many_rows_of_fp8(const BlockProducts& products) {
  clear_sums(products);
  fp8_as_bf16<Dot>(products);
}

template <void (*kPanels)(const BlockProducts&)>
inline void block_panels(const BlockProducts& products) {
  clear_sums(products);
  kPanels(products);
}

template <typename Dot, typename Scales>
inline void own_integer_products(const BlockProducts& products) {
  using Group = IntegerGroup<Dot, Scales>;
  if constexpr (prefetches_groups<Dot>()) {
    if (products.rows.count >= kPrefetchingRows) {
      return integer_products<Dot, Scales, Group, LinesAhead>(products);
    }
  }
  integer_products<Dot, Scales, Group>(products);
}

template <typename Dot, typename Scales>
inline void block_products_int8(const BlockProducts& products) {
  clear_sums(products);
  using Group = IntegerGroup<Dot, Scales>;
  if (products.gemm != nullptr)
    return gemm_integer<Dot, Scales, Group>(products, RuntimeGemm(products));
  own_integer_products<Dot, Scales>(products);
}

// Levels is a Dot of the bytes that Dot unfolds nibbles to.
template <typename Dot, typename Levels, typename Scales>
inline void block_products_nibbles(const BlockProducts& products) {
  clear_sums(products);
  using Unfolded = UnfoldedGroup<Dot, Scales>;
  if (products.gemm != nullptr)
    return gemm_integer<Levels, Scales, Unfolded>(products, RuntimeGemm(products));
  if (products.rows.count >= kUnfoldedRows) {
    using Ahead = std::conditional_t<prefetches_groups<Dot>(), LinesAhead, NothingAhead>;
    return integer_products<Levels, Scales, Unfolded, Ahead>(products);
  }
  own_integer_products<Dot, Scales>(products);
}

template <typename Levels, typename Code>
inline void block_products_trellis(const BlockProducts& products) {
  clear_sums(products);
  using Group = TrellisGroup<Code>;
  if (products.gemm != nullptr)
    return gemm_integer<Levels, Bf16Scales, Group>(products, RuntimeGemm(products));
  if (products.rows.count == 1) return trellis_row<Levels, Code>(products);
  integer_products<Levels, Bf16Scales, Group>(products);
}

// Signed is a Dot of int8, Unsigned one of levels.
template <typename Signed, template <typename> typename Unsigned, Format kFormat>
using GgufDot = std::conditional_t<gguf_type(kFormat).iq4, OfSignedBytes<Signed>,
                                   Unsigned<CodesFrom<gguf_type(kFormat).zero>>>;

template <typename Dot, Format kFormat>
inline void block_products_gguf(const BlockProducts& products) {
  clear_sums(products);
  using Group = GgufGroup<kFormat>;
  if (products.gemm != nullptr)
    return gemm_integer<Dot, HalfScales, Group>(products, RuntimeGemm(products));
  if (products.rows.count == 1) return gguf_row<Dot, kFormat>(products);
  integer_products<Dot, HalfScales, Group>(products);
}

// Puts what make(Constant of the format) gives for each of GGUF's types into a table by Format.
template <typename Functions, typename Make>
constexpr void for_gguf(Functions& functions, const Make& make) {
  [&]<size_t... kTypes>(std::index_sequence<kTypes...>) {
    ((functions[static_cast<size_t>(kFirstGguf) + kTypes] =
          make(Constant<static_cast<int>(kFirstGguf) + static_cast<int>(kTypes)>{})),
     ...);
  }
  (std::make_index_sequence<kGgufTypes>{});
}

// From how many rows on; `panels` of 0: none.
struct ManyRows {
  int32_t gemm_floats, gemm_int8, gemm_nibbles, gemm_trellis;
  int32_t panels;
  bool bf16_panels = true;
  int32_t gemm_fp8 = gemm_floats;
};

// Nibbles and Levels are Dots of what they stand for.
template <typename Bf16, typename Int8, template <typename> typename Nibbles,
          template <typename> typename Levels, typename Fp8>
constexpr KernelTable make_table(const char* name, const ManyRows& rows,
                                 const KernelTable::Tiles& tiles = {}) {
  using Int4 = Nibbles<EvenNibbles>;
  using Fp4 = Nibbles<Fp4Nibbles>;
  using Trellis = Levels<TrellisLevels>;
  const int32_t nibbles = rows.gemm_nibbles;
  KernelTable table{
      name,
      {rows.gemm_floats, rows.gemm_int8, nibbles, nibbles, rows.gemm_int8, nibbles, nibbles,
       nibbles, rows.gemm_fp8},
      tiles,
      rows.panels,
      {rows.panels > 0 && rows.bf16_panels ? block_panels<bf16_panels> : nullptr, nullptr, nullptr,
       nullptr, nullptr, nullptr, nullptr, nullptr,
       rows.panels > 0 ? block_panels<fp8_panels> : nullptr},
      {block_products_bf16<Bf16>, block_products_int8<Int8, Bf16Scales>,
       block_products_nibbles<Int4, Levels<EvenNibbles>, Bf16Scales>,
       block_products_nibbles<Nibbles<Lut4Nibbles>, Levels<Lut4Nibbles>, Bf16Scales>,
       block_products_int8<Int8, HalfScales>,
       block_products_nibbles<Int4, Levels<EvenNibbles>, HalfScales>,
       block_products_nibbles<Fp4, Levels<Fp4Nibbles>, E8m0Scales>,
       block_products_nibbles<Fp4, Levels<Fp4Nibbles>, E4m3Scales>, block_products_fp8<Fp8>},
      plain_products,
      to_floats,
      transpose,
      store_operands,
      activate,
      finish,
      attend,
      {unfold_bf16, unfold_integers<SignedBytes, Bf16Scales>,
       unfold_integers<BytesOfNibbles<EvenNibbles>, Bf16Scales>,
       unfold_integers<BytesOfNibbles<Lut4Nibbles>, Bf16Scales>,
       unfold_integers<SignedBytes, HalfScales>,
       unfold_integers<BytesOfNibbles<EvenNibbles>, HalfScales>,
       unfold_integers<BytesOfNibbles<Fp4Nibbles>, E8m0Scales>,
       unfold_integers<BytesOfNibbles<Fp4Nibbles>, E4m3Scales>, unfold_fp8},
      multiply_square,
      low_rank_in,
      low_rank_out,
      {pack_bf16_group, pack_int8_group, pack_int4_group, pack_lut4_group},
      {trellis_packing<Tcq2>(), trellis_packing<Tcq3>()},
      {GroupQuantiser{}, quantiser_of<Int8Codes>(), quantiser_of<Int4Codes>(),
       quantiser_of<Lut4Codes>()},
      feed_forward};
  const auto of_trellis = [](auto& by_format, auto two, auto three) {
    by_format[static_cast<size_t>(Format::kTcq2)] = two;
    by_format[static_cast<size_t>(Format::kTcq3)] = three;
  };
  of_trellis(table.gemm_rows, rows.gemm_trellis, rows.gemm_trellis);
  of_trellis(table.products, block_products_trellis<Trellis, Tcq2>,
             block_products_trellis<Trellis, Tcq3>);
  of_trellis(table.unfold, unfold_trellis_square<Tcq2>, unfold_trellis_square<Tcq3>);
  for_gguf(table.gemm_rows, [&](auto) { return rows.gemm_trellis; });
  for_gguf(table.products, [](auto type) {
    constexpr auto kFormat = static_cast<Format>(type.value);
    return block_products_gguf<GgufDot<Int8, Levels, kFormat>, kFormat>;
  });
  for_gguf(table.unfold, [](auto type) { return unfold_gguf<static_cast<Format>(type.value)>; });
  return table;
}

}  // namespace
}  // namespace torch_mesh
