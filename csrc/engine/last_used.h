// The experts that a layer's last forward of many rows used: a hint for the reads of its backward
// pass.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <mutex>
#include <span>
#include <vector>

namespace torch_mesh {

class LastUsed {
 public:
  // Reserves room for all experts, so that no forward allocates.
  LastUsed(int32_t layers, int32_t experts) : layers_(static_cast<size_t>(layers)) {
    for (auto& known : layers_) known.reserve(static_cast<size_t>(experts));
  }

  // Notes the distinct `experts` of a forward. `more`: adds to those noted before, for the same
  // forward.
  void note(int32_t layer, std::span<const int32_t> experts, bool more) {
    const std::lock_guard lock(mutex_);
    std::vector<int32_t>& known = layers_[static_cast<size_t>(layer)];
    if (!more) known.clear();
    const size_t before = known.size();
    for (int32_t expert : experts) {
      const auto end = known.begin() + static_cast<std::ptrdiff_t>(before);
      if (std::find(known.begin(), end, expert) == end) known.push_back(expert);
    }
  }
  std::vector<int32_t> of(int32_t layer) const {
    const std::lock_guard lock(mutex_);
    return layers_[static_cast<size_t>(layer)];
  }

 private:
  mutable std::mutex mutex_;
  std::vector<std::vector<int32_t>> layers_;
};

}  // namespace torch_mesh
