// Rows of bf12 (store/bf12.h) as words of bf16. Simd headers include this, since it uses their
// vectors.
#pragma once

#include <cstddef>

#include "store/bf12.h"

namespace torch_mesh {
namespace {

class Bf12Words {
 public:
  Bf12Words() = default;
  explicit Bf12Words(const std::byte* table) : table_(load_table(table)) {}

  // Calls take(v, words) for each vector v of the row's columns. Does not look up exceptions.
  template <typename Take>
  void read(const std::byte* row, const Take& take) const {
    constexpr int kHalf = 32 / kLanes;  // vectors of half of the columns
    constexpr int32_t kBytes = kLanes * 4;
#pragma GCC unroll 2
    for (int i = 0; i < kHalf / 2; ++i) {
      const Words names = load_once(row + kBf12NamesOffset + i * kBytes);
#pragma GCC unroll 2
      for (int half = 0; half < 2; ++half) {
        const Words own = (half == 0 ? names : shift_right<4>(names)) & broadcast_word(0x0f0f0f0f);
        Words first = load_words(row + half * (kBf12NamesOffset / 2) + i * kBytes);
        Words second = look_up_bytes(table_, own);
        interleave_bytes(first, second);
        take(half * kHalf + i, first);
        take(half * kHalf + kHalf / 2 + i, second);
      }
    }
  }

 private:
  Words table_;
};

}  // namespace
}  // namespace torch_mesh
