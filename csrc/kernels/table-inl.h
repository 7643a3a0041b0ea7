// Puts a target's kernels together. A target's translation unit includes its simd header, defines
// its Dots and register constants, includes this file and says make_table<...>(name, ...).
#pragma once

#include "kernels/activations-inl.h"
#include "kernels/attention-inl.h"
#include "kernels/gemm_products-inl.h"
#include "kernels/kernel_table.h"
#include "kernels/operands-inl.h"
#include "kernels/pack_group-inl.h"
#include "kernels/pack_lut4-inl.h"
#include "kernels/panel_products-inl.h"
#include "kernels/products-inl.h"

namespace torch_mesh {
namespace {

inline void clear_sums(const BlockProducts& products) {
  __builtin_memset(products.sums, 0,
                   sizeof(float) * kBlockColumns * static_cast<size_t>(products.rows.count));
}

template <typename Dot>
inline void block_products_bf16(const BlockProducts& products) {
  if (products.gemm != nullptr) return gemm_bf16(products);
  clear_sums(products);
  bf16_products<Dot>(products);
}

inline void block_panels_bf16(const BlockProducts& products) {
  clear_sums(products);
  bf16_panels(products);
}

template <typename Dot>
inline void block_products_integer(const BlockProducts& products) {
  clear_sums(products);
  if (products.gemm != nullptr) return gemm_integer<Dot>(products);
  integer_products<Dot>(products);
}

struct GemmRows {
  int32_t bf16, int8, nibbles;
};

// `panel_rows` of 0: bf16 has no panels.
template <typename Bf16, typename Int8, typename Int4, typename Lut4>
constexpr KernelTable make_table(const char* name, GemmRows gemm_rows, int32_t panel_rows) {
  return {name,
          {gemm_rows.bf16, gemm_rows.int8, gemm_rows.nibbles, gemm_rows.nibbles},
          panel_rows,
          panel_rows > 0 ? block_panels_bf16 : nullptr,
          {block_products_bf16<Bf16>, block_products_integer<Int8>, block_products_integer<Int4>,
           block_products_integer<Lut4>},
          to_floats,
          store_operands,
          activate,
          finish,
          attend,
          {pack_bf16_group, pack_int8_group, pack_int4_group, pack_lut4_group}};
}

}  // namespace
}  // namespace torch_mesh
