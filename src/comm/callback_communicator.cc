// A communicator from a C struct of callbacks.
#include <algorithm>
#include <vector>

#include <fmt/format.h>

#include "base/cut_text.h"
#include "comm/batch_checker.h"
#include "comm/c_struct.h"
#include "comm/error_code.h"
#include "ringspan/error.h"
#include "ringspan/ringspan_c.h"
#include "ringspan/transports.h"

namespace ringspan {
namespace {

class CallbackCommunicator final : public Communicator {
 public:
  explicit CallbackCommunicator(const ringspan_communicator& callbacks)
      : c_(callbacks),
        checker_(c_.rank, c_.size),
        traffic_(static_cast<std::size_t>(c_.size)),
        c_traffic_(c_.traffic == nullptr ? 0 : static_cast<std::size_t>(c_.size)) {}

  ~CallbackCommunicator() override {
    if (c_.destroy != nullptr) c_.destroy(c_.user);
  }

  int rank() const override { return c_.rank; }
  int size() const override { return c_.size; }

  Request post(std::uint64_t round, std::span<const Message> batch) override {
    throw_if_failed();
    checker_.check(round, batch);
    messages_.clear();
    for (const Message& message : batch) {
      const bool send = message.direction == Message::Direction::send;
      messages_.push_back({send ? RINGSPAN_SEND : RINGSPAN_RECEIVE, message.peer, message.data, message.bytes});
    }
    Request request = 0;
    require("post", c_.post(c_.user, round, messages_.data(), messages_.size(), &request));
    if (request == 0) fail(ErrorCode::comm_error, "post succeeded, but made no request");
    if (c_.traffic == nullptr) count(batch);
    return request;
  }

  bool test(Request request) override {
    throw_if_failed();
    std::int32_t complete = 0;
    require("test", c_.test(c_.user, request, &complete));
    return complete != 0;
  }

  void wait(Request request, Seconds deadline) override {
    throw_if_failed();
    require("wait", c_.wait(c_.user, request, deadline.count()));
  }

  void progress() override {
    throw_if_failed();
    require("progress", c_.progress(c_.user));
  }

  // Also after a failure: until then the callbacks have what was posted.
  void abort(const std::string& reason) noexcept override {
    if (aborted_) return;
    aborted_ = true;
    c_.abort(c_.user, reason.c_str());
    if (failure_.code != ErrorCode::ok) return;
    failure_.code = ErrorCode::comm_error;
    try {
      failure_.text = rank_prefix(c_.rank, c_.size) + "aborted: ";
      failure_.text += without_rank_prefix(reason, c_.rank, c_.size);
    } catch (...) {
      failure_.text.clear();  // out of memory: failed all the same
    }
  }

  std::unique_ptr<Communicator> duplicate() override {
    throw_if_failed();
    if (c_.duplicate == nullptr) {
      throw Unsupported(rank_prefix(c_.rank, c_.size) + "the communicator has no duplicate callback");
    }
    ringspan_communicator copy{};
    copy.struct_size = sizeof copy;
    require("duplicate", c_.duplicate(c_.user, &copy));
    copy.struct_size = std::min<std::uint64_t>(copy.struct_size, sizeof copy);  // there is no more of it
    try {
      if (copy.rank != c_.rank || copy.size != c_.size) {
        throw InvalidArgument(
            fmt::format("{}the duplicate callback made rank {}/{}", rank_prefix(c_.rank, c_.size), copy.rank, copy.size));
      }
      return make_communicator(copy);
    } catch (...) {  // nobody else knows of it
      if (copy.destroy != nullptr) copy.destroy(copy.user);
      throw;
    }
  }

  std::span<const PeerTraffic> traffic() const override {
    if (c_.traffic == nullptr) return traffic_;
    c_.traffic(c_.user, c_traffic_.data());
    for (std::size_t peer = 0; peer < traffic_.size(); ++peer) {
      const ringspan_peer_traffic& from = c_traffic_[peer];
      traffic_[peer] = {from.sent_bytes, from.received_bytes, from.sent_messages, from.received_messages};
    }
    return traffic_;
  }

 private:
  void count(std::span<const Message> batch) {
    for (const Message& message : batch) {
      PeerTraffic& peer = traffic_[static_cast<std::size_t>(message.peer)];
      const bool send = message.direction == Message::Direction::send;
      (send ? peer.sent_bytes : peer.received_bytes) += message.bytes;
      (send ? peer.sent_messages : peer.received_messages) += 1;
    }
  }

  void require(const char* call, std::int32_t status) {
    if (status == RINGSPAN_OK) return;
    std::string text = error_text();
    if (text.empty()) text = fmt::format("the {} callback failed with status {}", call, status);
    add_prefix(text);
    const bool known = status > RINGSPAN_OK && status <= RINGSPAN_PEER_FAILURE;
    const ErrorCode code = known ? static_cast<ErrorCode>(status) : ErrorCode::comm_error;
    if (code == ErrorCode::invalid_argument || code == ErrorCode::unsupported) std::rethrow_exception(make_error(code, text));
    fail(code, std::move(text));
  }

  std::string error_text() const {
    if (c_.error_text == nullptr) return {};
    char buffer[4096] = {};
    const std::uint64_t length = c_.error_text(c_.user, buffer, sizeof buffer);
    return std::string(internal::cut_text({buffer, sizeof buffer - 1}, length));
  }

  // Texts of a ringspan communicator behind the callbacks have it already.
  void add_prefix(std::string& text) const {
    const std::string prefix = rank_prefix(c_.rank, c_.size);
    if (!text.starts_with(prefix)) text.insert(0, prefix);
  }

  [[noreturn]] void fail(ErrorCode code, std::string text) {
    add_prefix(text);
    failure_ = {code, std::move(text)};
    std::rethrow_exception(make_error(failure_.code, failure_.text));
  }

  void throw_if_failed() const {
    if (failure_.code != ErrorCode::ok) std::rethrow_exception(make_error(failure_.code, failure_.text));
  }

  ringspan_communicator c_;
  BatchChecker checker_;
  std::vector<ringspan_message> messages_;
  mutable std::vector<PeerTraffic> traffic_;
  mutable std::vector<ringspan_peer_traffic> c_traffic_;
  ErrorText failure_;
  bool aborted_ = false;
};

}  // namespace

std::unique_ptr<Communicator> make_communicator(const ringspan_communicator& callbacks) {
  const ringspan_communicator known = c_api::read(&callbacks, "communicator");
  if (known.size < 1) throw InvalidArgument(fmt::format("communicator.size ({}) must be at least 1", known.size));
  if (known.rank < 0 || known.rank >= known.size) {
    throw InvalidArgument(fmt::format("communicator.rank ({}) must be in [0, {})", known.rank, known.size));
  }
  const auto need = [](bool present, const char* name) {
    if (!present) throw InvalidArgument(fmt::format("communicator.{} must not be null", name));
  };
  need(known.post != nullptr, "post");
  need(known.test != nullptr, "test");
  need(known.wait != nullptr, "wait");
  need(known.progress != nullptr, "progress");
  need(known.abort != nullptr, "abort");
  return std::make_unique<CallbackCommunicator>(known);
}

}  // namespace ringspan
