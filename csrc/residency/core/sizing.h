// How many slots may be used, and which segments of their memory there are: it comes and goes in
// pieces of some slots each. A slot beyond the limit is retired: never reserved, and emptied as
// soon as it is not in use; a segment whose slots are all retired and EMPTY may go.
#pragma once

#include <cstdint>
#include <vector>

#include "residency/core/slots.h"
#include "residency/core/soft_pins.h"

namespace torch_mesh {

class Sizing {
 public:
  // slots_per_segment 0: there are no segments, memory neither comes nor goes.
  Sizing(int32_t slots_per_segment, SlotTable& slots, SoftPins& soft_pins, Statistics& statistics,
         Effects& effects);

  // From now on so many, as soon as there is memory for them.
  void resize(int32_t slots);
  // Whether that has come true, but for segments whose slots are still in use: those leave by
  // themselves.
  bool settled() const;
  // The first segment that is wanted back, which is then to come() or to fail(); -1: none now.
  int64_t next_to_come();
  void came(int64_t segment);
  void failed(int64_t segment);  // there is no memory for it: the target is what there is
  // What becomes of a segment that Effects::vacant named.
  void gone(int64_t segment);
  void stays(int64_t segment);  // until the next resize()
  // Lets segments go that are not in use.
  void let_go();

  // Slots of `segment` have memory, or will soon.
  bool held(int64_t segment) const { return segments_[segment] != State::kAbsent; }
  // `closed`: what is vacant stays.
  void validate(bool closed) const;

 private:
  // Only one that is kPresent has slots below SlotTable::limit().
  enum class State : uint8_t {
    kPresent,
    kLeaving,  // its slots are retired and EMPTY
    kAbsent,
    kComing,
  };

  int32_t first_of(int64_t segment) const;
  bool vacant(int64_t segment) const;
  void let_go(int64_t segment);
  void raise_limit();  // up to the target, or to the first segment without memory
  void set_limit(int32_t slots);

  const int32_t slots_per_segment_;
  std::vector<State> segments_;
  int32_t target_;       // slots that the last resize() asked for
  bool grown_ = false;   // it has made the pool larger
  bool coming_ = false;  // some segment, until it is there
  SlotTable& slots_;
  SoftPins& soft_pins_;
  Statistics& statistics_;
  Effects& effects_;
};

}  // namespace torch_mesh
