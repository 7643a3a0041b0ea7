// E4M3 becomes floats by moving bits, which vcvtph2ps takes longer for than all else with AVX2, and
// on cores of AMD with AVX512, too, where subnormals cost nothing; on Intel's a product with one
// does (docs/decisions/0044). Included by simd headers, of whose vectors it is made.
#pragma once

#include <xmmintrin.h>

#include <cstdint>

namespace torch_mesh {
namespace {

// E4M3 has the bits of a float after its sign, but for the bias: these are 1 / kUnit of it, and
// subnormal where it is. What they multiply is kLift times too large, so that products from 2^-70
// on keep their bits. Activations of 2^64 and more become infinite by it; no model has any.
struct E4m3AsFloats {
  static constexpr float kUnit = 0x1p120f;
  static constexpr float kLift = 0x1p64f;

  // From here on subnormals count, whatever torch.set_flush_denormal says; returns what to restore.
  // No destructor does that: its cleanup would be a symbol that this object gives away.
  static uint32_t count_subnormals() {
    constexpr uint32_t kIgnored = 0x8040;  // as inputs and as results
    const uint32_t before = _mm_getcsr();
    if ((before & kIgnored) != 0) _mm_setcsr(before & ~kIgnored);
    return before;
  }
  static void restore_subnormals(uint32_t before) {
    if (_mm_getcsr() != before) _mm_setcsr(before);
  }

  // The upper halves of the floats whose E4M3 are the upper bytes.
  static Words upper(Words pairs) {
    return shift_right_signed_halves<4>(pairs) & broadcast_word(0x87f087f0);
  }
  // Of two vectors of columns: the even ones, then the odd ones, which share words. Reads the byte
  // before `from` too, which is a header's at least: a load that is one byte behind costs less than
  // a shift.
  static void load_pairs(const void* from, Floats (&low)[2], Floats (&high)[2]) {
    const Words first = upper(load_words(static_cast<const char*>(from) - 1));
    const Words second = upper(load_words(from));
    low[0] = as_floats(shift_left<16>(first));
    high[0] = as_floats(shift_left<16>(second));
    low[1] = as_floats(first & broadcast_word(0xffff0000));
    high[1] = as_floats(second & broadcast_word(0xffff0000));
  }
  // What came in the order of load_pairs.
  static void put_in_order(Floats& first, Floats& second) { alternate_lanes(first, second); }
};

}  // namespace
}  // namespace torch_mesh
