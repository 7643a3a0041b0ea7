// Activations in single precision. Every table runs the same sequence of roundings, so that all
// agree to the bit. Include after the target's simd header.
//
// Error against float64 over finite inputs, where the result is beyond 3e-37: silu 3 ulp, gelu 4
// ulp, gelu_tanh 15 ulp for x >= -4, swigluoai 14 ulp for gates >= -9; further out the arguments of
// the last two, cubic and 1.702 times the gate, are rounded before the exponential, as in every
// single-precision form of them.
#pragma once

#include "kernels/kernel_table.h"
#include "kernels/rounding-inl.h"

namespace torch_mesh {
namespace {

constexpr float kExpCoefficients[] = {0x1.fffff8p-2f, 0x1.55547ep-3f, 0x1.555bd4p-5f,
                                      0x1.124790p-7f, 0x1.685950p-10f};

constexpr float kTailCentre = 2.0f;
constexpr int kTailDegree = 10;
constexpr float kTailCoefficients[kTailDegree + 1] = {
    0.672408f,      -0.33140454f,   0.028798483f,   0.036721274f,   -0.00048406908f, -0.006749648f,
    -0.0018873955f, 0.00088006194f, 0.00071879075f, 3.3724584e-05f, -7.296032e-05f};

inline Floats power_of_two(Words exponent) {
  return as_floats(shift_left<23>(add_words(exponent, broadcast_word(127))));
}

// e^x. The polynomial is a minimax fit of (e^r - 1 - r) / r^2 over |r| <= ln(2) / 2. The power of
// two comes in two factors so that results may be subnormal or infinite.
inline Floats exponential(Floats x) {
  x = clamp(x, -106.0f, 90.0f);
  const Floats shifted = multiply_add(x, broadcast(0x1.715476p+0f), broadcast(kRoundingMagic));
  const Floats n = shifted - broadcast(kRoundingMagic);
  Floats r = multiply_add(n, broadcast(-0x1.62e4p-1f), x);
  r = multiply_add(n, broadcast(-0x1.7f7d1cp-20f), r);

  Floats p = broadcast(kExpCoefficients[4]);
  for (int i = 3; i >= 0; --i) p = multiply_add(p, r, broadcast(kExpCoefficients[i]));
  p = multiply_add(p, r * r, r) + broadcast(1.0f);

  const Words exponent = subtract_words(as_words(shifted), as_words(broadcast(kRoundingMagic)));
  const Words half =
      subtract_words(shift_right<1>(add_words(exponent, broadcast_word(512))), broadcast_word(256));
  return p * power_of_two(half) * power_of_two(subtract_words(exponent, half));
}

inline Floats silu(Floats x) { return x / (broadcast(1.0f) + exponential(broadcast(0.0f) - x)); }

// x * Phi(x). Phi(-z) = e^(-z^2 / 2) * P(z) for z = |x| keeps its relative accuracy far out, where
// 1 + erf(x) has cancelled to nothing. P(z) = erfcx(z / sqrt 2) / 2 falls like 1 / z; P(z) * (z +
// k) is a gentle function of (z - k) / (z + k).
inline Floats gelu(Floats x) {
  const Floats z = clamp(as_floats(magnitude_bits(x)), 0.0f, 14.5f);
  const Floats square = z * z;
  const Floats lost = multiply_add(z, z, broadcast(0.0f) - square);
  const Floats reciprocal = broadcast(1.0f) / (z + broadcast(kTailCentre));
  const Floats t = (z - broadcast(kTailCentre)) * reciprocal;
  Floats p = broadcast(kTailCoefficients[kTailDegree]);
  for (int i = kTailDegree - 1; i >= 0; --i) {
    p = multiply_add(p, t, broadcast(kTailCoefficients[i]));
  }
  Floats tail = exponential(square * broadcast(-0.5f)) * (p * reciprocal);
  tail = multiply_add(tail, lost * broadcast(-0.5f), tail);
  const Floats phi = select(less(x, broadcast(0.0f)), tail, broadcast(1.0f) - tail);
  return x * phi;
}

// x / 2 * (1 + tanh u) = x / (1 + e^(-2u)), u = sqrt(2 / pi) * (x + 0.044715 x^3).
inline Floats gelu_tanh(Floats x) {
  const Floats inner =
      multiply_add(x * x, broadcast(-0.0713548162726f), broadcast(-1.59576912161f));
  return x / (broadcast(1.0f) + exponential(x * inner));
}

// See Activation. What is not a number stays so; up + 1 is exact where it cancels.
inline Floats swigluoai(Floats gate, Floats up) {
  gate = minimum(broadcast(kSwigluLimit), gate);
  up = clamp(up, -kSwigluLimit, kSwigluLimit) + broadcast(1.0f);
  return up * (gate / (broadcast(1.0f) + exponential(gate * broadcast(-kSwigluAlpha))));
}

template <typename Combine>
inline void combine_with(float* gate, const float* up, int32_t count, Combine combine) {
  for (int32_t i = 0; i < count; i += kLanes) {
    store(gate + i, combine(load(gate + i), load(up + i)));
  }
}

template <typename Function>
inline void activate_with(float* gate, const float* up, int32_t count, Function function) {
  if (up != nullptr) {
    return combine_with(gate, up, count,
                        [function](Floats g, Floats u) { return function(g) * u; });
  }
  for (int32_t i = 0; i < count; i += kLanes) store(gate + i, function(load(gate + i)));
}

inline void activate(Activation activation, float* gate, const float* up, int32_t count) {
  switch (activation) {
    case Activation::kSilu:
      return activate_with(gate, up, count, [](Floats x) { return silu(x); });
    case Activation::kGelu:
      return activate_with(gate, up, count, [](Floats x) { return gelu(x); });
    case Activation::kGeluTanh:
      return activate_with(gate, up, count, [](Floats x) { return gelu_tanh(x); });
    case Activation::kSwigluOai:
      return combine_with(gate, up, count, [](Floats g, Floats u) { return swigluoai(g, u); });
  }
}

}  // namespace
}  // namespace torch_mesh
