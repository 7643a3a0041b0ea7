// The messages between the owner of a pool and the borrowers of its slots, over a Unix socket that
// keeps messages whole (SOCK_SEQPACKET). Both sides run on one machine, so there is no byte order.
//
// The owner sends a Welcome, with the memfd of its slots beside it. Then the borrower sends
// Requests, each for one of its `borrowed` slots: the loan in that slot ends, and one of another
// expert begins. The owner sends an Answer to each when the record is there. A loan ends with the
// next one of its slot, or when the borrower has gone.
#pragma once

#include <sys/socket.h>
#include <sys/un.h>

#include <cstdint>
#include <string>
#include <type_traits>

#include "base/error.h"
#include "store/source.h"

namespace torch_mesh::lending {

inline constexpr uint64_t kMagic = 0x31'65'72'61'68'73'6d'74;  // "tmshare1"

struct Welcome {
  uint64_t magic = kMagic;
  int32_t borrowed = 0;  // slots for this borrower; 0: all are taken by others
  int32_t layers = 0;
  int32_t experts = 0;
  int32_t slots = 0;  // of the whole pool
  int64_t record_bytes = 0;
  int64_t pool_bytes = 0;  // of the memfd
  uint64_t fingerprint = 0;
};

struct Request {
  int32_t slot;
  int32_t layer;
  int32_t expert;
};

struct Answer {
  int32_t slot;
  int32_t error;   // 0, or an errno
  int64_t offset;  // of the record in the memfd
};

static_assert(std::is_trivially_copyable_v<Welcome> && sizeof(Request) == 12 &&
              sizeof(Answer) == 16);

// A hash of all that determines the bytes of a record: the store's id, its shape and its checksums.
uint64_t fingerprint(const Source& source);

// Sends `message` with a descriptor beside it, unless that is -1. Never waits. False: errno says
// why.
bool send_with(int socket, const Welcome& message, int descriptor);

// An address of the file system; throws Error(kInvalid) for a path that is too long for one.
sockaddr_un address_of(const std::string& path);
// For connect() and bind().
inline const sockaddr* generic(const sockaddr_un& address) {
  return reinterpret_cast<const sockaddr*>(&address);
}

// Throws Error(kRead) when the system refused something at `path`: `parts` are the message, `error`
// an errno.
template <typename... Parts>
[[noreturn]] void throw_refused(const std::string& path, int error, const Parts&... parts) {
  throw Error(ErrorKind::kRead, concat(parts...), {-1, -1, path, -1}, error);
}

}  // namespace torch_mesh::lending
