#pragma once

namespace torch_mesh {

// Calls `act`, which must not throw, at the end of its scope, however that ends.
template <typename Act>
class AtEnd {
 public:
  explicit AtEnd(Act act) : act_(act) {}
  ~AtEnd() { act_(); }
  AtEnd(const AtEnd&) = delete;
  AtEnd& operator=(const AtEnd&) = delete;

 private:
  const Act act_;
};

}  // namespace torch_mesh
