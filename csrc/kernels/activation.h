// How the fused expert combines gate and up.
#pragma once

#include <cstdint>

namespace torch_mesh {

// The first three are act(gate) * up, or act(gate) for experts without a gate. kSwigluOai is that
// of gpt-oss and needs both: (clamp(up, -7, 7) + 1) * g * sigmoid(1.702 * g), g = min(gate, 7).
enum class Activation : uint8_t { kSilu, kGelu, kGeluTanh, kSwigluOai };

inline constexpr float kSwigluAlpha = 1.702f;
inline constexpr float kSwigluLimit = 7.0f;

}  // namespace torch_mesh
