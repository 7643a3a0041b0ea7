// How the fused expert combines gate and up.
#pragma once

#include <cstdint>
#include <limits>
#include <string_view>

namespace torch_mesh {

// An activation with its parameters. Kernels do not read parameters that its kind does not have.
struct Activation {
  enum Kind : uint8_t {
    // act(gate) * up, or act(gate) for experts without a gate; relu2 is max(x, 0)^2.
    kSilu,
    kGelu,
    kGeluTanh,
    kRelu2,
    // Needs gate and up: (clamp(up, -up_limit, up_limit) + offset) * g * sigmoid(alpha * g), where
    // g = min(gate, gate_limit).
    kSwiglu,
    // Needs both too: c(gate, gate_limit) * sigmoid(gate) * c(up, up_limit), where c(x, limit) =
    // limit * tanh(x / limit).
    kSoftcap,
  };

  constexpr Activation(Kind kind) : kind(kind) {}  // NOLINT: a kind without parameters is one
  constexpr Activation(Kind kind, float alpha, float offset, float gate_limit, float up_limit)
      : kind(kind), alpha(alpha), offset(offset), gate_limit(gate_limit), up_limit(up_limit) {}

  bool operator==(const Activation&) const = default;
  constexpr bool needs_gate() const { return kind == kSwiglu || kind == kSoftcap; }

  Kind kind;
  float alpha = 1.0f;
  float offset = 0.0f;
  float gate_limit = std::numeric_limits<float>::infinity();
  float up_limit = std::numeric_limits<float>::infinity();
};

// The activation of gpt-oss.
inline constexpr Activation kSwigluOai{Activation::kSwiglu, 1.702f, 1.0f, 7.0f, 7.0f};

// Parses "silu", "gelu", "gelu_tanh", "relu2", "swiglu(alpha=1,offset=0,gate=10,up=10)", of which
// each parameter may be left out, "softcap(gate=4,up=25)" and "swigluoai". Throws Error(kInvalid)
// for other names.
Activation activation_from_name(std::string_view name);

}  // namespace torch_mesh
