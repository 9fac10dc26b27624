#include "comm/socket.h"

#include <cerrno>
#include <cstring>

#include <fmt/format.h>
#include <linux/sockios.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <sys/ioctl.h>
#include <sys/socket.h>
#include <unistd.h>

#include "ringspan/error.h"

namespace ringspan {
namespace {

Moved moved(ssize_t result) {
  if (result >= 0) return {static_cast<std::size_t>(result), false, 0};
  if (errno == EAGAIN || errno == EWOULDBLOCK || errno == EINTR || errno == ENOBUFS) return {};
  return {0, true, errno == EPIPE || errno == ECONNRESET ? 0 : errno};
}

constexpr std::size_t kFdBytes = 2 * sizeof(int);

// A control message of two file descriptors, aligned as the system wants it.
union FdMessage {
  cmsghdr header;
  char bytes[CMSG_SPACE(kFdBytes)];
};

}  // namespace

void Fd::reset() {
  if (fd_ >= 0) ::close(fd_);
  fd_ = -1;
}

FdPair make_socket_pair() {
  int fds[2];
  if (::socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0, fds) != 0) {
    throw Error(fmt::format("cannot make a socket pair: {}", std::strerror(errno)));
  }
  return {Fd(fds[0]), Fd(fds[1])};
}

Moved send_some(int fd, std::span<iovec> parts) {
  msghdr message{};
  message.msg_iov = parts.data();
  message.msg_iovlen = parts.size();
  return moved(::sendmsg(fd, &message, MSG_DONTWAIT | MSG_NOSIGNAL));
}

Moved receive_some(int fd, void* data, std::size_t bytes) {
  const ssize_t result = ::recv(fd, data, bytes, MSG_DONTWAIT);
  if (result == 0) return {0, true, 0};
  return moved(result);
}

Moved send_with_fds(int fd, const void* data, std::size_t bytes, const PeerSockets& sockets) {
  const int fds[2] = {sockets.data, sockets.control};
  FdMessage attached{};
  iovec part{const_cast<void*>(data), bytes};
  msghdr message{};
  message.msg_iov = &part;
  message.msg_iovlen = 1;
  message.msg_control = &attached;
  message.msg_controllen = sizeof attached;
  cmsghdr* header = CMSG_FIRSTHDR(&message);
  header->cmsg_level = SOL_SOCKET;
  header->cmsg_type = SCM_RIGHTS;
  header->cmsg_len = CMSG_LEN(kFdBytes);
  std::memcpy(CMSG_DATA(header), fds, kFdBytes);
  return moved(::sendmsg(fd, &message, MSG_DONTWAIT | MSG_NOSIGNAL));
}

Moved receive_with_fds(int fd, void* data, std::size_t bytes, PeerSockets& received) {
  FdMessage attached{};
  iovec part{data, bytes};
  msghdr message{};
  message.msg_iov = &part;
  message.msg_iovlen = 1;
  message.msg_control = &attached;
  message.msg_controllen = sizeof attached;
  const ssize_t result = ::recvmsg(fd, &message, MSG_DONTWAIT | MSG_CMSG_CLOEXEC);
  if (result == 0) return {0, true, 0};
  if (result < 0) return moved(result);
  int fds[2];
  std::size_t count = 0;
  for (cmsghdr* header = CMSG_FIRSTHDR(&message); header != nullptr; header = CMSG_NXTHDR(&message, header)) {
    if (header->cmsg_level != SOL_SOCKET || header->cmsg_type != SCM_RIGHTS) continue;
    count = (header->cmsg_len - CMSG_LEN(0)) / sizeof(int);
    std::memcpy(fds, CMSG_DATA(header), count * sizeof(int));  // there is room for no more than two
  }
  const bool cut = (message.msg_flags & MSG_CTRUNC) != 0;
  if (count == 2 && !cut) {
    received = {fds[0], fds[1]};
  } else if (count != 0 || cut) {
    for (std::size_t i = 0; i < count; ++i) ::close(fds[i]);
    return {0, false, cut && count < 2 ? EMFILE : EPROTO};
  }
  return moved(result);
}

int unread_by_peer(int fd) {
  int bytes = 0;
  return ::ioctl(fd, SIOCOUTQ, &bytes) == 0 ? bytes : 0;
}

void send_at_once(int fd) {
  const int on = 1;
  if (!is_unix_socket(fd)) ::setsockopt(fd, IPPROTO_TCP, TCP_NODELAY, &on, sizeof on);
}

bool is_connected_stream_socket(int fd) {
  int type = 0;
  socklen_t length = sizeof type;
  if (::getsockopt(fd, SOL_SOCKET, SO_TYPE, &type, &length) != 0 || type != SOCK_STREAM) return false;
  char byte = 0;  // what TCP and AF_UNIX say of a socket that listens, or was never connected
  return ::recv(fd, &byte, 1, MSG_PEEK | MSG_DONTWAIT) >= 0 || (errno != ENOTCONN && errno != EINVAL);
}

bool is_unix_socket(int fd) {
  int family = 0;
  socklen_t length = sizeof family;
  return ::getsockopt(fd, SOL_SOCKET, SO_DOMAIN, &family, &length) == 0 && family == AF_UNIX;
}

}  // namespace ringspan
