#pragma once

#include <array>
#include <cstdint>

namespace torch_mesh {

// The urgency of a read. kDemand: a forward waits for it. kWindow: certain to be needed, but not
// yet; after demand, at full depth. kPrefetch: a prediction.
enum class Urgency : uint8_t { kDemand, kWindow, kPrefetch };

inline constexpr std::array kUrgencies{Urgency::kDemand, Urgency::kWindow, Urgency::kPrefetch};

}  // namespace torch_mesh
