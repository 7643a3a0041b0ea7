// Expands E4M3 to floats by moving bits. With AVX2, and on AMD's cores with AVX512 too, vcvtph2ps
// would take longer than everything else. Products with subnormals are as fast as others on AMD's
// cores, and slower on Intel's (docs/decisions/0044). Simd headers include this, since it uses
// their vectors.
#pragma once

#include <xmmintrin.h>

#include <cstdint>

namespace torch_mesh {
namespace {

// After its sign E4M3 has the bits of a float, but for the bias: the float is 1 / kUnit of the
// number, and subnormal if that is. Activations are multiplied by kLift, so that products from
// 2^-70 on keep their bits. Activations of 2^64 and more become infinite by it; no model has any.
struct E4m3AsFloats {
  static constexpr float kUnit = 0x1p120f;
  static constexpr float kLift = 0x1p64f;

  // Turns off flushing of subnormals, whatever torch.set_flush_denormal has set, and returns the
  // state to restore. A destructor cannot restore it: its cleanup would be a symbol with external
  // linkage.
  static uint32_t count_subnormals() {
    constexpr uint32_t kIgnored = 0x8040;  // as inputs and as results
    const uint32_t before = _mm_getcsr();
    if ((before & kIgnored) != 0) _mm_setcsr(before & ~kIgnored);
    return before;
  }
  static void restore_subnormals(uint32_t before) {
    if (_mm_getcsr() != before) _mm_setcsr(before);
  }

  // Returns the upper halves of the floats whose E4M3 are the upper bytes.
  static Words upper(Words pairs) {
    return shift_right_signed_halves<4>(pairs) & broadcast_word(0x87f087f0);
  }
  // Loads two vectors of columns: the even ones, then the odd ones, which share words. Also reads
  // the byte before `from`, which exists since the block's header comes first: a load one byte
  // earlier costs less than a shift.
  static void load_pairs(const void* from, Floats (&low)[2], Floats (&high)[2]) {
    const Words first = upper(load_words(static_cast<const char*>(from) - 1));
    const Words second = upper(load_words(from));
    low[0] = as_floats(shift_left<16>(first));
    high[0] = as_floats(shift_left<16>(second));
    low[1] = as_floats(first & broadcast_word(0xffff0000));
    high[1] = as_floats(second & broadcast_word(0xffff0000));
  }
  // Restores the columns' order after load_pairs.
  static void put_in_order(Floats& first, Floats& second) { alternate_lanes(first, second); }
};

}  // namespace
}  // namespace torch_mesh
