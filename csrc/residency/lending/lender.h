// Lends the slots of a shared pool to other processes of the same user, see protocol.h.
//
// One thread answers all borrowers. Each has the same number of slots, and together they have no
// more than the pool. So a request finds a slot that is not in use, whatever others hold and for
// however long. A lent record is pinned by an ordinary claim of one expert. A borrower's pins end
// when its socket closes or its process ends, so that one that is killed leaves none behind. Until
// then nothing that it may still read is overwritten, even if it misbehaves.
#pragma once

#include <cstdint>
#include <string>

#include "base/owner_process.h"
#include "residency/pool.h"

namespace torch_mesh {

class Lender {
 public:
  // Listens at `path`, a socket that only this user can open; replaces one that no process answers
  // at. `pool` is shared (PoolOptions::sharing) and outlives the lender. Throws Error(kInvalid) for
  // a path where something else is or a process answers, for a pool that is not shared or has a
  // lender, and for more borrowers than it has slots; Error(kRead) if the system refuses it.
  Lender(Pool& pool, const std::string& path, int32_t borrowers);
  // Closes the pool, ends all loans and removes the socket. Borrowers can still read what was lent,
  // since no slot is written to any more. In a forked child it does nothing.
  ~Lender();

  int32_t borrowers() const;  // connected now
  int32_t slots() const;      // of each borrower
  int64_t refused() const;    // connections that ended for what they sent

 private:
  struct Impl;
  Owned<Impl> impl_;
};

}  // namespace torch_mesh
