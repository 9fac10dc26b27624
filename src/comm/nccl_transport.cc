#include "comm/nccl_transport.h"

#include <fmt/format.h>

#include <algorithm>
#include <thread>

#include "base/check.h"
#include "comm/rounds.h"
#include "ringspan/error.h"

namespace ringspan {
namespace {

// How long the groups that run may take to end: so many deadlines, and the time that their bytes take at a rate which no
// network of use stays below. The first is for what the peers have to do before.
constexpr double kGroupDeadlines = 4.0;
constexpr double kSlowestBytesPerSecond = 8.0 * (1 << 20);

}  // namespace

// ---- Posting (joining and leaving: nccl_join.cc) ------------------------------------------------------------------------

void NcclTransport::check_batch(std::uint64_t round, std::span<const Message> batch) {
  std::size_t on_device = 0;
  for (const Message& message : batch) on_device += stream_->holds(message.data) ? 1 : 0;
  if (on_device == 0 || on_device == batch.size()) return;
  throw InvalidArgument(fmt::format("{}{}: {} of {} messages lie in memory of {}; either all of a round do or none", prefix(),
                                    round_name(round), on_device, batch.size(), stream_->name()));
}

void NcclTransport::start(Operation& operation) {
  batch_.push_back(&operation);
  if (operation.next_in_batch != nullptr) return;
  if (free_.empty()) free_.push_back(&flights_.emplace_back());
  Flight& flight = *free_.back();
  free_.pop_back();
  flight.first = batch_.front();
  pending_.push_back(&flight);
  stream_->holds(operation.message.data) ? greet(flight) : post_host(flight);
  batch_.clear();
  while (advance(flight)) {
  }
}

void NcclTransport::post_host(Flight& flight) {
  flight.phase = Flight::Phase::host;
  messages_.clear();
  for (const Operation* operation : batch_) messages_.push_back(operation->message);
  flight.host_request = on_host([&] { return host_.post(flight.first->round, messages_); });
}

void NcclTransport::greet(Flight& flight) {
  flight.phase = Flight::Phase::greeting;
  flight.greetings.clear();
  flight.greeted = 0;
  for (Operation* operation : batch_) {
    const int peer = operation->message.peer;
    auto greeting =
        std::find_if(flight.greetings.begin(), flight.greetings.end(), [&](const Greeting& g) { return g.peer == peer; });
    if (greeting == flight.greetings.end()) {
      flight.greetings.emplace_back();
      greeting = std::prev(flight.greetings.end());
      greeting->peer = peer;
      greeting->out.round = operation->round;
    }
    (sends(operation->message) ? greeting->send : greeting->receive) = operation;
    (sends(operation->message) ? greeting->out.to_you : greeting->out.from_you) = operation->message.bytes;
  }
  for (Greeting& greeting : flight.greetings) {  // only now does their place not change any more
    const Message messages[] = {{Message::Direction::send, greeting.peer, &greeting.out, sizeof(Hello)},
                                {Message::Direction::receive, greeting.peer, &greeting.in, sizeof(Hello)}};
    const std::uint64_t number = greetings_sent_[static_cast<std::size_t>(greeting.peer)]++;
    greeting.request = on_host([&] { return host_.post(kDeviceRounds + number, messages); });
  }
}

// ---- Moving -------------------------------------------------------------------------------------------------------------

const Transport::Operation* NcclTransport::pending_with(int peer) const {
  for (const Flight* flight : pending_) {
    for (const Operation* operation = flight->first; operation != nullptr; operation = operation->next_in_batch) {
      if (operation->message.peer == peer) return operation;
    }
  }
  return nullptr;
}

void NcclTransport::pump() {
  for (int peer = 0; peer < size(); ++peer) left_[static_cast<std::size_t>(peer)] = Transport::has_left(host_, peer);
  on_host([&] { host_.progress(); });
  for (std::size_t index = 0; index < pending_.size();) {
    Flight& flight = *pending_[index];
    if (advance(flight)) continue;  // it may have landed, or go on
    ++index;
  }
}

// True where something has changed.
bool NcclTransport::advance(Flight& flight) {
  const auto arrived = [&](Request request) {
    return on_host([&] {
      if (!host_.test(request)) return false;
      host_.wait(request, Seconds(0));
      return true;
    });
  };
  switch (flight.phase) {
    case Flight::Phase::host:
      if (flight.first == nullptr || !arrived(flight.host_request)) return false;
      land(flight);
      return true;
    case Flight::Phase::greeting: {
      const std::size_t before = flight.greeted;
      while (flight.greeted < flight.greetings.size() && arrived(flight.greetings[flight.greeted].request)) {
        check(flight.greetings[flight.greeted++]);
      }
      if (flight.greeted == flight.greetings.size()) flight.phase = Flight::Phase::ready;
      return flight.greeted != before;
    }
    case Flight::Phase::ready:
      for (const Flight* earlier : pending_) {
        if (earlier == &flight) break;
        if (earlier->phase != Flight::Phase::host && earlier->phase != Flight::Phase::flying) return false;
      }
      launch(flight);
      return true;
    case Flight::Phase::launching:
    case Flight::Phase::flying: {
      const Flight::Phase before = flight.phase;
      poll_nccl(flight);
      return flight.phase != before;
    }
  }
  return false;
}

void NcclTransport::check(const Greeting& greeting) {
  const Hello& in = greeting.in;
  const Hello& out = greeting.out;
  if (greeting.send != nullptr && (in.round != out.round || in.from_you != out.to_you)) {
    fail(*greeting.send, mismatch_at_sender(*greeting.send, in.round, in.from_you));
  }
  if (greeting.receive != nullptr && (in.round != out.round || in.to_you != out.from_you)) {
    fail(*greeting.receive, mismatch_at_receiver(*greeting.receive, in.round, in.to_you));
  }
  if (greeting.send != nullptr && in.to_you != out.from_you) {
    fail(fmt::format("rank {} sends {} bytes in {}, which nobody here receives", greeting.peer, in.to_you,
                     round_name(in.round)));
  }
  if (greeting.receive != nullptr && in.from_you != out.to_you) {
    fail(fmt::format("rank {} expects {} bytes in {}, which nobody here sends", greeting.peer, in.from_you,
                     round_name(in.round)));
  }
}

// The whole batch is one group: a group is one step of the stream, in which everything moves at the same time.
void NcclTransport::launch(Flight& flight) {
  const char* call = "ncclGroupStart";
  int status = kNcclSuccess;
  stream_->with_device([&] {
    status = nccl_->group_start();
    if (status != kNcclSuccess) return;
    const auto works = [&] { return status == kNcclSuccess || status == kNcclInProgress; };
    for (const Operation* operation = flight.first; operation != nullptr && works(); operation = operation->next_in_batch) {
      const Message& message = operation->message;
      const auto bytes = static_cast<std::size_t>(message.bytes);
      call = sends(message) ? "ncclSend" : "ncclRecv";
      status = sends(message) ? nccl_->send(message.data, bytes, kNcclUint8, message.peer, comm_, stream_->handle())
                              : nccl_->recv(message.data, bytes, kNcclUint8, message.peer, comm_, stream_->handle());
    }
    const bool queued = works();
    const int ended = nccl_->group_end();
    if (!queued) return;
    call = "ncclGroupEnd";
    status = ended;
  });
  if (status != kNcclSuccess && status != kNcclInProgress) fail_nccl(call, status);
  flight.phase = Flight::Phase::launching;
  nccl_life_ = Clock::now();
}

// An event may be recorded only when NCCL has put the group on the stream, which it does in its own time.
void NcclTransport::poll_nccl(Flight& flight) {
  const int status = async_error();
  if (status != kNcclSuccess && status != kNcclInProgress) fail_nccl("a group", status);
  if (flight.phase == Flight::Phase::launching) {
    if (status == kNcclInProgress) return;
    flight.event = stream_->record();
    flight.phase = Flight::Phase::flying;
    return;
  }
  if (!stream_->is_complete(flight.event)) return;
  nccl_life_ = Clock::now();
  land(flight);
}

void NcclTransport::land(Flight& flight) {
  for (Operation* operation = flight.first; operation != nullptr; operation = operation->next_in_batch) {
    operation->moved = operation->message.bytes;
    operation->complete.store(true, std::memory_order_release);
  }
  pending_.erase(std::find(pending_.begin(), pending_.end(), &flight));
  flight.first = nullptr;
  flight.phase = Flight::Phase::host;
  free_.push_back(&flight);
}

int NcclTransport::async_error() {
  int state = kNcclSuccess;
  const int status = nccl_->comm_get_async_error(comm_, &state);
  return status == kNcclSuccess ? state : status;
}

void NcclTransport::block(TimePoint until) {
  if (group_in_progress() || pending_.size() > 1) {  // a greeting may come while another is tested, which takes its signal
    std::this_thread::sleep_until(std::min(until, Clock::now() + kPoll));
  } else {
    on_host([&] { Transport::block(host_, until); });
  }
}

// ---- Life and death -----------------------------------------------------------------------------------------------------

bool NcclTransport::group_in_progress() const {
  return std::any_of(pending_.begin(), pending_.end(), [](const Flight* flight) {
    return flight->phase == Flight::Phase::launching || flight->phase == Flight::Phase::flying;
  });
}

Transport::TimePoint NcclTransport::last_sign_of_life(int peer) const {
  return group_in_progress() ? nccl_life_ : Transport::last_sign_of_life(host_, peer);
}

std::string NcclTransport::silence(const Operation& operation) const {
  if (!group_in_progress()) return Transport::silence(operation);
  for (const Flight* flight : pending_) {
    if (flight->phase != Flight::Phase::greeting) continue;
    for (const Operation* other = flight->first; other != nullptr; other = other->next_in_batch) {
      if (other == &operation) return "NCCL has ended none of the groups before";
    }
  }
  return fmt::format("rank {} has come, but NCCL has ended no group", operation.message.peer);
}

double NcclTransport::patience(double deadline) const {
  if (!group_in_progress()) return deadline;
  std::int64_t bytes = 0;
  for (const Flight* flight : pending_) {
    if (flight->phase != Flight::Phase::launching && flight->phase != Flight::Phase::flying) continue;
    for (const Operation* operation = flight->first; operation != nullptr; operation = operation->next_in_batch) {
      bytes += operation->message.bytes;
    }
  }
  return kGroupDeadlines * deadline + static_cast<double>(bytes) / kSlowestBytesPerSecond;
}

// A rank may leave when its part of the last group is done; ours may not be, yet.
bool NcclTransport::has_left(int peer) const { return !group_in_progress() && left_[static_cast<std::size_t>(peer)]; }

void NcclTransport::tell_peers(const std::string& cause) { give_up(host_, cause); }

// Ends the kernels of groups that are on the stream, or will be; when the stream is empty, nothing uses our buffers.
void NcclTransport::withdraw() {
  const bool busy = group_in_progress();
  for (Flight* flight : pending_) {
    flight->first = nullptr;
    flight->phase = Flight::Phase::host;
    free_.push_back(flight);
  }
  pending_.clear();
  batch_.clear();
  if (!busy) return;
  abort_nccl();
  try {
    const std::uint64_t last = stream_->record();
    while (!stream_->is_complete(last)) std::this_thread::sleep_for(kPoll);
  } catch (const DeviceError&) {
    return;  // a failed device runs nothing more
  }
}

std::string NcclTransport::error_text(int status) const {
  const char* what = nccl_->get_error_string(status);
  const char* last = nccl_->get_last_error(comm_);
  std::string text = fmt::format("{} ({})", what == nullptr ? "unknown error" : what, status);
  if (last != nullptr && *last != '\0') text += fmt::format(": {}", last);
  return text;
}

void NcclTransport::fail_nccl(const char* call, int status) {
  fail(fmt::format("{} of NCCL failed: {}", call, error_text(status)));
}

}  // namespace ringspan
