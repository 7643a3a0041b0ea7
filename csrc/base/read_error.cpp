#include "base/read_error.h"

#include <cerrno>
#include <cstring>

namespace torch_mesh {
namespace {

std::string advice(int error) {
  switch (error) {
    case ENODATA:
      return "the file is shorter than when it was opened; was it replaced or truncated?";
    case EIO:
      return "the disk reported an error and repeating did not help; see the kernel's log";
    case ECANCELED:
      return "the pool is closing";
    case ENOMEM:
      return "keep fewer experts resident, or raise the memory limit";
    case ECONNRESET:
      return "the process that shares its pool has ended; start torch-mesh share again and open "
             "the model anew";
    default:
      return "the operating system refused the read";
  }
}

}  // namespace

Error read_error(const std::string& what, const ErrorPlace& place, int error) {
  const ErrorKind kind = error == ECANCELED ? ErrorKind::kClosed
                         : error == ENOMEM  ? ErrorKind::kMemory
                                            : ErrorKind::kRead;
  return Error(kind,
               concat("cannot read ", what, " from ", place.file, " at offset ", place.offset, ": ",
                      strerror(error), "; ", advice(error)),
               place, error);
}

}  // namespace torch_mesh
