// Rows times one block by the runtime's gemm, which reads the packed words as they are. Integer
// formats give the same bits as products-inl.h.
#pragma once

#include "kernels/products-inl.h"

namespace torch_mesh {
namespace {

// How deep one bf16 gemm is: the rows it takes are gathered on the stack.
constexpr int32_t kGemmDepth = 2048;

inline void gemm_bf16(const BlockProducts& products) {
  alignas(64) std::byte gathered[kTileRows * kGemmDepth * 2];
  alignas(64) float part[kTileRows * kBlockColumns];
  const int32_t rows = products.rows.count;
  for (int32_t k = 0; k < products.shape.depth_padded; k += kGemmDepth) {
    const int32_t left = products.shape.depth_padded - k;
    const int32_t depth = left < kGemmDepth ? left : kGemmDepth;
    for (int32_t r = 0; r < rows; ++r) {
      __builtin_memcpy(gathered + r * depth * 2, operand_row(products, r) + int64_t{k} * 2,
                       static_cast<size_t>(depth) * 2);
    }
    const std::byte* block = products.block + int64_t{k} * kBlockColumns * 2;
    products.gemm->gemm_bf16(rows, kBlockColumns, depth, depth, kBlockColumns, kBlockColumns,
                             reinterpret_cast<const uint16_t*>(gathered),
                             reinterpret_cast<const uint16_t*>(block),
                             k == 0 ? products.sums : part);
    if (k == 0) continue;
    for (int32_t i = 0; i < rows * kBlockColumns; i += kLanes) {
      store(products.sums + i, load(products.sums + i) + load(part + i));
    }
  }
}

// Words of bf16, which holds every number of E4M3.
inline void unfold_fp8_to_bf16(const std::byte* pairs, int32_t words, std::byte* to) {
  const Floats unit = broadcast(kE4m3Unit);
  const uint32_t before = count_subnormals();
  for (int32_t i = 0; i < words * kBlockColumns; i += 2 * kLanes) {
    ExpandedFp8Dot::Weights both[2];
    ExpandedFp8Dot::weights(pairs + i * 2, both);
    put_in_order(both[0].low, both[1].low);
    put_in_order(both[0].high, both[1].high);
    for (int v = 0; v < 2; ++v) {
      const Words low = shift_right<16>(as_words(both[v].low * unit));
      const Words high = as_words(both[v].high * unit) & broadcast_word(0xffff0000);
      store_words(to + (i + v * kLanes) * 4, low | high);
    }
  }
  restore_subnormals(before);
}

inline void gemm_fp8(const BlockProducts& products) {
  constexpr int32_t kMostDepth = 128;
  alignas(64) std::byte unfolded[kMostDepth * kBlockColumns * 2];
  alignas(64) std::byte gathered[kTileRows * kMostDepth * 2];
  alignas(64) float part[kTileRows * kBlockColumns];
  const OperandShape& shape = products.shape;
  const std::byte* pairs = fp8_pairs(products);
  const int32_t rows = products.rows.count;
  const int32_t most = shape.group_size == 0 ? kMostDepth : shape.group_size;
  for (int32_t k = 0; k < shape.depth_padded; k += most) {
    const int32_t depth = shape.depth_padded - k < most ? shape.depth_padded - k : most;
    unfold_fp8_to_bf16(pairs + int64_t{k} * kBlockColumns, depth / 2, unfolded);
    for (int32_t r = 0; r < rows; ++r) {
      __builtin_memcpy(gathered + r * depth * 2, operand_row(products, r) + int64_t{k} * 2,
                       static_cast<size_t>(depth) * 2);
    }
    products.gemm->gemm_bf16(rows, kBlockColumns, depth, depth, kBlockColumns, kBlockColumns,
                             reinterpret_cast<const uint16_t*>(gathered),
                             reinterpret_cast<const uint16_t*>(unfolded), part);
    const Fp8Step step(products.block, shape.group_size, k, 1);
    for (int32_t c = 0; c < kBlockColumns; c += kLanes) {
      const Floats scale = step.scales_of(c);
      for (int32_t r = 0; r < rows; ++r) {
        float* sums = products.sums + r * kBlockColumns + c;
        store(sums, multiply_add(load(part + r * kBlockColumns + c), scale, load(sums)));
      }
    }
  }
}

// 128 times the sum of each column of a group, which gemm's u8 rows add.
template <typename Dot, typename Group>
inline void gemm_surplus(const Group& group, uint32_t* surplus) {
  alignas(8) static constexpr uint8_t kOnes[8] = {129, 129, 129, 129, 129, 129, 129, 129};
  const auto ones = Dot::row(reinterpret_cast<const std::byte*>(kOnes));
  for (int32_t c = 0; c < kBlockColumns; c += kLanes) {
    Words sum = broadcast_word(0);
    for (int32_t j = 0; j < group.count; ++j) {
      sum =
          Dot::add(sum, ones,
                   Dot::weights(group.words + (j * words_at_once<Dot>() * kBlockColumns + c) * 4));
    }
    // int8 goes to gemm as it is stored, wherever the Dot puts its zero.
    if constexpr (Dot::kRowWords == 1) {
      sum = add_words(sum, Dot::start(Dot::zeros(group.scales_of(c)), group.count * 4));
    }
    store_words(surplus + c, shift_left<7>(sum));
  }
}

// Of groups whose words are gemm's own operands. Bytes of nibbles stay unsigned: s8 holds them too.
template <typename Dot, typename Scales, typename Group>
inline void gemm_integer(const BlockProducts& products) {
  alignas(64) std::byte gathered[kTileRows * kMaxGroup];
  alignas(64) int32_t exact[kTileRows * kBlockColumns];
  alignas(64) uint32_t surplus[kBlockColumns];
  const int32_t size = products.shape.group_size;
  const int32_t count = products.rows.count;
  const float unit = block_unit<Scales>(products);
  for (int32_t g = 0; g < products.shape.depth_padded / size; ++g) {
    const Group group(products, g);
    const GroupRows rows = group_rows(products, g, unit);
    for (int32_t r = 0; r < count; ++r) {
      __builtin_memcpy(gathered + r * size, rows.bytes[r], static_cast<size_t>(size));
    }
    gemm_surplus<Dot>(group, surplus);
    products.gemm->gemm_u8s8(count, kBlockColumns, size, size, kBlockColumns, kBlockColumns,
                             reinterpret_cast<const uint8_t*>(gathered),
                             reinterpret_cast<const int8_t*>(group.words), exact);
    for (int32_t r = 0; r < count; ++r) {
      for (int32_t c = 0; c < kBlockColumns; c += kLanes) {
        Words sum =
            subtract_words(load_words(exact + r * kBlockColumns + c), load_words(surplus + c));
        if constexpr (Dot::kRowWords == 2) {
          sum = add_words(sum, Dot::start(Dot::zeros(group.scales_of(c)), rows.sum[r]));
        }
        add_scaled<Scales>(products.sums + r * kBlockColumns + c, sum, rows.scale[r],
                           group.scales_of(c));
      }
    }
  }
}

}  // namespace
}  // namespace torch_mesh
