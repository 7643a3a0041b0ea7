// Lends the slots of a shared pool to other processes of the same user, see protocol.h.
//
// One thread answers all of them. Each borrower has as many slots as every other, and all of these
// together are no more than the pool has slots: a request finds a slot that is not in use, whatever
// others hold and however long. What is lent is pinned by an ordinary claim of one expert. The pins
// of a borrower go when its socket closes or its process ends, so that one that is killed leaves
// none behind; until then nothing that it may still look at is overwritten, misbehave as it may.
#pragma once

#include <cstdint>
#include <memory>
#include <string>

#include "base/owner_process.h"
#include "residency/pool.h"

namespace torch_mesh {

class Lender {
 public:
  // Listens at `path`, a socket that only this user can open; one that no process answers at any
  // more is replaced. `pool` is shared (PoolOptions::sharing) and outlives the lender. Throws
  // Error(kInvalid) for a path where something else is or a process answers, for a pool that is not
  // shared, and for more borrowers than it has slots; Error(kRead) where the system refuses it.
  Lender(Pool& pool, const std::string& path, int32_t borrowers);
  ~Lender();
  Lender(const Lender&) = delete;
  Lender& operator=(const Lender&) = delete;

  // Closes the pool, ends all loans and takes the socket away. What was lent stays readable to
  // the borrowers, for no slot is written to any more.
  void close();

  int32_t borrowers() const;  // connected now
  int32_t slots() const;      // of each
  int64_t refused() const;    // connections that ended for what they sent

 private:
  struct Impl;
  const OwnerProcess owner_;
  std::unique_ptr<Impl> impl_;
};

}  // namespace torch_mesh
