#include "comm/c_adapter.h"

#include <algorithm>
#include <cstring>
#include <string>
#include <vector>

#include "base/cut_text.h"
#include "comm/error_code.h"
#include "ringspan/error.h"

namespace ringspan {
namespace {

// What `user` points to.
struct Exported {
  std::unique_ptr<Communicator> communicator;
  std::vector<Message> batch;
  ErrorText error;
};

Exported& exported(void* user) { return *static_cast<Exported*>(user); }

// Runs `body`; an exception becomes a status and a text. Nothing is thrown through C.
template <typename Body>
std::int32_t guard(void* user, Body body) {
  Exported& self = exported(user);
  try {
    body(self);
    return RINGSPAN_OK;
  } catch (...) {
    self.error = describe_error(std::current_exception());
    return static_cast<std::int32_t>(self.error.code);
  }
}

Message to_message(const ringspan_message& message) {
  if (message.direction != RINGSPAN_SEND && message.direction != RINGSPAN_RECEIVE) {
    throw InvalidArgument("direction (" + std::to_string(message.direction) + ") must be RINGSPAN_SEND or RINGSPAN_RECEIVE");
  }
  const auto direction = message.direction == RINGSPAN_SEND ? Message::Direction::send : Message::Direction::receive;
  return {direction, message.peer, message.data, message.bytes};
}

std::int32_t post(void* user, std::uint64_t round, const ringspan_message* batch, std::uint64_t count, std::uint64_t* request) {
  return guard(user, [&](Exported& self) {
    self.batch.clear();
    for (std::uint64_t i = 0; i < count; ++i) self.batch.push_back(to_message(batch[i]));
    *request = self.communicator->post(round, self.batch);
  });
}

std::int32_t test(void* user, std::uint64_t request, std::int32_t* complete) {
  return guard(user, [&](Exported& self) { *complete = self.communicator->test(request) ? 1 : 0; });
}

std::int32_t wait(void* user, std::uint64_t request, double deadline_seconds) {
  return guard(user, [&](Exported& self) { self.communicator->wait(request, Communicator::Seconds(deadline_seconds)); });
}

std::int32_t progress(void* user) {
  return guard(user, [](Exported& self) { self.communicator->progress(); });
}

void abort(void* user, const char* reason) {
  guard(user, [&](Exported& self) { self.communicator->abort(reason == nullptr ? "no reason given" : reason); });
}

std::int32_t duplicate(void* user, ringspan_communicator* out) {
  return guard(user, [&](Exported& self) {
    const std::uint64_t size = out->struct_size;
    ringspan_communicator made = export_communicator(self.communicator->duplicate());
    made.struct_size = std::min<std::uint64_t>(size, sizeof made);
    std::memcpy(out, &made, made.struct_size);
  });
}

std::uint64_t error_text(void* user, char* buffer, std::uint64_t capacity) {
  const std::string& text = exported(user).error.text;
  if (capacity > 0) {
    const std::string_view cut = internal::cut_text(text, capacity - 1);
    buffer[cut.copy(buffer, cut.size())] = '\0';
  }
  return text.size();
}

void traffic(void* user, ringspan_peer_traffic* entries) {
  for (const PeerTraffic& peer : exported(user).communicator->traffic()) {
    *entries++ = {peer.sent_bytes, peer.received_bytes, peer.sent_messages, peer.received_messages};
  }
}

void destroy(void* user) { delete static_cast<Exported*>(user); }

}  // namespace

ringspan_communicator export_communicator(std::unique_ptr<Communicator> communicator) {
  ringspan_communicator result{};
  result.struct_size = sizeof result;
  result.rank = communicator->rank();
  result.size = communicator->size();
  result.post = post;
  result.test = test;
  result.wait = wait;
  result.progress = progress;
  result.abort = abort;
  result.duplicate = duplicate;
  result.error_text = error_text;
  result.traffic = traffic;
  result.destroy = destroy;
  result.user = new Exported{std::move(communicator), {}, {}};
  return result;
}

}  // namespace ringspan
