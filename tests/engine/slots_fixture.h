// A slot table by itself, with the counters and effects that it updates.
#pragma once

#include <string_view>

#include "residency/core/slots.h"

namespace torch_mesh::testing {

class SlotsAlone {
 public:
  SlotsAlone(int32_t layers, int32_t experts, int32_t slots, std::string_view policy)
      : statistics_(layers, experts),
        effects_(slots, experts, slots),
        table(layers, experts, slots, make_policy(policy, {layers, experts, slots}), statistics_,
              effects_) {}

 private:
  Statistics statistics_;
  Effects effects_;

 public:
  SlotTable table;
};

}  // namespace torch_mesh::testing
