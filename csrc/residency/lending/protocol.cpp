#include "residency/lending/protocol.h"

#include <array>
#include <cstring>
#include <vector>

namespace torch_mesh::lending {

uint64_t fingerprint(const Source& source) {
  std::vector<uint64_t> all = source.checksums;
  for (const Extent& extent : source.extents) all.push_back(static_cast<uint64_t>(extent.bytes));
  for (const int32_t count :
       {source.layers, source.experts, source.first_expert, source.routed_experts}) {
    all.push_back(static_cast<uint64_t>(count));
  }
  return record_checksum(source.store_id, 0, 0, reinterpret_cast<const std::byte*>(all.data()),
                         static_cast<int64_t>(all.size() * sizeof(uint64_t)));
}

bool send_with(int socket, const Welcome& message, int descriptor) {
  iovec part{const_cast<Welcome*>(&message), sizeof(message)};
  alignas(cmsghdr) std::array<char, CMSG_SPACE(sizeof(int))> beside{};
  msghdr header{};
  header.msg_iov = &part;
  header.msg_iovlen = 1;
  if (descriptor >= 0) {
    header.msg_control = beside.data();
    header.msg_controllen = beside.size();
    cmsghdr* control = CMSG_FIRSTHDR(&header);
    control->cmsg_level = SOL_SOCKET;
    control->cmsg_type = SCM_RIGHTS;
    control->cmsg_len = CMSG_LEN(sizeof(int));
    std::memcpy(CMSG_DATA(control), &descriptor, sizeof(int));
  }
  return sendmsg(socket, &header, MSG_DONTWAIT | MSG_NOSIGNAL) ==
         static_cast<ssize_t>(sizeof(message));
}

sockaddr_un address_of(const std::string& path) {
  sockaddr_un address{};
  if (path.empty() || path.size() >= sizeof(address.sun_path) ||
      path.find('\0') != std::string::npos) {
    throw_invalid("the path of a socket has 1 to ", sizeof(address.sun_path) - 1, " bytes; '", path,
                  "' has ", path.size());
  }
  address.sun_family = AF_UNIX;
  std::memcpy(address.sun_path, path.data(), path.size());
  return address;
}

}  // namespace torch_mesh::lending
