// The number of slots that may be used, and which segments of their memory, of some slots each, are
// attached. A slot beyond the limit is retired: never reserved, and emptied as soon as it is not in
// use. A segment whose slots are all retired and EMPTY may be detached.
#pragma once

#include <cstdint>
#include <vector>

#include "residency/core/slots.h"
#include "residency/core/soft_pins.h"

namespace torch_mesh {

class Sizing {
 public:
  // slots_per_segment 0: there are no segments, all memory stays attached.
  Sizing(int32_t slots_per_segment, SlotTable& slots, SoftPins& soft_pins);

  // Sets the number of slots, to be reached when there is memory for them.
  void resize(int32_t slots);
  // Whether the number is reached, apart from segments whose slots are in use: these are detached
  // when the uses end.
  bool settled() const;
  // The first segment to attach, after which attached() or attach_failed() is called; -1: none
  // now.
  int64_t next_to_attach();
  void attached(int64_t segment);
  // There is no memory for it: goes back to the number of slots at the last resize().
  void attach_failed(int64_t segment);
  // The outcome for a segment of Effects::vacant.
  void detached(int64_t segment);
  void detach_failed(int64_t segment);  // until the next resize()
  // Begins to detach the segments that are not in use.
  void detach_vacant();

  // Whether the slots of `segment` have memory, or will soon.
  bool has_memory(int64_t segment) const { return segments_[segment] != State::kDetached; }
  // `closed`: vacant segments stay attached.
  void validate(bool closed) const;

 private:
  // Slots below SlotTable::limit() are in kAttached segments only.
  enum class State : uint8_t {
    kAttached,
    kDetaching,  // its slots are retired and EMPTY
    kDetached,
    kAttaching,  // one at most
  };

  int32_t first_of(int64_t segment) const;
  int64_t first_not_attached() const;  // one behind the last: all are attached
  bool vacant(int64_t segment) const;
  void detach_vacant(int64_t segment);
  void raise_limit();  // up to the target, or to the first segment without memory
  void set_limit(int32_t slots);

  const int32_t slots_per_segment_;
  std::vector<State> segments_;
  int32_t target_;  // slots that the last resize() asked for
  int32_t before_;  // slots that there were then
  SlotTable& slots_;
  SoftPins& soft_pins_;
};

}  // namespace torch_mesh
