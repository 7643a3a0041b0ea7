// Roundings that are the same on every target. Include after the target's simd header.
#pragma once

namespace torch_mesh {
namespace {

// x + this, for |x| < 2^22, holds x rounded to the nearest integer (ties to even) in its low bits,
// with no help from the target.
constexpr float kRoundingMagic = 0x1.8p23f;

inline Floats round_to_integer(Floats x) {
  const Floats magic = broadcast(kRoundingMagic);
  return (x + magic) - magic;
}

// NaN passes: minimum and maximum return their second operand then.
inline Floats clamp(Floats x, float low, float high) {
  return maximum(broadcast(low), minimum(broadcast(high), x));
}

// Rounds |x| < 2^22 to the nearest integer.
inline Words to_integers(Floats x) {
  const Floats magic = broadcast(kRoundingMagic);
  return subtract_words(as_words(x + magic), as_words(magic));
}

// Ordered like the magnitudes themselves, with NaN above infinity.
inline Words magnitude_bits(Floats x) { return as_words(x) & broadcast_word(0x7fffffff); }

// Returns the nearest bf16, ties to even, in the low half. Rounding could turn a NaN into an
// infinity: instead, one with bits below bf16's gets its quiet bit set.
inline Words bf16_bits(Floats x) {
  const Words bits = as_words(x);
  const Words odd = shift_right<16>(bits) & broadcast_word(1);
  const Words rounded = add_words(bits, add_words(odd, broadcast_word(0x7fff)));
  const Words beyond = add_words(bits & broadcast_word(0xffff), broadcast_word(0xffff));
  const Words quiet = bits | shift_left<22>(shift_right<16>(beyond));
  return shift_right<16>(as_words(select(is_number(x), as_floats(rounded), as_floats(quiet))));
}

inline Floats load_bf16(const void* from) { return as_floats(shift_left<16>(load_uint16(from))); }

}  // namespace
}  // namespace torch_mesh
