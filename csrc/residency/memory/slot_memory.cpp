#include "residency/memory/slot_memory.h"

#include <utility>
#include <vector>

#include "io/mapped_files.h"

namespace torch_mesh {
namespace {

class ArenaMemory final : public SlotMemory {
 public:
  ArenaMemory(const SlotMemoryOptions& options, const Source& source)
      : source_(source),
        arena_(options.slots, options.record_bytes, options.topology, options.segment_bytes,
               options.sharing) {}

  std::byte* record(int32_t slot, ExpertId) const override { return arena_.piece(slot); }
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

class MappedMemory final : public SlotMemory {
 public:
  explicit MappedMemory(const Source& source)
      : source_(source), files_(std::make_shared<MappedFiles>(source.files)) {}

  std::byte* record(int32_t, ExpertId id) const override { return files_->at(extent_of(id)); }
  int32_t node(int32_t) const override { return -1; }
  std::unique_ptr<Reader> open_reader(const ReaderOptions& options, std::span<const MemoryRegion>,
                                      Reader::Done done) const override {
    return open_mapped_reader(options, files_, std::move(done));
  }

  bool may_lose() const override { return true; }
  int64_t mapped_bytes() const override { return files_->bytes(); }
  bool holds(ExpertId id) const override { return files_->in_memory(extent_of(id)); }
  void cool(ExpertId id) const override { files_->cool(extent_of(id)); }
  void forget(ExpertId id) const override { files_->forget(extent_of(id)); }
  int64_t losses() const override { return files_->losses(); }
  bool intact_since(int64_t before) const override { return files_->intact_since(before); }
  bool mend() override { return files_->mend(); }

 private:
  const Extent& extent_of(ExpertId id) const {
    return *source_.expert(id / source_.experts, id % source_.experts);
  }

  const Source& source_;
  const std::shared_ptr<MappedFiles> files_;
};

}  // namespace

std::unique_ptr<SlotMemory> make_arena_memory(const SlotMemoryOptions& options,
                                              const Source& source) {
  return std::make_unique<ArenaMemory>(options, source);
}

std::unique_ptr<SlotMemory> make_mapped_memory(const Source& source) {
  return std::make_unique<MappedMemory>(source);
}

}  // namespace torch_mesh
