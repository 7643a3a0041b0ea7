// The activations that the fused expert knows.
#pragma once

#include <cstdint>

namespace torch_mesh {

enum class Activation : uint8_t { kSilu, kGelu, kGeluTanh };

}  // namespace torch_mesh
