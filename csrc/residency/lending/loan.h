// The slots that another process lends to this one, see protocol.h: a connection, and its pool's
// memory mapped for reading.
#pragma once

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <memory>
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
  // Asks the owner at `path` for a part of its pool, which has to be of the store that `source`
  // is, with records of so many bytes. Throws Error(kRead) without an answer, where all places are
  // taken or the owner is of another user; Error(kInvalid) for a raw source, another store or
  // another version of torch_mesh; Error(kTimeout) where the owner stands still, after twice the
  // time-out at most, Error(kInterrupted) on Ctrl-C then.
  Loan(const std::string& path, const Source& source, int64_t record_bytes,
       std::chrono::milliseconds timeout, const Runtime& runtime);
  ~Loan() override;  // ends the loan
  Loan(const Loan&) = delete;
  Loan& operator=(const Loan&) = delete;

  int32_t slots() const { return welcome_.borrowed; }  // slots of a pool that borrows
  const std::string& path() const { return path_; }

  std::byte* piece(int64_t slot) const override { return lent_[slot]; }
  std::byte* destination(int64_t slot) const override;
  int32_t node(int64_t) const override { return -1; }
  // A read of a record is a request to its owner.
  std::unique_ptr<Reader> open_reader(const ReaderOptions& options, const Source& source,
                                      std::span<const MemoryRegion> staging,
                                      Reader::Done done) override;

 private:
  friend class LentBackend;

  void connect_within(std::chrono::milliseconds timeout, const Runtime& runtime);
  void receive_welcome(std::chrono::milliseconds timeout, const Runtime& runtime);
  void map();
  void unmap();

  const OwnerProcess owner_;
  const std::string path_;
  Descriptor socket_;
  Descriptor shared_;
  lending::Welcome welcome_;
  std::byte* begin_ = nullptr;         // of the owner's pool
  std::byte* destinations_ = nullptr;  // a page for each slot, not to be touched: where reads "go"
  // By slot, of the I/O thread while a read is under way there; nullptr: nothing is lent.
  std::vector<std::byte*> lent_;
};

}  // namespace torch_mesh
