#include "watch.h"

#include <fmt/format.h>
#include <sys/ioctl.h>
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <csignal>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <new>
#include <string_view>

#include "comm/rounds.h"
#include "command.h"
#include "plan/cost.h"
#include "plan/plan_data.h"
#include "text.h"

namespace ringspan::cli {
namespace {

// In memory that forked ranks share, so that a signal to any of the processes stops all of them.
struct Flags {
  std::atomic<int> interrupted{0};
  std::atomic<int> unreadable{0};  // 1 + which of mapped_files
};
Flags* flags = nullptr;
static_assert(std::atomic<int>::is_always_lock_free);
char doomed_file[4096] = {};

struct MappedFile {
  std::span<const std::byte> bytes;
  char message[4200];
};
MappedFile mapped_files[4];  // no command reads more
volatile std::sig_atomic_t mapped_count = 0;
pid_t watching_process = 0;

volatile std::sig_atomic_t signals_seen = 0;  // by this process: a terminal sends Ctrl-C to all of them
volatile std::sig_atomic_t end_at_signal = 0;
bool line_may_be_shown = false;

// Only what a handler of signals may call.
[[noreturn]] void end_with(std::string_view message, ExitCode code) {
  if (doomed_file[0] != '\0') ::unlink(doomed_file);
  const std::string_view texts[] = {line_may_be_shown ? "\r\033[K" : "", "ringspan: error: ", message, "\n"};
  for (const std::string_view text : texts) static_cast<void>(!::write(STDERR_FILENO, text.data(), text.size()));
  ::_exit(code);
}

extern "C" void on_signal(int number) {
  flags->interrupted.store(1);
  if (end_at_signal != 0) end_with("interrupted", kInterrupted);
  if (signals_seen == 0) {
    signals_seen = 1;
    return;
  }
  if (doomed_file[0] != '\0') ::unlink(doomed_file);
  std::signal(number, SIG_DFL);
  ::raise(number);
}

extern "C" void on_bus_error(int number, siginfo_t* info, void*) {
  for (int i = 0; i < mapped_count; ++i) {
    const MappedFile& file = mapped_files[i];
    const auto begin = reinterpret_cast<std::uintptr_t>(file.bytes.data());
    if (reinterpret_cast<std::uintptr_t>(info->si_addr) - begin >= file.bytes.size()) continue;
    const bool first = flags->unreadable.exchange(i + 1) == 0;
    if (::getpid() != watching_process) ::_exit(kInputOutput);  // a forked rank: its parent says so
    if (!first) {
      while (true) ::pause();  // another thread ends the program
    }
    end_with(file.message, kInputOutput);
  }
  if (doomed_file[0] != '\0') ::unlink(doomed_file);
  std::signal(number, SIG_DFL);  // and what failed is tried again
}

// Whether standard error shows a line that can be taken back; a terminal that calls itself dumb, as of Emacs, would show how.
bool has_lines() {
  const char* name = std::getenv("TERM");  // NOLINT(concurrency-mt-unsafe): nobody here changes the environment
  return ::isatty(STDERR_FILENO) == 1 && (name == nullptr || std::string_view(name) != "dumb");
}

void share_flags() {
  if (flags != nullptr) return;
  void* page = ::mmap(nullptr, sizeof(Flags), PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
  if (page == MAP_FAILED) throw std::bad_alloc();
  flags = new (page) Flags;
  line_may_be_shown = has_lines();
}

// In place of what the terminal's last line holds, and no longer than that, or it could not be taken back.
void print_line(const std::string& text) {
  winsize size{};
  const bool is_known = ::ioctl(STDERR_FILENO, TIOCGWINSZ, &size) == 0 && size.ws_col > 1;
  print_stderr("\r\033[K" + text.substr(0, is_known ? size.ws_col - 1U : text.size()));
}

}  // namespace

double now() { return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count(); }

void catch_interrupts() {
  share_flags();
  struct sigaction action {};
  action.sa_handler = on_signal;
  ::sigemptyset(&action.sa_mask);
  action.sa_flags = SA_RESTART;
  for (const int number : {SIGINT, SIGTERM, SIGHUP, SIGQUIT, SIGXCPU}) {
    struct sigaction before {};
    ::sigaction(number, nullptr, &before);
    if (before.sa_handler != SIG_IGN) ::sigaction(number, &action, nullptr);  // nohup stays in force
  }
}

bool is_interrupted() { return flags != nullptr && flags->interrupted.load(std::memory_order_relaxed) != 0; }

void throw_if_interrupted() {
  if (is_interrupted()) throw Interrupted();
}

void print_stderr(const std::string& text) {
  std::fwrite(text.data(), 1, text.size(), stderr);
  std::fflush(stderr);
}

void remove_when_killed(const std::string& path) {
  doomed_file[0] = '\0';
  if (path.size() < sizeof doomed_file) std::memcpy(doomed_file, path.c_str(), path.size() + 1);
}

void watch_mapped(const std::string& path, std::span<const std::byte> bytes) {
  if (mapped_count == std::ssize(mapped_files)) return;
  share_flags();
  watching_process = ::getpid();
  MappedFile& file = mapped_files[mapped_count];
  file.bytes = bytes;
  const std::string message = printable(path) + ": cannot be read any more: it became shorter, or its device fails";
  file.message[message.copy(file.message, sizeof file.message - 1)] = '\0';
  mapped_count = mapped_count + 1;
  struct sigaction action {};
  action.sa_sigaction = on_bus_error;
  ::sigemptyset(&action.sa_mask);
  action.sa_flags = SA_SIGINFO;
  ::sigaction(SIGBUS, &action, nullptr);
}

std::string unreadable_file() {
  const int which = flags == nullptr ? 0 : flags->unreadable.load();
  return which == 0 ? "" : mapped_files[which - 1].message;
}

EndAtSignal::EndAtSignal() {
  std::fflush(stdout);
  end_at_signal = 1;
  throw_if_interrupted();  // by a signal that came before
}
EndAtSignal::~EndAtSignal() { end_at_signal = 0; }

ProgressLine::ProgressLine(bool enabled) : enabled_(enabled && has_lines()) {}
ProgressLine::~ProgressLine() { clear(); }

void ProgressLine::show(const std::string& what, double share, double seconds) {
  if (!enabled_ || seconds < 0.3) return;
  const double time = now();
  if (shown_ && time - last_ < 0.1) return;
  last_ = time;
  shown_ = true;
  const std::string percent = share < 0 ? "" : fmt::format("{:3.0f} %  ", 100 * share);
  print_line(fmt::format("{}  {}{}", what, percent, seconds_text(seconds)));
}

void ProgressLine::say(const std::string& what) {
  if (!enabled_) return;
  shown_ = true;
  print_line(what + " ...");
}

void ProgressLine::clear() {
  if (!shown_) return;
  print_stderr("\r\033[K");
  shown_ = false;
}

// How much of a pass lies before each of its rounds: posting a round means that the stages before it are done.
struct WatchedCommunicator::Work {
  std::vector<double> shares[2];  // by pass, then round that carries something
  int pass = 0;
  std::size_t round = 0;
  double share = -1;
  std::string label;
  double begin = 0;
  double flops[2] = {};
  double flops_per_second = 0;  // of the forward pass, once it has ended

  explicit Work(const Plan& plan) {
    const internal::PlanData& data = plan.data();
    measure(data.forward, shares[0]);
    flops[0] = plan.flops(Pass::forward);
    if (!data.has_backward) return;
    measure(data.backward, shares[1]);
    flops[1] = plan.flops(Pass::backward);
  }

  // What is known by rounds, or else by the speed of the forward pass.
  double estimate(double seconds) const {
    constexpr double kNotYet = 0.99;
    if (pass == 0 || flops_per_second <= 0 || flops[1] <= 0) return share;
    return std::max(share, std::min(kNotYet, seconds * flops_per_second / flops[1]));
  }

  static void measure(const internal::Program& program, std::vector<double>& shares) {
    double done = 0;
    for (const internal::Stage& stage : program.stages) {
      for (const internal::Round& round : stage.rounds) {
        if (!round.transfers.empty()) shares.push_back(done);
      }
      for (const internal::Launch& launch : stage.compute) {
        if (!internal::is_attention(launch.kind)) continue;
        for (std::int64_t i = launch.first; i < launch.first + launch.count; ++i) {
          done += static_cast<double>(pair_count(program.attend_items[static_cast<std::size_t>(i)].slice));
        }
      }
    }
    for (double& share : shares) share = done > 0 ? share / done : 0;
  }
};

WatchedCommunicator::WatchedCommunicator(Communicator& inner, const Plan& plan, ProgressLine* line)
    : inner_(inner), line_(line), work_(std::make_unique<Work>(plan)), sent_bytes_(static_cast<std::size_t>(inner.size()), 0) {}

WatchedCommunicator::~WatchedCommunicator() {
  if (line_ != nullptr) line_->clear();
}

void WatchedCommunicator::begin(Pass pass, const std::string& label) {
  if (pass == Pass::forward) sent_bytes_.assign(sent_bytes_.size(), 0);
  if (pass == Pass::backward) work_->flops_per_second = work_->flops[0] / (now() - work_->begin);
  work_->pass = static_cast<int>(pass);
  work_->round = 0;
  work_->share = -1;
  work_->label = prefix_ + label;
  work_->begin = now();
}

Request WatchedCommunicator::post(std::uint64_t round, std::span<const Message> batch) {
  throw_if_interrupted();
  if (round < kPlanRoundsEnd) {
    const std::vector<double>& shares = work_->shares[work_->pass];
    if (work_->round < shares.size()) work_->share = shares[work_->round++];
    for (const Message& message : batch) {
      if (message.direction == Message::Direction::send) sent_bytes_[static_cast<std::size_t>(message.peer)] += message.bytes;
    }
  }
  return inner_.post(round, batch);
}

void WatchedCommunicator::wait(Request request, Seconds deadline) {
  throw_if_interrupted();
  inner_.wait(request, deadline);
}

void WatchedCommunicator::progress() {
  throw_if_interrupted();
  inner_.progress();
  show();
}

void WatchedCommunicator::show() {
  if (line_ == nullptr || work_->label.empty()) return;
  const double seconds = now() - work_->begin;
  line_->show(work_->label, work_->estimate(seconds), seconds);
}

}  // namespace ringspan::cli
