// Watching a rank at work: a communicator that passes everything on, stops when the program was interrupted, and tells how far
// the rank is.
//
// The kernels and waits of the library call progress() about every millisecond, so that an interrupt unwinds the rank (its
// peers are told, temporary files go away) and a terminal shows progress without a thread of its own.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "ringspan/communicator.h"
#include "ringspan/error.h"
#include "ringspan/plan.h"

namespace ringspan::cli {

// Ctrl-C, SIGQUIT, SIGTERM, SIGHUP, or SIGXCPU: a limit on processor time.
class Interrupted : public Error {
 public:
  Interrupted() : Error("interrupted") {}
};

// From now on these signals are noted instead of ending the program at once; a second one ends it. Processes forked later take
// note of a signal to their parent.
void catch_interrupts();
bool is_interrupted();
void throw_if_interrupted();

// Where that fails, as on a full disk, what is said is lost and nothing else: it may be about an error that is on its way.
void print_stderr(const std::string& text);

// A file to be removed by a second signal, which ends the program wherever it is; empty: none. At most 4,095 bytes.
void remove_when_killed(const std::string& path);

// A file that is read through memory: where the system cannot read it any more, because it became shorter, the program ends
// with its name and the exit code of unreadable files.
void watch_mapped(const std::string& path, std::span<const std::byte> bytes);
// What a forked rank found out that way, as a message; or empty.
std::string unreadable_file();

// While one lives, the first signal already ends the program, with the message and the exit code of an interrupt: for work that
// does not ask. What has been printed arrives.
class EndAtSignal {
 public:
  EndAtSignal();
  ~EndAtSignal();
  EndAtSignal(const EndAtSignal&) = delete;
  EndAtSignal& operator=(const EndAtSignal&) = delete;
};

// Seconds of a clock that never goes back.
double now();

// One line on a terminal, rewritten in place; does nothing where standard error is no terminal, or a dumb one.
class ProgressLine {
 public:
  explicit ProgressLine(bool enabled);
  ~ProgressLine();
  ProgressLine(const ProgressLine&) = delete;
  ProgressLine& operator=(const ProgressLine&) = delete;

  // Prints at most ten times a second. `share` < 0: unknown.
  void show(const std::string& what, double share, double seconds);
  // Without a clock: for what does not report progress.
  void say(const std::string& what);
  void clear();

 private:
  bool enabled_;
  bool shown_ = false;
  double last_ = -1;
};

class WatchedCommunicator final : public Communicator {
 public:
  // `line` may be null; otherwise this rank reports for all. `inner` outlives this.
  WatchedCommunicator(Communicator& inner, const Plan& plan, ProgressLine* line);
  ~WatchedCommunicator() override;

  // In front of what progress shows.
  void set_prefix(const std::string& prefix) { prefix_ = prefix; }
  // What the next rounds belong to; restarts the clock and, with the forward pass, the count of bytes.
  void begin(Pass pass, const std::string& label);
  // Payload that was posted to each peer since the last forward pass began, without handshakes.
  std::span<const std::int64_t> sent_bytes() const { return sent_bytes_; }

  int rank() const override { return inner_.rank(); }
  int size() const override { return inner_.size(); }
  Request post(std::uint64_t round, std::span<const Message> batch) override;
  bool test(Request request) override { return inner_.test(request); }
  void wait(Request request, Seconds deadline) override;
  void progress() override;
  void abort(const std::string& reason) noexcept override { inner_.abort(reason); }
  std::unique_ptr<Communicator> duplicate() override { return inner_.duplicate(); }
  bool takes_device_memory(const void* data) const override { return inner_.takes_device_memory(data); }
  std::span<const PeerTraffic> traffic() const override { return inner_.traffic(); }

 private:
  struct Work;
  void show();

  Communicator& inner_;
  ProgressLine* line_;
  std::unique_ptr<Work> work_;
  std::vector<std::int64_t> sent_bytes_;
  std::string prefix_;
};

}  // namespace ringspan::cli
