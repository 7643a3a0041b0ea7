// The slots that another process lends to this one, see protocol.h: a connection, and the owner's
// pool mapped for reading.
#pragma once

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <span>
#include <string>
#include <vector>

#include "base/descriptor.h"
#include "base/owner_process.h"
#include "base/runtime.h"
#include "residency/lending/protocol.h"
#include "residency/memory/slot_memory.h"
#include "store/source.h"

namespace torch_mesh {

class Loan final : public SlotMemory {
 public:
  // Asks the owner at `path` for a part of its pool, which must be of the store that `source` is,
  // with records of `record_bytes`. Throws Error(kRead) without an answer, if all slots are taken
  // or the owner is of another user; Error(kInvalid) for a raw source, another store or another
  // version of torch_mesh; Error(kTimeout) if the owner does not respond, after twice the time-out
  // at most; Error(kInterrupted) on Ctrl-C meanwhile.
  Loan(const std::string& path, const Source& source, int64_t record_bytes,
       std::chrono::milliseconds timeout, const Runtime& runtime);
  ~Loan() override;  // ends the loan
  Loan(const Loan&) = delete;
  Loan& operator=(const Loan&) = delete;

  int32_t slots() const { return welcome_.borrowed; }  // of a pool that borrows
  const std::string& path() const { return path_; }

  std::byte* piece(int64_t slot) const override { return lent_[slot]; }
  // Nothing is written there: it is the owner's memory, and its address tells the slot.
  std::byte* destination(int64_t slot) const override {
    return begin_ + slot * welcome_.record_bytes;
  }
  int32_t node(int64_t) const override { return -1; }
  // A read of a record is a request to its owner.
  Owned<Reader> open_reader(const ReaderOptions& options, const Source& source,
                            std::span<const MemoryRegion> staging, Reader::Done done) override;

 private:
  friend class LentBackend;

  void connect_within(std::chrono::milliseconds timeout, const Runtime& runtime);
  void receive_welcome(std::chrono::milliseconds timeout, const Runtime& runtime);
  void map();

  const OwnerProcess owner_;
  const std::string path_;
  Descriptor socket_;
  Descriptor shared_;
  lending::Welcome welcome_;
  std::byte* begin_ = nullptr;  // of the owner's pool
  // By slot. Only the I/O thread uses one into which a read is under way. nullptr: nothing is lent.
  std::vector<std::byte*> lent_;
};

}  // namespace torch_mesh
