// Sessions: plans being executed, on one rank or as all ranks of one process.
#include <nanobind/stl/optional.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include <cstring>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "base/check.h"
#include "bindings.h"
#include "simulate.h"

namespace nb = nanobind;
using namespace nb::literals;

namespace ringspan::python {
namespace {

ForwardTensors forward_tensors(const TensorTuple& q, const TensorTuple& k, const TensorTuple& v, const TensorTuple& o,
                               const TensorTuple& lse, Address alibi, std::int64_t alibi_stride, Address sinks) {
  return {.q = to_const_tensor(q),
          .k = to_const_tensor(k),
          .v = to_const_tensor(v),
          .o = to_tensor(o),
          .lse = to_tensor(lse),
          .alibi_slopes = reinterpret_cast<const float*>(alibi),
          .alibi_batch_stride = alibi_stride,
          .sinks = reinterpret_cast<const float*>(sinks)};
}

BackwardTensors backward_tensors(const std::vector<TensorTuple>& t, Address alibi, std::int64_t alibi_stride, Address sinks,
                                 Address dsinks) {
  RINGSPAN_CHECK(t.size() == 10);
  return {.q = to_const_tensor(t[0]),
          .k = to_const_tensor(t[1]),
          .v = to_const_tensor(t[2]),
          .o = to_const_tensor(t[3]),
          .lse = to_const_tensor(t[4]),
          .d_out = to_const_tensor(t[5]),
          .dlse = to_const_tensor(t[6]),
          .dq = to_tensor(t[7]),
          .dk = to_tensor(t[8]),
          .dv = to_tensor(t[9]),
          .alibi_slopes = reinterpret_cast<const float*>(alibi),
          .alibi_batch_stride = alibi_stride,
          .sinks = reinterpret_cast<const float*>(sinks),
          .dsinks = reinterpret_cast<float*>(dsinks)};
}

std::span<std::byte> bytes_at(Address address, std::int64_t bytes) {
  return {reinterpret_cast<std::byte*>(address), static_cast<std::size_t>(bytes)};
}

// One rank: alone, or of a process group. Keeps its communicator alive (nb::keep_alive).
class Session {
 public:
  Session(const Plan& plan, Communicator* communicator, double deadline)
      : alone_(communicator == nullptr ? make_thread_world(1) : std::vector<std::unique_ptr<Communicator>>{}),
        attention_(plan, communicator == nullptr ? *alone_.front() : *communicator, options(deadline)) {}

  // Collective: agrees on problem and options first, then plans.
  Session(const Problem& problem, const PlanOptions& plan_options, Communicator& communicator, double deadline)
      : attention_(problem, plan_options, communicator, options(deadline)) {}

  void forward(const TensorTuple& q, const TensorTuple& k, const TensorTuple& v, const TensorTuple& o, const TensorTuple& lse,
               Address alibi, std::int64_t alibi_stride, Address sinks, Address saved, std::int64_t saved_bytes) {
    attention_.forward(forward_tensors(q, k, v, o, lse, alibi, alibi_stride, sinks));
    const std::span<const std::byte> kept = attention_.saved();
    RINGSPAN_CHECK(static_cast<std::int64_t>(kept.size()) == saved_bytes);
    if (!kept.empty()) std::memcpy(reinterpret_cast<void*>(saved), kept.data(), kept.size());
  }

  void backward(const std::vector<TensorTuple>& tensors, Address alibi, std::int64_t alibi_stride, Address sinks,
                Address dsinks, Address saved, std::int64_t saved_bytes) {
    attention_.restore_saved(bytes_at(saved, saved_bytes));
    attention_.backward(backward_tensors(tensors, alibi, alibi_stride, sinks, dsinks));
  }

  const Attention& attention() const { return attention_; }

 private:
  static ExecuteOptions options(double deadline) {
    ExecuteOptions result;
    result.deadline = Communicator::Seconds(deadline);
    return result;
  }

  std::vector<std::unique_ptr<Communicator>> alone_;
  Attention attention_;
};

}  // namespace

void bind_session(nb::module_& module) {
  using Guard = nb::call_guard<nb::gil_scoped_release>;
  nb::class_<Session>(module, "Session", "A plan that is executed.")
      .def(nb::init<const Plan&, Communicator*, double>(), "plan"_a, "communicator"_a.none() = nb::none(), "deadline"_a = 30.0,
           nb::keep_alive<1, 3>(), Guard())
      .def(nb::init<const Problem&, const PlanOptions&, Communicator&, double>(), "problem"_a, "options"_a, "communicator"_a,
           "deadline"_a, nb::keep_alive<1, 4>(), Guard())
      .def("forward", &Session::forward, "q"_a, "k"_a, "v"_a, "o"_a, "lse"_a, "alibi"_a = 0, "alibi_stride"_a = 0,
           "sinks"_a = 0, "saved"_a = 0, "saved_bytes"_a = 0, Guard())
      .def("backward", &Session::backward, "tensors"_a, "alibi"_a = 0, "alibi_stride"_a = 0, "sinks"_a = 0, "dsinks"_a = 0,
           "saved"_a = 0, "saved_bytes"_a = 0, Guard())
      .def_prop_ro("saved_bytes", [](const Session& s) { return s.attention().saved().size(); })
      .def_prop_ro("plan", [](const Session& s) { return Plan(s.attention().plan()); })
      .def(
          "stats",
          [](const Session& s, bool backward) {
            const PassStats& stats = s.attention().stats(backward ? Pass::backward : Pass::forward);
            return std::make_tuple(stats.seconds, stats.waiting_seconds, stats.sent_bytes, stats.received_bytes);
          },
          "backward"_a = false, "(seconds, of which waiting, bytes sent, bytes received) of the latest pass.");

  module.def(
      "simulate_forward",
      [](const std::vector<Plan>& plans, const TensorTuple& q, const TensorTuple& k, const TensorTuple& v, const TensorTuple& o,
         const TensorTuple& lse, Address alibi, std::int64_t alibi_stride, Address sinks, Address saved,
         std::int64_t saved_bytes) {
        simulate_forward(plans, forward_tensors(q, k, v, o, lse, alibi, alibi_stride, sinks), bytes_at(saved, saved_bytes));
      },
      "plans"_a, "q"_a, "k"_a, "v"_a, "o"_a, "lse"_a, "alibi"_a = 0, "alibi_stride"_a = 0, "sinks"_a = 0, "saved"_a = 0,
      "saved_bytes"_a = 0, Guard());
  module.def(
      "simulate_backward",
      [](const std::vector<Plan>& plans, const std::vector<TensorTuple>& tensors, Address alibi, std::int64_t alibi_stride,
         Address sinks, Address dsinks, Address saved, std::int64_t saved_bytes) {
        simulate_backward(plans, backward_tensors(tensors, alibi, alibi_stride, sinks, dsinks), bytes_at(saved, saved_bytes));
      },
      "plans"_a, "tensors"_a, "alibi"_a = 0, "alibi_stride"_a = 0, "sinks"_a = 0, "dsinks"_a = 0, "saved"_a = 0,
      "saved_bytes"_a = 0, Guard());
}

}  // namespace ringspan::python
