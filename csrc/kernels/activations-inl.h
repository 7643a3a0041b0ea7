// Activations in single precision. Every table runs the same sequence of roundings, so that all
// agree to the bit. Include after the target's simd header.
//
// Error against float64 over finite inputs, where the result is beyond 3e-37: silu 3 ulp, gelu 4
// ulp, gelu_tanh 15 ulp for x >= -4, relu2 1 ulp, softcap 8 ulp, swiglu 5 ulp with alpha = 1 and 14
// ulp with 1.702 for gates >= -9; further out the arguments of gelu_tanh, cubic, and swiglu, alpha
// times the gate, are rounded before the exponential, as in every single-precision form of them.
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
// k) is a smooth function of (z - k) / (z + k).
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

inline Floats relu2(Floats x) {
  const Floats positive = maximum(broadcast(0.0f), x);  // NaN stays
  return positive * positive;
}

// See Activation. NaN stays NaN; up + 1 is exact where it cancels.
inline Floats swiglu(const Activation& a, Floats gate, Floats up) {
  gate = minimum(broadcast(a.gate_limit), gate);
  up = clamp(up, -a.up_limit, a.up_limit) + broadcast(a.offset);
  return up * (gate / (broadcast(1.0f) + exponential(gate * broadcast(-a.alpha))));
}

// A fit of (tanh(u) / u - 1) / u^2 by powers of u^2, for |u| <= kTanhNear.
constexpr float kTanhCoefficients[] = {-0x1.555556p-2f, 0x1.1110eap-3f,  -0x1.ba0914p-5f,
                                       0x1.64add6p-6f,  -0x1.11838ap-7f, 0x1.2cebap-9f};
constexpr float kTanhNear = 0.625f;

inline Floats hyperbolic_tangent(Floats u) {
  const Floats z = u * u;
  Floats p = broadcast(kTanhCoefficients[5]);
  for (int i = 4; i >= 0; --i) p = multiply_add(p, z, broadcast(kTanhCoefficients[i]));
  const Floats near = multiply_add(p * z, u, u);  // where the other form cancels
  const Floats size = as_floats(magnitude_bits(u));
  const Floats e = exponential(size * broadcast(-2.0f));
  const Floats far = (broadcast(1.0f) - e) / (broadcast(1.0f) + e);
  const Floats turned = broadcast(0.0f) - far;
  return select(less(size, broadcast(kTanhNear)), near,
                select(less(u, broadcast(0.0f)), turned, far));
}

inline Floats softcap(const Activation& a, Floats gate, Floats up) {
  const Floats gate_limit = broadcast(a.gate_limit);
  const Floats up_limit = broadcast(a.up_limit);
  const Floats capped = hyperbolic_tangent(gate / gate_limit) * gate_limit;
  up = hyperbolic_tangent(up / up_limit) * up_limit;
  return up * (capped / (broadcast(1.0f) + exponential(broadcast(0.0f) - gate)));
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

inline void activate(const Activation& activation, float* gate, const float* up, int32_t count) {
  switch (activation.kind) {
    case Activation::kSilu:
      return activate_with(gate, up, count, [](Floats x) { return silu(x); });
    case Activation::kGelu:
      return activate_with(gate, up, count, [](Floats x) { return gelu(x); });
    case Activation::kGeluTanh:
      return activate_with(gate, up, count, [](Floats x) { return gelu_tanh(x); });
    case Activation::kRelu2:
      return activate_with(gate, up, count, [](Floats x) { return relu2(x); });
    case Activation::kSwiglu:
      return combine_with(gate, up, count,
                          [&](Floats g, Floats u) { return swiglu(activation, g, u); });
    case Activation::kSoftcap:
      return combine_with(gate, up, count,
                          [&](Floats g, Floats u) { return softcap(activation, g, u); });
  }
}

}  // namespace
}  // namespace torch_mesh
