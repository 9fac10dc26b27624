// What a socket communicator says to peers that are not who they should be, or do not speak its language.
#include <fcntl.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <unistd.h>

#include <array>
#include <chrono>
#include <cmath>
#include <cstring>
#include <limits>
#include <memory>
#include <new>
#include <string>
#include <string_view>
#include <thread>
#include <vector>

#include <fmt/format.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "comm/socket.h"
#include "comm_testing/patience.h"
#include "ringspan/error.h"
#include "ringspan/transports.h"

namespace ringspan {
namespace {

using Direction = Message::Direction;
using comm_testing::kPatience;
using testing::HasSubstr;

// Rank 0 of two, and the other ends of its sockets.
struct Pair {
  Pair() {
    FdPair d = make_socket_pair();
    FdPair c = make_socket_pair();
    const std::array<PeerSockets, 2> peers{PeerSockets{}, PeerSockets{d.first.release(), c.first.release()}};
    rank0 = make_socket_communicator(0, peers);
    data = std::move(d.second);
    control = std::move(c.second);
  }
  Fd data, control;
  std::unique_ptr<Communicator> rank0;
};

// The error of rank 0 as it waits for 4 bytes of rank 1.
std::string error_of_receive(Communicator& comm, Communicator::Seconds deadline = kPatience) {
  int value = 0;
  const Message message{Direction::receive, 1, &value, sizeof value};
  try {
    comm.wait(comm.post(0, std::span(&message, 1)), deadline);
  } catch (const Error& error) {
    return error.what();
  }
  return "no error";
}

void write(const Fd& fd, std::string_view bytes) {
  ASSERT_EQ(::send(fd.get(), bytes.data(), bytes.size(), MSG_NOSIGNAL), static_cast<ssize_t>(bytes.size()));
}

// A control frame: magic, source, kind, length of the text.
std::string frame(std::uint32_t source, std::uint32_t kind, std::uint32_t length = 0) {
  const std::array<std::uint32_t, 4> words{0x52535043, source, kind, length};
  return {reinterpret_cast<const char*>(words.data()), sizeof words};
}

TEST(SocketErrors, DataThatIsNoMessage) {
  Pair pair;
  write(pair.data, std::string(24, 'x'));
  EXPECT_THAT(error_of_receive(*pair.rank0), HasSubstr("the data socket of rank 1 carries something else"));
}

TEST(SocketErrors, DataOfAnotherRank) {
  Pair pair;
  const std::array<std::uint32_t, 6> header{0x52535044, 7, 0, 0, 4, 0};
  write(pair.data, {reinterpret_cast<const char*>(header.data()), sizeof header});
  EXPECT_THAT(error_of_receive(*pair.rank0), HasSubstr("the data socket of rank 1 belongs to rank 7"));
}

TEST(SocketErrors, ControlThatIsNoFrame) {
  Pair pair;
  write(pair.control, std::string(16, 'x'));
  EXPECT_THAT(error_of_receive(*pair.rank0), HasSubstr("the control socket of rank 1 carries something else"));
}

// What there is no room for is not read.
TEST(SocketErrors, ControlWithALongerText) {
  for (const std::uint32_t length : {1009U, ~0U}) {
    Pair pair;
    write(pair.control, frame(1, 1, length) + std::string(4000, 'x'));
    EXPECT_EQ(error_of_receive(*pair.rank0), "rank 0/2: the control socket of rank 1 carries something else");
  }
  Pair pair;
  write(pair.control, frame(1, 1, 1008) + std::string(1008, 'x'));
  EXPECT_THAT(error_of_receive(*pair.rank0), testing::EndsWith(": " + std::string(1008, 'x')));
}

TEST(SocketErrors, ControlOfAnotherRank) {
  Pair pair;
  write(pair.control, frame(5, 0));
  EXPECT_THAT(error_of_receive(*pair.rank0), HasSubstr("the control socket of rank 1 belongs to rank 5"));
}

TEST(SocketErrors, FrameOfUnknownKind) {
  Pair pair;
  write(pair.control, frame(1, 77));
  EXPECT_THAT(error_of_receive(*pair.rank0), HasSubstr("rank 1 sent a control frame of unknown kind 77"));
}

TEST(SocketErrors, DuplicateWithoutSockets) {
  Pair pair;
  write(pair.control, frame(1, 3));
  EXPECT_THAT(error_of_receive(*pair.rank0), HasSubstr("rank 1 passed no sockets for a duplicate"));
}

TEST(SocketErrors, DuplicateWithoutSocketsAfterOneWithThem) {
  Pair pair;
  const FdPair passed = make_socket_pair();
  const std::string bytes = frame(1, 3);
  ASSERT_EQ(send_with_fds(pair.control.get(), bytes.data(), bytes.size(), {passed.first.get(), passed.second.get()}).bytes,
            bytes.size());
  pair.rank0->progress();
  write(pair.control, bytes);
  EXPECT_THAT(error_of_receive(*pair.rank0), HasSubstr("rank 1 passed no sockets for a duplicate"));
}

// Leaves this process so many free file descriptors while it lives.
class FewDescriptors {
 public:
  explicit FewDescriptors(int left) : left_(left) {
    ::getrlimit(RLIMIT_NOFILE, &before_);
    rlimit low = before_;
    low.rlim_cur = 128;
    ::setrlimit(RLIMIT_NOFILE, &low);
    while (true) {
      Fd fd(::open("/dev/null", O_RDONLY | O_CLOEXEC));
      if (fd.get() < 0) break;
      taken_.push_back(std::move(fd));
    }
    for (int i = 0; i < left; ++i) taken_.pop_back();
  }
  ~FewDescriptors() {
    std::vector<Fd> more(static_cast<std::size_t>(left_) + 1);
    int free = 0;
    for (Fd& fd : more) {
      fd = Fd(::open("/dev/null", O_RDONLY | O_CLOEXEC));
      free += fd.get() >= 0 ? 1 : 0;
    }
    EXPECT_EQ(free, left_) << "file descriptors were lost";
    ::setrlimit(RLIMIT_NOFILE, &before_);
  }
  FewDescriptors(const FewDescriptors&) = delete;
  FewDescriptors& operator=(const FewDescriptors&) = delete;

 private:
  int left_;
  rlimit before_{};
  std::vector<Fd> taken_;
};

TEST(SocketErrors, DuplicateThatARankHasNoDescriptorsFor) {
  for (const int left : {0, 1}) {
    Pair pair;
    const FdPair passed = make_socket_pair();
    const std::string bytes = frame(1, 3);
    ASSERT_EQ(send_with_fds(pair.control.get(), bytes.data(), bytes.size(), {passed.first.get(), passed.second.get()}).bytes,
              bytes.size());
    const FewDescriptors few(left);
    EXPECT_EQ(error_of_receive(*pair.rank0),
              "rank 0/2: this rank has no file descriptors left for the sockets of a duplicate that rank 1 passed");
    EXPECT_THROW(pair.rank0->progress(), CommError);
  }
}

TEST(SocketErrors, DuplicateOfOneSocket) {
  Pair pair;
  std::string bytes = frame(1, 3);
  union {
    cmsghdr header;
    char room[CMSG_SPACE(sizeof(int))];
  } attached{};
  iovec part{bytes.data(), bytes.size()};
  msghdr message{};
  message.msg_iov = &part;
  message.msg_iovlen = 1;
  message.msg_control = &attached;
  message.msg_controllen = sizeof attached;
  attached.header.cmsg_level = SOL_SOCKET;
  attached.header.cmsg_type = SCM_RIGHTS;
  attached.header.cmsg_len = CMSG_LEN(sizeof(int));
  const int fd = pair.data.get();
  std::memcpy(CMSG_DATA(&attached.header), &fd, sizeof fd);
  ASSERT_EQ(::sendmsg(pair.control.get(), &message, MSG_NOSIGNAL), static_cast<ssize_t>(bytes.size()));
  const FewDescriptors few(10);
  EXPECT_THAT(error_of_receive(*pair.rank0), HasSubstr("rank 1 passed sockets for a duplicate that are not two"));
}

// Nobody else knows of sockets that came and were never asked for, whether their frame is whole or not.
TEST(SocketErrors, SocketsOfADuplicateThatNobodyMakesAreClosed) {
  for (const std::size_t sent : {frame(1, 3).size(), std::size_t{10}}) {
    Pair pair;
    FdPair data = make_socket_pair(), control = make_socket_pair();
    ASSERT_EQ(send_with_fds(pair.control.get(), frame(1, 3).data(), sent, {data.first.get(), control.first.get()}).bytes, sent);
    data.first.reset(), control.first.reset();
    pair.rank0->progress();
    char byte = 0;
    for (const Fd* end : {&data.second, &control.second}) {
      EXPECT_FALSE(receive_some(end->get(), &byte, 1).closed);
    }
    pair.rank0.reset();
    for (const Fd* end : {&data.second, &control.second}) {
      EXPECT_TRUE(receive_some(end->get(), &byte, 1).closed) << sent;
    }
  }
}

// Signs of life stop where the peer leaves them unread, so that why this rank gives up still fits.
TEST(SocketErrors, AnAbortFitsBehindSignsOfLifeThatNobodyReads) {
  FdPair data = make_socket_pair(), control = make_socket_pair();
  const Fd beside(::dup(control.first.get()));
  const auto rank0 = make_socket_communicator(
      0, std::array<PeerSockets, 2>{PeerSockets{}, PeerSockets{data.first.release(), control.first.release()}});
  std::string expected;
  while (unread_by_peer(beside.get()) < (40 << 10)) {
    write(beside, frame(0, 0));
    expected += frame(0, 0);
  }
  for (int i = 0; i < 3; ++i) {
    std::this_thread::sleep_for(std::chrono::milliseconds(60));
    rank0->progress();
  }
  rank0->abort("enough");
  const std::string reason = "rank 0 aborted: enough";
  expected += frame(0, 1, static_cast<std::uint32_t>(reason.size())) + reason;
  std::string read(expected.size() + 1000, ' ');
  read.resize(receive_some(control.second.get(), read.data(), read.size()).bytes);
  EXPECT_EQ(read.size(), expected.size());
  EXPECT_EQ(read, expected);
}

// Ranks joined by sockets, all in this thread.
std::vector<std::unique_ptr<Communicator>> make_ranks(std::size_t ranks) {
  std::vector<std::vector<PeerSockets>> peers(ranks, std::vector<PeerSockets>(ranks));
  for (std::size_t a = 0; a < ranks; ++a) {
    for (std::size_t b = a + 1; b < ranks; ++b) {
      FdPair data = make_socket_pair();
      FdPair control = make_socket_pair();
      peers[a][b] = {data.first.release(), control.first.release()};
      peers[b][a] = {data.second.release(), control.second.release()};
    }
  }
  std::vector<std::unique_ptr<Communicator>> world;
  for (std::size_t rank = 0; rank < ranks; ++rank) {
    world.push_back(make_socket_communicator(static_cast<int>(rank), peers[rank]));
  }
  return world;
}

// Nobody waits for sockets that will never come, and nobody gets some of them.
TEST(SocketErrors, DuplicateThatARankCannotMakeSocketsForReachesAll) {
  for (const int left : {0, 3, 5}) {  // rank 0 needs eight
    const auto world = make_ranks(3);
    const FewDescriptors few(left);
    const auto error_of = [](const auto& action) -> std::string {
      try {
        action();
      } catch (const Error& error) {
        return error.what();
      }
      return "no error";
    };
    const std::string cause = "duplicate: cannot make a socket pair: Too many open files";
    EXPECT_EQ(error_of([&] { world[0]->duplicate(); }), "rank 0/3: " + cause);
    for (const int rank : {1, 2}) {
      EXPECT_EQ(error_of([&] { world[static_cast<std::size_t>(rank)]->progress(); }),
                fmt::format("rank {}/3: rank 0 failed: {}", rank, cause));
    }
  }
}

TEST(SocketErrors, FailuresAreToldInWholeCharacters) {
  for (int before = 0; before < 2; ++before) {
    const auto world = make_ranks(2);
    std::string text(static_cast<std::size_t>(before), 'x');
    for (int i = 0; i < 1000; ++i) text += "é";
    world[0]->abort(text);
    try {
      world[1]->progress();
      FAIL() << "expected an error";
    } catch (const CommError& error) {
      EXPECT_THAT(error.what(), testing::EndsWith("éé")) << before;
    }
  }
}

TEST(SocketErrors, DuplicateWithAPeerThatHasLeft) {
  FdPair data = make_socket_pair();
  FdPair control = make_socket_pair();
  const std::array<PeerSockets, 2> peers{PeerSockets{data.first.release(), control.first.release()}, PeerSockets{}};
  const auto rank1 = make_socket_communicator(1, peers);
  write(control.second, frame(0, 2));  // a farewell
  control.second.reset();
  try {
    rank1->duplicate();
    FAIL() << "expected an error";
  } catch (const CommError& error) {
    EXPECT_THAT(error.what(), HasSubstr("rank 1/2: duplicate: rank 0 has left"));
  }
}

TEST(SocketErrors, PeerThatIsGone) {
  Pair pair;
  pair.data.reset();
  pair.control.reset();
  EXPECT_THAT(error_of_receive(*pair.rank0), HasSubstr("rank 1 died: its connection closed"));
}

TEST(SocketErrors, SendToAPeerThatHasLeft) {
  Pair pair;
  write(pair.control, frame(1, 2));  // a farewell
  pair.data.reset();
  pair.control.reset();
  int value = 0;
  const Message message{Direction::send, 1, &value, sizeof value};
  try {
    pair.rank0->wait(pair.rank0->post(0, std::span(&message, 1)), kPatience);
    FAIL() << "expected an error";
  } catch (const CommError& error) {
    EXPECT_STREQ(error.what(), "rank 0/2: waiting to send 4 bytes to rank 1 in round 0: rank 1 has left");
  }
}

// Else a program that a rank starts would keep its connections open after its death.
TEST(SocketErrors, ProgramsThatARankStartsDoNotGetItsSockets) {
  const FdPair over = make_socket_pair(), passed = make_socket_pair();
  ASSERT_EQ(send_with_fds(over.first.get(), "x", 1, {passed.first.get(), passed.second.get()}).bytes, 1U);
  char byte = 0;
  PeerSockets received;
  ASSERT_EQ(receive_with_fds(over.second.get(), &byte, 1, received).bytes, 1U);
  const Fd data(received.data), control(received.control);
  for (const Fd* fd : {&over.first, &over.second, &data, &control}) {
    EXPECT_EQ(::fcntl(fd->get(), F_GETFD) & FD_CLOEXEC, FD_CLOEXEC);
  }
}

TEST(SocketErrors, DeadlineThatIsNoNumber) {
  Pair pair;
  EXPECT_THAT(error_of_receive(*pair.rank0, Communicator::Seconds(std::nan(""))),
              HasSubstr("rank 0/2: the deadline of wait is not a number"));
}

// Two connected TCP sockets over the loopback.
FdPair tcp_pair() {
  const Fd listener(::socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0));
  sockaddr_in address{};
  address.sin_family = AF_INET;
  address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
  socklen_t length = sizeof address;
  FdPair pair{Fd(::socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0)), Fd()};
  if (::bind(listener.get(), reinterpret_cast<sockaddr*>(&address), length) != 0 || ::listen(listener.get(), 1) != 0 ||
      ::getsockname(listener.get(), reinterpret_cast<sockaddr*>(&address), &length) != 0 ||
      ::connect(pair.first.get(), reinterpret_cast<sockaddr*>(&address), length) != 0) {
    return {};
  }
  pair.second = Fd(::accept4(listener.get(), nullptr, nullptr, SOCK_CLOEXEC));
  return pair;
}

TEST(SocketErrors, DuplicateOverTcp) {
  FdPair data = tcp_pair();
  FdPair control = tcp_pair();
  if (data.second.get() < 0 || control.second.get() < 0) GTEST_SKIP() << "no loopback network here";
  const std::array<PeerSockets, 2> peers{PeerSockets{}, PeerSockets{data.first.release(), control.first.release()}};
  const auto rank0 = make_socket_communicator(0, peers);
  try {
    rank0->duplicate();
    FAIL() << "expected an error";
  } catch (const Unsupported& error) {
    EXPECT_STREQ(error.what(), "rank 0/2: duplicate needs AF_UNIX sockets, which can pass others");
  }
}

TEST(SocketErrors, SmallMessagesOverTcpLeaveAtOnce) {
  FdPair data = tcp_pair(), control = tcp_pair();
  if (data.second.get() < 0 || control.second.get() < 0) GTEST_SKIP() << "no loopback network here";
  const std::array<PeerSockets, 2> peers{PeerSockets{}, PeerSockets{data.first.release(), control.first.release()}};
  const auto rank0 = make_socket_communicator(0, peers);
  for (const int fd : {peers[1].data, peers[1].control}) {
    int on = 0;
    socklen_t length = sizeof on;
    ASSERT_EQ(::getsockopt(fd, IPPROTO_TCP, TCP_NODELAY, &on, &length), 0);
    EXPECT_NE(on, 0);
  }
}

std::string refusal_of(int data, int control) {
  try {
    make_socket_communicator(0, std::array<PeerSockets, 2>{PeerSockets{}, PeerSockets{data, control}});
  } catch (const InvalidArgument& error) {
    return error.what();
  }
  return "taken";
}

TEST(SocketErrors, SocketsThatAreNotConnected) {
  const FdPair good = make_socket_pair();
  for (const int family : {AF_INET, AF_UNIX}) {
    const Fd alone(::socket(family, SOCK_STREAM | SOCK_CLOEXEC, 0));
    if (alone.get() < 0) continue;
    EXPECT_EQ(refusal_of(good.first.get(), alone.get()),
              fmt::format("peers[1].control ({}) must be a connected stream socket", alone.get()));
  }
  const Fd listener(::socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0));
  if (::listen(listener.get(), 1) == 0) {
    EXPECT_EQ(refusal_of(listener.get(), good.first.get()),
              fmt::format("peers[1].data ({}) must be a connected stream socket", listener.get()));
  }
  const int fd = good.first.get();
  EXPECT_EQ(refusal_of(fd, fd),
            fmt::format("peers name socket {} twice; each needs one of its own for data and for control", fd));
}

// A peer that has gone is none of the caller's mistakes.
TEST(SocketErrors, APeerThatHasGoneBefore) {
  FdPair data = make_socket_pair(), control = make_socket_pair();
  data.second.reset(), control.second.reset();
  const auto rank0 = make_socket_communicator(
      0, std::array<PeerSockets, 2>{PeerSockets{}, PeerSockets{data.first.release(), control.first.release()}});
  EXPECT_THAT(error_of_receive(*rank0), HasSubstr("rank 1 died: its connection closed"));
}

TEST(SharedMemoryErrors, NoBytesAreNoError) { EXPECT_TRUE(SharedMemory(0).bytes().empty()); }

TEST(SharedMemoryErrors, MoreThanThereIs) {
  EXPECT_THROW(SharedMemory(std::numeric_limits<std::size_t>::max() / 2), std::bad_alloc);
}

}  // namespace
}  // namespace ringspan
