#include <nanobind/stl/optional.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/unique_ptr.h>
#include <nanobind/stl/vector.h>

#include <string>
#include <utility>

#include "bindings.h"
#include "comm/agree.h"
#include "comm/error_code.h"
#include "comm/rounds.h"
#include "greeting.h"
#include "ringspan/transports.h"
#include "ringspan/version.h"
#include "torch_transport.h"

namespace nb = nanobind;
using namespace nb::literals;

namespace ringspan::python {
namespace {

using Seconds = Communicator::Seconds;
using RecordTuple =
    std::tuple<std::int64_t, std::int64_t, std::int64_t, std::int64_t, std::int64_t, std::int64_t, std::int64_t>;

std::vector<RecordTuple> greet_all(Communicator& communicator, std::int64_t call, std::int64_t digest, std::int64_t tokens_q,
                                   std::int64_t tokens_k, bool failed, std::int64_t seed, double deadline) {
  const Record own{RINGSPAN_VERSION, call, digest, tokens_q, tokens_k, failed ? 1 : 0, seed, 0};
  std::vector<RecordTuple> result;
  for (const Record& r : greet(communicator, own, Seconds(deadline))) {
    result.emplace_back(r.version, r.call, r.digest, r.tokens_q, r.tokens_k, r.failed, r.seed);
  }
  return result;
}

ErrorCode code_of(const std::string& name) {
  if (name == "InvalidArgument") return ErrorCode::invalid_argument;
  if (name == "Unsupported") return ErrorCode::unsupported;
  if (name == "OutOfBudget") return ErrorCode::out_of_budget;
  if (name == "DeviceError") return ErrorCode::device_error;
  return ErrorCode::error;
}

// Throws on every rank where the fields differ or a rank brought an error.
void agree(Communicator& communicator, const std::vector<std::tuple<std::string, std::int64_t, bool>>& fields,
           const std::string& error_class, const std::string& error_text, double deadline) {
  std::vector<AgreeField> list;
  list.reserve(fields.size());
  for (const auto& [name, value, hexadecimal] : fields)
    list.push_back({name, value, hexadecimal ? hexadecimal_text : decimal_text});
  std::exception_ptr own_error;
  if (!error_class.empty()) own_error = make_error(code_of(error_class), error_text);
  Agreement(communicator).agree(list, own_error, Seconds(deadline));
}

// A message to and from every other rank, for the self test: the bytes that arrive are given back by rank.
void exchange(Communicator& communicator, std::uint64_t round,
              const std::vector<std::tuple<bool, int, Address, std::int64_t>>& messages, double deadline) {
  std::vector<Message> batch;
  batch.reserve(messages.size());
  for (const auto& [send, peer, data, bytes] : messages) {
    batch.push_back(
        {send ? Message::Direction::send : Message::Direction::receive, peer, reinterpret_cast<void*>(data), bytes});
  }
  communicator.wait(communicator.post(kUserRounds + round, batch), Seconds(deadline));
}

// Collective; an error of one rank (no library) is raised on all, and leaves the host transport usable.
std::unique_ptr<Communicator> make_nccl(TorchTransport& host, const std::string& device, const std::string& library,
                                        double deadline) {
  NcclOptions options;
  options.device = device;
  options.library = library;
  options.deadline = Seconds(deadline);
  return make_nccl_communicator(host, options);
}

}  // namespace

void bind_transport(nb::module_& module) {
  using Guard = nb::call_guard<nb::gil_scoped_release>;
  nb::class_<Communicator>(module, "Communicator", "How ranks meet.")
      .def_prop_ro("rank", &Communicator::rank)
      .def_prop_ro("size", &Communicator::size)
      .def(
          "abort", [](Communicator& c, const std::string& reason) { c.abort(reason); }, "reason"_a, Guard())
      .def("greet", &greet_all, "call"_a, "digest"_a, "tokens_q"_a, "tokens_k"_a, "failed"_a, "seed"_a, "deadline"_a, Guard())
      .def("agree", &agree, "fields"_a, "error_class"_a, "error_text"_a, "deadline"_a, Guard())
      .def("exchange", &exchange, "round"_a, "messages"_a, "deadline"_a, Guard());
  nb::class_<TorchTransport, Communicator>(module, "TorchTransport", "Ranks of a torch.distributed process group.")
      .def(nb::init<int, int, nb::object, nb::object>(), "rank"_a, "size"_a, "post"_a, "tell"_a)
      .def_prop_ro("calls", &TorchTransport::calls)
      .def_prop_ro("quiet_seconds", &TorchTransport::quiet_seconds)
      .def("completed", &TorchTransport::completed, "id"_a)
      .def("message_failed", &TorchTransport::message_failed, "id"_a, "text"_a)
      .def("told_by_peer", &TorchTransport::told_by_peer, "text"_a)
      .def("peer_alive", &TorchTransport::peer_alive, "peer"_a)
      .def("outstanding_peers", &TorchTransport::outstanding_peers);
  module.def("make_nccl_communicator", &make_nccl, "host"_a, "device"_a, "library"_a, "deadline"_a, nb::keep_alive<0, 1>(),
             Guard(), "Takes the host transport over: messages in memory of the device go by NCCL.");
}

}  // namespace ringspan::python
