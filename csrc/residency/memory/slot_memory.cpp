#include "residency/memory/slot_memory.h"

#include <utility>

namespace torch_mesh {
namespace {

class ArenaMemory final : public SlotMemory {
 public:
  ArenaMemory(const SlotMemoryOptions& options, const Source& source)
      : source_(source),
        arena_(options.slots, options.record_bytes, options.topology, options.segment_bytes,
               options.sharing) {}

  std::byte* record(int32_t slot) const override { return arena_.piece(slot); }
  int32_t node(int32_t slot) const override { return arena_.node(slot); }
  std::unique_ptr<Reader> open_reader(const ReaderOptions& options,
                                      std::span<const MemoryRegion> staging,
                                      Reader::Done done) const override {
    // What is staged is read there and nowhere else.
    const std::span<const MemoryRegion> buffers = source_.raw ? staging : arena_.segments();
    return torch_mesh::open_reader(options, source_.files, buffers, std::move(done));
  }

  std::span<const MemoryRegion> segments() const override { return arena_.segments(); }
  int32_t slots_per_segment() const override { return static_cast<int32_t>(arena_.first_of(1)); }
  void fault_in(int64_t segment) const override { arena_.fault_in(segment); }
  void drop(int64_t segment) const override { arena_.drop(segment); }
  int descriptor() const override { return arena_.descriptor(); }

 private:
  const Source& source_;
  const Arena arena_;
};

}  // namespace

std::unique_ptr<SlotMemory> make_arena_memory(const SlotMemoryOptions& options,
                                              const Source& source) {
  return std::make_unique<ArenaMemory>(options, source);
}

}  // namespace torch_mesh
