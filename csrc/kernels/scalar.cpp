// One lane: runs everywhere. Every other table must agree with it.
#include "kernels/simd_scalar-inl.h"
// The headers below are written in its terms.
#include "kernels/dots-inl.h"
#include "kernels/table-inl.h"

namespace torch_mesh {
namespace {

struct ScalarInt8Dot {
  using Sum = Words;
  using Weights = Words;
  using Row = Words;
  static constexpr int kRowWords = 1;

  static Words expand(Words bytes) { return bytes; }
  static Words weights(const std::byte* words) { return load_words(words); }
  static Words row(const std::byte* word) { return word_at(word); }
  static Words add(Words sum, Words row, Words weights) {
    for (int shift = 0; shift < 32; shift += 8) {
      const int32_t product =
          static_cast<int8_t>(row >> shift) * static_cast<int8_t>(weights >> shift);
      sum += static_cast<uint32_t>(product);
    }
    return sum;
  }
  static Words zeros(const std::byte*) { return broadcast_word(0); }
  static Words start(Words, int32_t) { return broadcast_word(0); }
};

template <typename Nibbles>
struct ScalarNibbleDot : NibbleDot<Nibbles> {
  static Words add(Words sum, const NibbleOperands& row, const NibbleOperands& weights) {
    return ScalarInt8Dot::add(ScalarInt8Dot::add(sum, row.low, weights.low), row.high,
                              weights.high);
  }
};

template <typename Levels>
struct ScalarLevelDot : OfBytes<ScalarNibbleDot<Levels>> {
  static constexpr int kChains = 1;
};

struct Scalar {
  using Bf16 = ExpandedBf16Dot;
  using Int8 = ScalarInt8Dot;
  using Fp8 = ExpandedFp8Dot;
  template <typename Codes>
  using Nibbles = ScalarNibbleDot<Codes>;
  template <typename Codes>
  using Levels = ScalarLevelDot<Codes>;
  using Tiles = NoTiles;
  static constexpr int kPlainColumns = 4;  // plain_products' of a single row
  static constexpr ManyRows kRows{};
};

}  // namespace

constinit const KernelTable kScalarTable = make_table<Scalar>("scalar");

}  // namespace torch_mesh
