// File descriptors and the system calls of the socket transport. No allocation.
#pragma once

#include <cstddef>
#include <span>
#include <utility>

#include <sys/uio.h>

#include "ringspan/transports.h"

namespace ringspan {

// Owns a file descriptor.
class Fd {
 public:
  Fd() = default;
  explicit Fd(int fd) : fd_(fd) {}
  Fd(Fd&& other) noexcept : fd_(std::exchange(other.fd_, -1)) {}
  Fd& operator=(Fd&& other) noexcept {
    std::swap(fd_, other.fd_);
    return *this;
  }
  ~Fd() { reset(); }

  int get() const { return fd_; }
  int release() { return std::exchange(fd_, -1); }
  void reset();

 private:
  int fd_ = -1;
};

struct FdPair {
  Fd first, second;
};

// Connected AF_UNIX stream sockets, closed on exec; throws Error.
FdPair make_socket_pair();

// What a non-blocking call did.
struct Moved {
  std::size_t bytes = 0;
  bool closed = false;  // the connection is of no use any more; bytes == 0
  int error = 0;        // why, where it is not that the other end has gone
};

// Bytes == 0 and not closed: try again later.
Moved send_some(int fd, std::span<iovec> parts);
Moved receive_some(int fd, void* data, std::size_t bytes);

// The same with file descriptors attached to the first byte (AF_UNIX only). received: valid where any came. Where they do not
// come whole, those that do are closed, and the error says why, though the connection is not closed: EMFILE, this process has
// room for no more, or EPROTO.
Moved send_with_fds(int fd, const void* data, std::size_t bytes, const PeerSockets& sockets);
Moved receive_with_fds(int fd, void* data, std::size_t bytes, PeerSockets& received);

// Small messages leave at once, instead of when the peer has acknowledged what it got before. Does nothing to AF_UNIX.
void send_at_once(int fd);

// Bytes (with the kernel's overhead) that the peer has not read yet; 0 where the system does not tell.
int unread_by_peer(int fd);
bool is_connected_stream_socket(int fd);  // or was, and its peer has gone
bool is_unix_socket(int fd);              // which alone can pass other descriptors

}  // namespace ringspan
