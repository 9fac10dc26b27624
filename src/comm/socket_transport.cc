// Ranks as processes. Data sockets carry frames (a header, then the payload); they are read only while a receive is posted,
// so a sender is held back by the kernel's buffers and nothing is ever copied aside. Control sockets carry small frames and
// are always read, so that heartbeats, aborts and farewells never queue behind payload that nobody wants yet.
#include <algorithm>
#include <array>
#include <cerrno>
#include <cstring>
#include <deque>
#include <vector>

#include <fmt/format.h>
#include <poll.h>

#include "base/cut_text.h"
#include "comm/socket.h"
#include "comm/transport.h"
#include "ringspan/transports.h"

namespace ringspan {
namespace {

constexpr std::chrono::milliseconds kHeartbeat{50};
// No further heartbeats while the peer leaves that much unread: an abort must still fit.
constexpr int kMaxUnread = 32 << 10;
// What one pump moves at most per socket and direction, so that one stream does not starve the others.
constexpr std::int64_t kMaxPerPump = std::int64_t{4} << 20;
constexpr Communicator::Seconds kDuplicateDeadline{60.0};

struct DataHeader {
  static constexpr std::uint32_t kMagic = 0x52535044;  // "RSPD"
  std::uint32_t magic = kMagic;
  std::int32_t source = 0;
  std::uint64_t round = 0;
  std::int64_t bytes = 0;
};

struct ControlFrame {
  static constexpr std::uint32_t kMagic = 0x52535043;  // "RSPC"
  enum Kind : std::uint32_t { heartbeat, fail, farewell, duplicate };
  static constexpr std::size_t kHead = 16;
  std::uint32_t magic = kMagic;
  std::int32_t source = 0;
  std::uint32_t kind = heartbeat;
  std::uint32_t length = 0;  // of the text
  char text[1008];
  std::size_t bytes() const { return kHead + length; }
};
static_assert(sizeof(DataHeader) == 24 && sizeof(ControlFrame) == 1024);

class SocketTransport final : public Transport {
 public:
  SocketTransport(int rank, std::span<const PeerSockets> peers);
  ~SocketTransport() override;

 private:
  struct Link {
    int peer = 0;
    Fd data, control;
    OperationQueue sends, receives;
    DataHeader out, in;  // of the front operations
    std::size_t out_at = 0, in_at = 0;
    ControlFrame control_in, control_out;
    std::size_t control_in_at = 0;
    std::size_t control_out_at = 0, control_out_end = 0;  // what of control_out is still to be written
    TimePoint heard, told;
    bool said_farewell = false;
    bool closed = false;                 // the control socket has ended
    std::deque<PeerSockets> duplicates;  // passed by the peer, not asked for yet
    PeerSockets passed;                  // came with the frame that is being read
  };

  void start(Operation& operation) override;
  void pump() override;
  void block(TimePoint until) override;
  TimePoint last_sign_of_life(int peer) const override { return links_[static_cast<std::size_t>(peer)].heard; }
  bool has_left(int /*peer*/) const override { return false; }  // seen at the sockets
  void tell_peers(const std::string& cause) override;
  void withdraw() override;
  std::unique_ptr<Communicator> make_duplicate() override;

  Link& link(int peer) { return links_[static_cast<std::size_t>(peer)]; }
  void poll_links(const timespec& timeout);
  void send_data(Link& link);
  void receive_data(Link& link);
  void check_header(const Link& link);
  void receive_control(Link& link);
  void obey(Link& link);
  bool flush_control(Link& link);
  void send_control(Link& link, ControlFrame::Kind kind, std::string_view text);
  void show_life(TimePoint now);
  [[noreturn]] void fail_closed(Link& link, const Operation* operation, int error);
  void pass_duplicate(Link& link, const PeerSockets& sockets);
  void wait_for_duplicate(Link& link);

  std::vector<Link> links_;    // per rank; our own is empty
  std::vector<pollfd> polls_;  // two per link
};

SocketTransport::SocketTransport(int rank, std::span<const PeerSockets> peers)
    : Transport(rank, static_cast<int>(peers.size())), links_(peers.size()), polls_(2 * peers.size()) {
  for (int peer = 0; peer < size(); ++peer) {
    Link& to = link(peer);
    to.peer = peer;
    to.heard = to.told = Clock::now();
    if (peer == rank) continue;
    to.data = Fd(peers[static_cast<std::size_t>(peer)].data);
    to.control = Fd(peers[static_cast<std::size_t>(peer)].control);
    for (const Fd* fd : {&to.data, &to.control}) send_at_once(fd->get());
  }
}

SocketTransport::~SocketTransport() {
  for (Link& to : links_) {
    if (to.peer == rank()) continue;
    to.duplicates.push_back(to.passed);
    for (const PeerSockets& sockets : to.duplicates) {  // passed to us, never asked for
      Fd(sockets.data).reset();
      Fd(sockets.control).reset();
    }
    if (!failed()) send_control(to, ControlFrame::farewell, {});
  }
}

void SocketTransport::start(Operation& operation) {
  Link& to = link(operation.message.peer);
  const bool sending = operation.message.direction == Message::Direction::send;
  OperationQueue& queue = sending ? to.sends : to.receives;
  const bool first = queue.empty();
  queue.push(&operation);
  if (!first) return;
  sending ? send_data(to) : receive_data(to);
}

void SocketTransport::pump() {
  show_life(Clock::now());
  poll_links({});
  for (Link& from : links_) {
    const std::size_t at = 2 * static_cast<std::size_t>(from.peer);
    if (polls_[at + 1].revents != 0) receive_control(from);
    const short events = polls_[at].revents;
    if (events == 0) continue;
    if (!from.receives.empty() && (events & ~POLLOUT) != 0) receive_data(from);
    if (!from.sends.empty() && (events & ~POLLIN) != 0) send_data(from);
  }
}

void SocketTransport::block(TimePoint until) {
  const auto rest = std::max(std::chrono::nanoseconds(0), std::chrono::nanoseconds(until - Clock::now()));
  const auto seconds = std::chrono::duration_cast<std::chrono::seconds>(rest);
  poll_links({seconds.count(), (rest - seconds).count()});
}

void SocketTransport::poll_links(const timespec& timeout) {
  for (const Link& from : links_) {
    const std::size_t at = 2 * static_cast<std::size_t>(from.peer);
    const int events = (from.receives.empty() ? 0 : POLLIN) | (from.sends.empty() ? 0 : POLLOUT);
    polls_[at] = {events == 0 ? -1 : from.data.get(), static_cast<short>(events), 0};  // -1: not even its end is of interest
    polls_[at + 1] = {from.closed ? -1 : from.control.get(), POLLIN, 0};
  }
  if (::ppoll(polls_.data(), polls_.size(), &timeout, nullptr) < 0 && errno != EINTR) {
    fail(fmt::format("poll failed: {}", std::strerror(errno)));
  }
}

// Writes the front operations until the socket is full.
void SocketTransport::send_data(Link& to) {
  std::int64_t budget = kMaxPerPump;
  while (!to.sends.empty() && budget > 0) {
    Operation& operation = *to.sends.front();
    if (to.out_at == 0) to.out = {DataHeader::kMagic, rank(), operation.round, operation.message.bytes};
    std::array<iovec, 2> parts{iovec{reinterpret_cast<std::byte*>(&to.out) + to.out_at, sizeof to.out - to.out_at},
                               iovec{static_cast<std::byte*>(operation.message.data) + operation.moved,
                                     static_cast<std::size_t>(std::min(budget, operation.message.bytes - operation.moved))}};
    const Moved moved = send_some(to.data.get(), to.out_at < sizeof to.out ? std::span(parts) : std::span(parts).subspan(1));
    if (moved.closed) fail_closed(to, &operation, moved.error);
    if (moved.bytes == 0) return;
    const std::size_t of_header = std::min(moved.bytes, sizeof to.out - to.out_at);
    to.out_at += of_header;
    operation.moved += static_cast<std::int64_t>(moved.bytes - of_header);
    budget -= static_cast<std::int64_t>(moved.bytes);
    if (to.out_at == sizeof to.out && operation.moved == operation.message.bytes) {
      to.out_at = 0;
      to.sends.pop();
      operation.complete.store(true, std::memory_order_release);
    }
  }
}

// Reads into the front receives until the socket is empty; not a byte past the last one that is posted.
void SocketTransport::receive_data(Link& from) {
  std::int64_t budget = kMaxPerPump;
  while (!from.receives.empty() && budget > 0) {
    Operation& operation = *from.receives.front();
    const bool header = from.in_at < sizeof from.in;
    std::byte* target = header ? reinterpret_cast<std::byte*>(&from.in) + from.in_at
                               : static_cast<std::byte*>(operation.message.data) + operation.moved;
    const std::size_t bytes = header ? sizeof from.in - from.in_at
                                     : static_cast<std::size_t>(std::min(budget, operation.message.bytes - operation.moved));
    const Moved moved = receive_some(from.data.get(), target, bytes);
    if (moved.closed) fail_closed(from, &operation, moved.error);
    if (moved.bytes == 0) return;
    from.heard = Clock::now();
    budget -= static_cast<std::int64_t>(moved.bytes);
    if (header) {
      from.in_at += moved.bytes;
      if (from.in_at == sizeof from.in) check_header(from);
      continue;
    }
    operation.moved += static_cast<std::int64_t>(moved.bytes);
    if (operation.moved == operation.message.bytes) {
      from.in_at = 0;
      from.receives.pop();
      operation.complete.store(true, std::memory_order_release);
    }
  }
}

void SocketTransport::check_header(const Link& from) {
  const DataHeader& header = from.in;
  if (header.magic != DataHeader::kMagic) fail(fmt::format("the data socket of rank {} carries something else", from.peer));
  if (header.source != from.peer) fail(fmt::format("the data socket of rank {} belongs to rank {}", from.peer, header.source));
  const Operation& receive = *from.receives.front();
  if (header.round == receive.round && header.bytes == receive.message.bytes) return;
  fail(mismatch_at_receiver(receive, header.round, header.bytes));
}

void SocketTransport::receive_control(Link& from) {
  ControlFrame& frame = from.control_in;
  while (!from.closed) {
    const std::size_t wanted = from.control_in_at < ControlFrame::kHead ? ControlFrame::kHead : frame.bytes();
    const Moved moved = receive_with_fds(from.control.get(), reinterpret_cast<std::byte*>(&frame) + from.control_in_at,
                                         wanted - from.control_in_at, from.passed);
    if (moved.closed) {
      from.closed = true;
      if (moved.error != 0) fail_closed(from, nullptr, moved.error);
      if (!from.said_farewell) fail(fmt::format("rank {} died: its connection closed", from.peer));
      return;
    }
    if (moved.error == EMFILE) {
      fail(fmt::format("this rank has no file descriptors left for the sockets of a duplicate that rank {} passed", from.peer));
    }
    if (moved.error != 0) fail(fmt::format("rank {} passed sockets for a duplicate that are not two", from.peer));
    if (moved.bytes == 0) return;
    from.heard = Clock::now();
    from.control_in_at += moved.bytes;
    if (from.control_in_at < ControlFrame::kHead) continue;
    if (frame.magic != ControlFrame::kMagic || frame.length > sizeof frame.text) {
      fail(fmt::format("the control socket of rank {} carries something else", from.peer));
    }
    if (frame.source != from.peer) {
      fail(fmt::format("the control socket of rank {} belongs to rank {}", from.peer, frame.source));
    }
    if (from.control_in_at < frame.bytes()) continue;
    from.control_in_at = 0;
    obey(from);
  }
}

void SocketTransport::obey(Link& from) {
  const ControlFrame& frame = from.control_in;
  switch (frame.kind) {
    case ControlFrame::heartbeat:
      return;
    case ControlFrame::fail:
      fail_told_by_peer(std::string(frame.text, frame.length));
    case ControlFrame::farewell:
      from.said_farewell = true;
      return;
    case ControlFrame::duplicate:
      if (from.passed.data < 0) fail(fmt::format("rank {} passed no sockets for a duplicate", from.peer));
      from.duplicates.push_back(from.passed);
      from.passed = {};
      return;
    default:
      fail(fmt::format("rank {} sent a control frame of unknown kind {}", from.peer, frame.kind));
  }
}

// A socket has ended while `operation` (null: none) needed it. Why, the control socket may tell.
void SocketTransport::fail_closed(Link& link, const Operation* operation, int error) {
  if (error == 0) receive_control(link);
  std::string cause = fmt::format("rank {} {}", link.peer, link.said_farewell ? "has left" : "died: its connection closed");
  if (error != 0) cause = fmt::format("the connection to rank {} failed: {}", link.peer, std::strerror(error));
  if (operation != nullptr) fail(*operation, cause);
  fail(cause);
}

// True when nothing is left to be written.
bool SocketTransport::flush_control(Link& to) {
  while (to.control_out_at < to.control_out_end) {
    iovec part{reinterpret_cast<std::byte*>(&to.control_out) + to.control_out_at, to.control_out_end - to.control_out_at};
    const Moved moved = send_some(to.control.get(), std::span(&part, 1));
    if (moved.bytes == 0) return false;  // a closed socket shows when it is read
    to.control_out_at += moved.bytes;
  }
  return true;
}

// A frame for which a full socket has no room is dropped: a peer that does not read for so long learns nothing anyway before it
// reads, and then it sees the socket close.
void SocketTransport::send_control(Link& to, ControlFrame::Kind kind, std::string_view text) {
  if (!flush_control(to)) return;
  ControlFrame& frame = to.control_out;
  frame.magic = ControlFrame::kMagic;
  frame.source = rank();
  frame.kind = kind;
  frame.length = static_cast<std::uint32_t>(internal::cut_text(text, sizeof frame.text).copy(frame.text, sizeof frame.text));
  to.control_out_at = 0;
  to.control_out_end = frame.bytes();
  flush_control(to);
}

void SocketTransport::show_life(TimePoint now) {
  for (Link& to : links_) {
    if (to.peer == rank() || to.closed || now - to.told < kHeartbeat) continue;
    to.told = now;
    if (unread_by_peer(to.control.get()) < kMaxUnread) send_control(to, ControlFrame::heartbeat, {});
  }
}

void SocketTransport::tell_peers(const std::string& cause) {
  for (Link& to : links_) {
    if (to.peer != rank() && !to.closed) send_control(to, ControlFrame::fail, cause);
  }
}

void SocketTransport::withdraw() {
  for (Link& to : links_) {
    to.sends.clear();
    to.receives.clear();
  }
}

// For each pair the lower rank makes the sockets and passes the other ends to the higher one. A rank that cannot make all of
// them passes none, and fails: else its peers would wait for the rest.
std::unique_ptr<Communicator> SocketTransport::make_duplicate() {
  for (const Link& to : links_) {  // on other sockets the system may drop what is passed without a word
    if (to.control.get() < 0 || is_unix_socket(to.control.get())) continue;
    throw Unsupported(prefix() + "duplicate needs AF_UNIX sockets, which can pass others");
  }
  struct Pairs {
    FdPair data, control;
  };
  std::vector<Pairs> made;
  try {
    for (int peer = rank() + 1; peer < size(); ++peer) made.push_back({make_socket_pair(), make_socket_pair()});
  } catch (const Error& error) {
    fail(fmt::format("duplicate: {}", error.what()));
  }
  std::vector<Fd> owned;
  std::vector<PeerSockets> sockets(links_.size());
  for (int peer = rank() + 1; peer < size(); ++peer) {
    auto& [data, control] = made[static_cast<std::size_t>(peer - rank() - 1)];
    pass_duplicate(link(peer), {data.second.get(), control.second.get()});
    sockets[static_cast<std::size_t>(peer)] = {data.first.get(), control.first.get()};
    owned.push_back(std::move(data.first));
    owned.push_back(std::move(control.first));
    data.second.reset();  // the peer has them now
    control.second.reset();
  }
  for (int peer = 0; peer < rank(); ++peer) {
    wait_for_duplicate(link(peer));
    const PeerSockets passed = link(peer).duplicates.front();
    link(peer).duplicates.pop_front();
    sockets[static_cast<std::size_t>(peer)] = passed;
    owned.emplace_back(passed.data);
    owned.emplace_back(passed.control);
  }
  auto result = std::make_unique<SocketTransport>(rank(), sockets);
  for (Fd& fd : owned) fd.release();
  return result;
}

void SocketTransport::pass_duplicate(Link& to, const PeerSockets& sockets) {
  ControlFrame frame{};
  frame.source = rank();
  frame.kind = ControlFrame::duplicate;
  for (Listening listening;;) {
    if (flush_control(to)) {
      const Moved moved = send_with_fds(to.control.get(), &frame, frame.bytes(), sockets);
      if (moved.closed) fail_closed(to, nullptr, moved.error);
      if (moved.bytes != 0) {
        if (moved.bytes == frame.bytes()) return;
        to.control_out = frame;  // the rest goes without the sockets, which went with the first byte
        to.control_out_at = moved.bytes;
        to.control_out_end = frame.bytes();
        return;
      }
    }
    pump();
    listening.look();
    const Seconds silence = listening.silence(to.heard);
    if (silence >= kDuplicateDeadline) {
      fail(fmt::format("duplicate: rank {} does not read: no sign of life for {:.1f} s", to.peer, silence.count()));
    }
    block(Clock::now() + std::chrono::milliseconds(1));
  }
}

void SocketTransport::wait_for_duplicate(Link& from) {
  for (Listening listening;;) {
    pump();
    if (!from.duplicates.empty()) return;
    if (from.closed) fail(fmt::format("duplicate: rank {} has left", from.peer));
    listening.look();
    const Seconds silence = listening.silence(from.heard);
    if (silence >= kDuplicateDeadline) {
      fail(fmt::format("duplicate: waiting for rank {}: no sign of life for {:.1f} s (deadline {:g} s)", from.peer,
                       silence.count(), kDuplicateDeadline.count()));
    }
    block(Clock::now() + kHeartbeat);
  }
}

}  // namespace

std::unique_ptr<Communicator> make_socket_communicator(int rank, std::span<const PeerSockets> peers) {
  const int size = static_cast<int>(peers.size());
  if (rank < 0 || rank >= size) throw InvalidArgument(fmt::format("rank ({}) must be in [0, {})", rank, size));
  std::vector<int> known;
  for (int peer = 0; peer < size; ++peer) {
    if (peer == rank) continue;
    const PeerSockets& sockets = peers[static_cast<std::size_t>(peer)];
    for (const auto& [name, fd] : {std::pair("data", sockets.data), std::pair("control", sockets.control)}) {
      if (!is_connected_stream_socket(fd)) {
        throw InvalidArgument(fmt::format("peers[{}].{} ({}) must be a connected stream socket", peer, name, fd));
      }
      known.push_back(fd);
    }
  }
  std::ranges::sort(known);
  if (const auto twice = std::ranges::adjacent_find(known); twice != known.end()) {
    throw InvalidArgument(
        fmt::format("peers name socket {} twice; each needs one of its own for data and for control", *twice));
  }
  return std::make_unique<SocketTransport>(rank, peers);
}

}  // namespace ringspan
