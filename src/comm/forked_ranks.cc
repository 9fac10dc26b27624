// Ranks as forked processes: a full mesh of socket pairs and one pipe per child, by which it says how it ended.
#include <algorithm>
#include <cerrno>
#include <csignal>
#include <cstdio>
#include <cstring>
#include <new>
#include <utility>

#include <fcntl.h>
#include <fmt/format.h>
#include <poll.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/resource.h>
#include <sys/wait.h>
#include <unistd.h>

#include "base/cut_text.h"
#include "comm/error_code.h"
#include "comm/socket.h"
#include "ringspan/error.h"
#include "ringspan/transports.h"

namespace ringspan {
namespace {

using Clock = std::chrono::steady_clock;

// What a child writes before it exits: less than a pipe holds, so that it never waits for its parent.
struct Record {
  std::int32_t code = 0;
  std::uint32_t length = 0;
  char text[4000];
};

struct Child {
  pid_t pid = -1;  // -1: none, or reaped
  Fd pipe;         // we read, it writes
  Record record;
  std::size_t read = 0;
  bool stopped = false;
  bool overdue = false;  // killed by us
  bool died = false;     // of itself, by a signal or without a record
};

// Where the program ignores the ends of its children, nobody could learn how ours have ended: meanwhile it does not.
class HeededChildren {
 public:
  HeededChildren() {
    struct sigaction heeded {};
    heeded.sa_handler = SIG_DFL;
    if (::sigaction(SIGCHLD, nullptr, &before_) != 0) return;
    if (before_.sa_handler != SIG_IGN && (before_.sa_flags & SA_NOCLDWAIT) == 0) return;
    changed_ = ::sigaction(SIGCHLD, &heeded, nullptr) == 0;
  }
  ~HeededChildren() { restore(); }
  HeededChildren(const HeededChildren&) = delete;
  HeededChildren& operator=(const HeededChildren&) = delete;

  void restore() const {
    if (changed_) ::sigaction(SIGCHLD, &before_, nullptr);
  }

 private:
  struct sigaction before_ {};
  bool changed_ = false;
};

// The mesh of all ranks passes through this process, and may need more descriptors than it may have: the soft limit is raised
// by so many, as far as the hard one allows, until the children are off.
class DescriptorLimit {
 public:
  explicit DescriptorLimit(int ranks) {
    if (::getrlimit(RLIMIT_NOFILE, &before_) != 0) return;
    const auto p = static_cast<rlim_t>(ranks);
    const rlim_t needed = 2 * p * (p - 1) + p + 64;  // two sockets per pair and side, a pipe per child, some more
    if (before_.rlim_max < needed) {
      throw Error(fmt::format("{} forked ranks need {} file descriptors, the limit is {}", ranks, needed, before_.rlim_max));
    }
    rlimit raised = before_;
    raised.rlim_cur += std::min(needed, raised.rlim_max - raised.rlim_cur);
    changed_ = ::setrlimit(RLIMIT_NOFILE, &raised) == 0;
  }
  ~DescriptorLimit() {
    if (changed_) ::setrlimit(RLIMIT_NOFILE, &before_);
  }
  DescriptorLimit(const DescriptorLimit&) = delete;
  DescriptorLimit& operator=(const DescriptorLimit&) = delete;

 private:
  rlimit before_{};
  bool changed_ = false;
};

struct Mesh {
  std::vector<std::vector<Fd>> data, control;  // [rank][peer]
};

Mesh make_mesh(int ranks) {
  const auto size = static_cast<std::size_t>(ranks);
  Mesh mesh;
  for (auto* side : {&mesh.data, &mesh.control}) {
    side->resize(size);
    for (auto& row : *side) row.resize(size);
    for (std::size_t a = 0; a < size; ++a) {
      for (std::size_t b = a + 1; b < size; ++b) {
        FdPair pair = make_socket_pair();
        (*side)[a][b] = std::move(pair.first);
        (*side)[b][a] = std::move(pair.second);
      }
    }
  }
  return mesh;
}

std::unique_ptr<Communicator> join_mesh(Mesh& mesh, int rank) {
  const auto self = static_cast<std::size_t>(rank);
  std::vector<PeerSockets> sockets(mesh.data.size());
  for (std::size_t peer = 0; peer < sockets.size(); ++peer) {
    sockets[peer] = {mesh.data[self][peer].get(), mesh.control[self][peer].get()};
  }
  auto communicator = make_socket_communicator(rank, sockets);
  for (Fd& fd : mesh.data[self]) fd.release();
  for (Fd& fd : mesh.control[self]) fd.release();
  mesh = {};  // the sockets of the others: while we held them, their end would not show
  return communicator;
}

void write_record(int fd, const ErrorText& error) {
  Record record;
  record.code = static_cast<std::int32_t>(error.code);
  record.length =
      static_cast<std::uint32_t>(internal::cut_text(error.text, sizeof record.text).copy(record.text, sizeof record.text));
  const auto* bytes = reinterpret_cast<const char*>(&record);
  std::size_t rest = sizeof record - sizeof record.text + record.length;
  while (rest > 0) {
    const ssize_t written = ::write(fd, bytes, rest);
    if (written < 0 && errno == EINTR) continue;
    if (written <= 0) return;  // the parent is gone
    bytes += written;
    rest -= static_cast<std::size_t>(written);
  }
}

// The life of a child. _exit: nothing of the parent's (its atexit handlers, its buffers) is ours to run.
[[noreturn]] void run_child(Mesh& mesh, int rank, const RankBody& body, int pipe) {
  ::prctl(PR_SET_PDEATHSIG, SIGKILL);
  ErrorText error;
  std::unique_ptr<Communicator> communicator;
  try {
    communicator = join_mesh(mesh, rank);
    body(*communicator);
  } catch (...) {
    error = describe_error(std::current_exception());
    if (communicator != nullptr) communicator->abort(error.text);
  }
  communicator.reset();
  std::fflush(nullptr);
  write_record(pipe, error);
  ::_exit(error.code == ErrorCode::ok ? 0 : 1);
}

void start_children(std::vector<Child>& children, const HeededChildren& heeded, const RankBody& body) {
  const int ranks = static_cast<int>(children.size());
  const DescriptorLimit limit(ranks);
  Mesh mesh = make_mesh(ranks);
  std::fflush(nullptr);  // else every child would print what is buffered now
  for (int rank = 0; rank < ranks; ++rank) {
    Child& child = children[static_cast<std::size_t>(rank)];
    int fds[2];
    if (::pipe2(fds, O_CLOEXEC) != 0) throw Error(fmt::format("cannot make a pipe: {}", std::strerror(errno)));
    child.pipe = Fd(fds[0]);
    Fd write_end(fds[1]);
    ::fcntl(fds[0], F_SETFL, O_NONBLOCK);
    child.pid = ::fork();
    if (child.pid < 0) throw Error(fmt::format("cannot fork rank {}/{}: {}", rank, ranks, std::strerror(errno)));
    if (child.pid == 0) {
      heeded.restore();
      for (Child& other : children) other.pipe.reset();
      run_child(mesh, rank, body, write_end.get());
    }
  }
}

void kill_and_reap(Child& child) {
  if (child.pid < 0) return;
  ::kill(child.pid, SIGKILL);
  while (::waitpid(child.pid, nullptr, 0) < 0 && errno == EINTR) {
  }
  child.pid = -1;
}

// Kills what is left when something is thrown half-way.
struct Children {
  explicit Children(int ranks) : list(static_cast<std::size_t>(ranks)) {}
  ~Children() {
    for (Child& child : list) kill_and_reap(child);
  }
  HeededChildren heeded;
  std::vector<Child> list;
};

// Reads what a child has said; true while more may come.
bool read_record(Child& child) {
  while (child.read < sizeof child.record) {
    const ssize_t bytes =
        ::read(child.pipe.get(), reinterpret_cast<char*>(&child.record) + child.read, sizeof child.record - child.read);
    if (bytes < 0 && errno == EINTR) continue;
    if (bytes < 0 && errno == EAGAIN) return true;
    if (bytes <= 0) return false;
    child.read += static_cast<std::size_t>(bytes);
  }
  return false;
}

void set_error(RankOutcome& outcome, ErrorCode code, std::string message) {
  outcome.error = make_error(code, message);
  outcome.told_by_peer = code == ErrorCode::peer_failure;
  outcome.message = std::move(message);
}

// `reaped_elsewhere`: the status is not known.
RankOutcome make_outcome(Child& child, int rank, int ranks, int status, bool reaped_elsewhere) {
  RankOutcome outcome;
  const std::string prefix = fmt::format("rank {}/{}: ", rank, ranks);
  if (child.overdue) {
    if (child.stopped) {
      set_error(outcome, ErrorCode::comm_error, prefix + "was stopped, and killed when no other rank was left");
    } else {
      set_error(outcome, ErrorCode::peer_failure, prefix + "still ran long after another rank had failed, and was killed");
    }
    return outcome;
  }
  const std::size_t head = sizeof child.record - sizeof child.record.text;
  child.died = child.read < head || child.read < head + child.record.length || WIFSIGNALED(status);
  if (WIFSIGNALED(status)) {
    outcome.signal = WTERMSIG(status);
    set_error(outcome, ErrorCode::comm_error,
              fmt::format("{}killed by signal {} ({})", prefix, outcome.signal, ::strsignal(outcome.signal)));
    return outcome;
  }
  if (child.died) {
    const std::string how =
        reaped_elsewhere ? "ended without a report" : fmt::format("exited with status {} in its body", WEXITSTATUS(status));
    set_error(outcome, ErrorCode::comm_error, prefix + how);
    return outcome;
  }
  set_error(outcome, static_cast<ErrorCode>(child.record.code), std::string(child.record.text, child.record.length));
  return outcome;
}

// Waits for a sign of any child, at most some milliseconds: stops, unlike ends, do not show at the pipes.
void wait_for_children(std::vector<Child>& children, std::vector<pollfd>& polls) {
  polls.clear();
  for (const Child& child : children) {
    if (child.pid >= 0 && child.pipe.get() >= 0) polls.push_back({child.pipe.get(), POLLIN, 0});
  }
  ::poll(polls.data(), polls.size(), polls.empty() ? 1 : 20);
  for (Child& child : children) {
    for (const pollfd& poll : polls) {
      if (poll.revents != 0 && poll.fd == child.pipe.get() && !read_record(child)) child.pipe.reset();
    }
  }
}

std::vector<RankOutcome> wait_for_all(std::vector<Child>& children, Communicator::Seconds grace) {
  const int ranks = static_cast<int>(children.size());
  std::vector<RankOutcome> outcomes(children.size());
  std::vector<pollfd> polls;
  bool failed = false;
  Clock::time_point first_error;
  while (true) {
    int running = 0;
    int stopped = 0;
    for (int rank = 0; rank < ranks; ++rank) {
      Child& child = children[static_cast<std::size_t>(rank)];
      if (child.pid < 0) continue;
      int status = 0;
      const pid_t result = ::waitpid(child.pid, &status, WNOHANG | WUNTRACED | WCONTINUED);
      const bool reaped_elsewhere = result < 0 && errno == ECHILD;  // by the program's handler of SIGCHLD, say
      const bool changed = result == child.pid && (WIFSTOPPED(status) || WIFCONTINUED(status));
      if (changed) child.stopped = WIFSTOPPED(status);
      if (changed || (result != child.pid && !reaped_elsewhere)) {
        ++running;
        stopped += child.stopped ? 1 : 0;
        continue;
      }
      child.pid = -1;
      if (child.pipe.get() >= 0) read_record(child);
      RankOutcome& outcome = outcomes[static_cast<std::size_t>(rank)];
      outcome = make_outcome(child, rank, ranks, status, reaped_elsewhere);
      if (outcome.error != nullptr && !std::exchange(failed, true)) first_error = Clock::now();
    }
    if (running == 0) return outcomes;
    if (failed && (running == stopped || Clock::now() - first_error > grace)) {
      for (Child& child : children) {
        if (child.pid < 0) continue;
        child.overdue = true;
        ::kill(child.pid, SIGKILL);
      }
    }
    wait_for_children(children, polls);
  }
}

std::vector<RankOutcome> run_children(Children& children, const RankBody& body, const ForkOptions& options) {
  start_children(children.list, children.heeded, body);
  return wait_for_all(children.list, options.grace);
}

void check_arguments(int ranks, const RankBody& body) {
  if (ranks < 1) throw InvalidArgument(fmt::format("ranks ({}) must be at least 1", ranks));
  if (!body) throw InvalidArgument("body is empty");
}

}  // namespace

std::vector<RankOutcome> try_forked_ranks(int ranks, const RankBody& body, const ForkOptions& options) {
  check_arguments(ranks, body);
  Children children(ranks);
  return run_children(children, body, options);
}

void run_forked_ranks(int ranks, const RankBody& body, const ForkOptions& options) {
  check_arguments(ranks, body);
  Children children(ranks);
  const std::vector<RankOutcome> outcomes = run_children(children, body, options);
  // Causes before consequences: a process that was killed, or ended without a record, an error of a rank's own, what
  // communication noticed, what a peer told.
  const auto order = [&](std::size_t rank) {
    if (children.list[rank].died) return outcomes[rank].signal != 0 ? 0 : 1;
    const ErrorCode code = describe_error(outcomes[rank].error).code;
    if (code == ErrorCode::comm_error) return 3;
    return code == ErrorCode::peer_failure ? 4 : 2;
  };
  std::size_t first = outcomes.size();
  for (std::size_t rank = 0; rank < outcomes.size(); ++rank) {
    if (outcomes[rank].error != nullptr && (first == outcomes.size() || order(rank) < order(first))) first = rank;
  }
  if (first != outcomes.size()) std::rethrow_exception(outcomes[first].error);
}

SharedMemory::SharedMemory(std::size_t bytes) : bytes_(bytes) {
  if (bytes == 0) return;
  void* data = ::mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
  if (data == MAP_FAILED && errno == ENOMEM) throw std::bad_alloc();
  if (data == MAP_FAILED) throw Error(fmt::format("cannot map {} bytes of shared memory: {}", bytes, std::strerror(errno)));
  data_ = static_cast<std::byte*>(data);
}

SharedMemory::~SharedMemory() {
  if (data_ != nullptr) ::munmap(data_, bytes_);
}

}  // namespace ringspan
