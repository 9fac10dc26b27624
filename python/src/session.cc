// Sessions: plans being executed, on one rank or as all ranks of one process.
#include <nanobind/stl/optional.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include <memory>
#include <optional>
#include <span>
#include <string>
#include <tuple>
#include <vector>

#include "base/check.h"
#include "bindings.h"
#include "cuda/emulated_memory.h"
#include "openmp.h"
#include "simulate.h"
#include "tensors.h"

namespace nb = nanobind;
using namespace nb::literals;

namespace ringspan::python {
namespace {

// The emulated device has a name of its own for memory of the host.
struct Naming {
  bool emulated = false;
  Tensor operator()(Tensor tensor) const {
    if (emulated && tensor.data != nullptr) tensor.data = cuda::tagged(tensor.data);
    return tensor;
  }
};

Naming naming(const std::string& device, bool host_tensors = false) { return {device == "cuda-emulated" && !host_tensors}; }

ForwardTensors forward_tensors(const Naming& of, const Tensor& q, const Tensor& k, const Tensor& v, const Tensor& o,
                               const Tensor& lse, Address alibi, std::int64_t alibi_stride, Address sinks) {
  return {.q = of(q),
          .k = of(k),
          .v = of(v),
          .o = of(o),
          .lse = of(lse),
          .alibi_slopes = reinterpret_cast<const float*>(alibi),
          .alibi_batch_stride = alibi_stride,
          .sinks = reinterpret_cast<const float*>(sinks)};
}

BackwardTensors backward_tensors(const Naming& of, const std::vector<Tensor>& t, Address alibi, std::int64_t alibi_stride,
                                 Address sinks, Address dsinks) {
  RINGSPAN_CHECK(t.size() == 10);
  return {.q = of(t[0]),
          .k = of(t[1]),
          .v = of(t[2]),
          .o = of(t[3]),
          .lse = of(t[4]),
          .d_out = of(t[5]),
          .dlse = of(t[6]),
          .dq = of(t[7]),
          .dk = of(t[8]),
          .dv = of(t[9]),
          .alibi_slopes = reinterpret_cast<const float*>(alibi),
          .alibi_batch_stride = alibi_stride,
          .sinks = reinterpret_cast<const float*>(sinks),
          .dsinks = reinterpret_cast<float*>(dsinks)};
}

Address address(const Tensor& tensor) { return reinterpret_cast<Address>(tensor.data); }

constexpr double kDeadline = 30.0;  // of simulated ranks, which are threads

std::span<std::byte> bytes_at(Address address, std::int64_t bytes) {
  return {reinterpret_cast<std::byte*>(address), static_cast<std::size_t>(bytes)};
}

// Passes keep what they must in memory that is aligned, and copy to other memory, as a view of a tensor may be. No memory fits
// a plan that keeps nothing, and no other.
bool is_kept_there(std::span<const std::byte> saved) {
  return !saved.empty() && reinterpret_cast<Address>(saved.data()) % 64 == 0;
}

// Where a session runs: a device by name and its stream as a handle, 0: one of its own; on the CPU threads of OpenMP, if they
// are wanted and can be had.
ExecuteOptions options(double deadline, const std::string& device, Address stream, bool deterministic = true,
                       bool openmp = false) {
  ExecuteOptions result;
  if (openmp) result.caller_threads = openmp_threads();
  result.deterministic = deterministic;
  result.deadline = Communicator::Seconds(deadline);
  result.device = device;
  result.stream = reinterpret_cast<void*>(stream);
  return result;
}

// One rank: alone, or of a process group. Keeps its communicator alive (nb::keep_alive); a given arena must outlive it.
class Session {
 public:
  Session(const Plan& plan, Communicator* communicator, double deadline, const std::string& device, Address stream,
          Address arena, std::int64_t arena_bytes, bool deterministic, bool openmp)
      : alone_(communicator == nullptr ? make_thread_world(1) : std::vector<std::unique_ptr<Communicator>>{}),
        attention_(plan, communicator == nullptr ? *alone_.front() : *communicator,
                   options(deadline, device, stream, deterministic, openmp), bytes_at(arena, arena_bytes)),
        naming_(naming(device, plan.options().host_tensors)) {}

  // Collective: agrees on problem and options first, then plans.
  Session(const Problem& problem, const PlanOptions& plan_options, Communicator& communicator, double deadline,
          const std::string& device, Address stream, bool deterministic, bool openmp)
      : attention_(problem, plan_options, communicator, options(deadline, device, stream, deterministic, openmp)),
        naming_(naming(device, plan_options.host_tensors)) {}

  std::vector<std::tuple<std::string, std::string>> kernels() const {
    const Plan& plan = attention_.plan();
    std::vector<std::tuple<std::string, std::string>> list;
    for (const Pass pass : {Pass::forward, Pass::backward}) {
      if (pass == Pass::forward || plan.options().backward) list.emplace_back(plan.kernel(pass).name, plan.kernel(pass).reason);
    }
    return list;
  }

  void forward(const Tensor& q, const Tensor& k, const Tensor& v, const Tensor& o, const Tensor& lse, Address alibi,
               std::int64_t alibi_stride, Address sinks, Address saved, std::int64_t saved_bytes) {
    const std::span<std::byte> kept = bytes_at(saved, saved_bytes);
    ForwardTensors tensors = forward_tensors(naming_, q, k, v, o, lse, alibi, alibi_stride, sinks);
    if (is_kept_there(kept)) tensors.saved = kept;
    attention_.forward(tensors);
    if (!is_kept_there(kept)) attention_.copy_saved(kept);
  }

  void backward(const std::vector<Tensor>& tensors, Address alibi, std::int64_t alibi_stride, Address sinks, Address dsinks,
                Address saved, std::int64_t saved_bytes) {
    const std::span<std::byte> kept = bytes_at(saved, saved_bytes);
    BackwardTensors given = backward_tensors(naming_, tensors, alibi, alibi_stride, sinks, dsinks);
    if (is_kept_there(kept)) {
      given.saved = kept;
    } else {
      attention_.restore_saved(kept);
    }
    attention_.backward(given);
  }

  // The passes on tensors of torch's, with new ones for the results, in one call from Python: `results` are the arguments by
  // which empty() makes each of them. Forward: o, lse, and what is kept for backward or None.
  nb::tuple forward_new(const nb::callable& empty, const nb::tuple& results, bool heads_first, nb::handle q, nb::handle k,
                        nb::handle v) {
    std::vector<nb::object> copies;
    const auto read = [&](nb::handle object) { return read_dense(object, copies, heads_first).tensor; };
    const Tensor of_q = read(q), of_k = read(k), of_v = read(v);
    nb::tuple made = make_tensors(empty, results);
    const Tensor o = read(made[0]), lse = read(made[1]);
    const Given saved = read_dense(made[2], copies);
    const nb::gil_scoped_release released;
    forward(of_q, of_k, of_v, o, lse, 0, 0, 0, address(naming_(saved.tensor)), saved.last);
    wait_for(copies);
    return made;
  }

  // `given`: q, k, v, o, lse, d_out, dlse. Gives dq, dk, dv.
  nb::tuple backward_new(const nb::callable& empty, const nb::tuple& results, bool heads_first, const nb::tuple& given,
                         nb::handle saved) {
    std::vector<nb::object> copies;
    std::vector<Tensor> tensors;
    tensors.reserve(given.size() + results.size());
    for (const nb::handle object : given) tensors.push_back(read_dense(object, copies, heads_first).tensor);
    nb::tuple made = make_tensors(empty, results);
    for (const nb::handle object : made) tensors.push_back(read_dense(object, copies, heads_first).tensor);
    const Given kept = read_dense(saved, copies);
    const nb::gil_scoped_release released;
    backward(tensors, 0, 0, 0, 0, address(naming_(kept.tensor)), kept.last);
    wait_for(copies);
    return made;
  }

  void set_seed(std::uint64_t seed) { attention_.set_seed(seed); }
  void set_deadline(double seconds) { attention_.set_deadline(Communicator::Seconds(seconds)); }
  void wait() { attention_.wait(); }
  const Attention& attention() const { return attention_; }

 private:
  // torch's allocator gives memory of a GPU out again to what comes after the pass; that of the emulated device is the host's.
  void wait_for(const std::vector<nb::object>& copies) {
    if (naming_.emulated && !copies.empty()) attention_.wait();
  }

  std::vector<std::unique_ptr<Communicator>> alone_;
  Attention attention_;
  Naming naming_;
};

// Ranks whose tensors were already sharded by the caller: memory of any device.
void bind_simulation_of_shards(nb::module_& module) {
  using Guard = nb::call_guard<nb::gil_scoped_release>;
  module.def(
      "simulate_forward_shards",
      [](const std::vector<Plan>& plans, const std::string& device, Address stream,
         const std::vector<std::vector<Tensor>>& shards, Address alibi, std::int64_t alibi_stride, Address sinks, Address saved,
         std::int64_t saved_bytes, bool deterministic) {
        std::vector<ForwardTensors> tensors;
        for (const auto& t : shards) {
          RINGSPAN_CHECK(t.size() == 5);
          tensors.push_back(forward_tensors(naming(device), t[0], t[1], t[2], t[3], t[4], alibi, alibi_stride, sinks));
        }
        simulate_forward(plans, tensors, bytes_at(saved, saved_bytes), options(kDeadline, device, stream, deterministic));
      },
      "plans"_a, "device"_a, "stream"_a, "shards"_a, "alibi"_a = 0, "alibi_stride"_a = 0, "sinks"_a = 0, "saved"_a = 0,
      "saved_bytes"_a = 0, "deterministic"_a = true, Guard());
  module.def(
      "simulate_backward_shards",
      [](const std::vector<Plan>& plans, const std::string& device, Address stream,
         const std::vector<std::vector<Tensor>>& shards, Address alibi, std::int64_t alibi_stride, Address sinks,
         const std::vector<Address>& dsinks, Address saved, std::int64_t saved_bytes, bool deterministic) {
        std::vector<BackwardTensors> tensors;
        for (std::size_t rank = 0; rank < shards.size(); ++rank) {
          tensors.push_back(
              backward_tensors(naming(device), shards[rank], alibi, alibi_stride, sinks, dsinks.empty() ? 0 : dsinks.at(rank)));
        }
        simulate_backward(plans, tensors, bytes_at(saved, saved_bytes), options(kDeadline, device, stream, deterministic));
      },
      "plans"_a, "device"_a, "stream"_a, "shards"_a, "alibi"_a = 0, "alibi_stride"_a = 0, "sinks"_a = 0,
      "dsinks"_a = std::vector<Address>(), "saved"_a = 0, "saved_bytes"_a = 0, "deterministic"_a = true, Guard());
}

}  // namespace

void bind_session(nb::module_& module) {
  using Guard = nb::call_guard<nb::gil_scoped_release>;
  nb::class_<Session>(module, "Session", "A plan that is executed.")
      .def(nb::init<const Plan&, Communicator*, double, const std::string&, Address, Address, std::int64_t, bool, bool>(),
           "plan"_a, "communicator"_a.none() = nb::none(), "deadline"_a = 30.0, "device"_a = "cpu", "stream"_a = 0,
           "arena"_a = 0, "arena_bytes"_a = 0, "deterministic"_a = true, "openmp"_a = false, nb::keep_alive<1, 3>(), Guard())
      .def(nb::init<const Problem&, const PlanOptions&, Communicator&, double, const std::string&, Address, bool, bool>(),
           "problem"_a, "options"_a, "communicator"_a, "deadline"_a, "device"_a = "cpu", "stream"_a = 0,
           "deterministic"_a = true, "openmp"_a = false, nb::keep_alive<1, 4>(), Guard())
      .def("forward", &Session::forward, "q"_a, "k"_a, "v"_a, "o"_a, "lse"_a, "alibi"_a = 0, "alibi_stride"_a = 0,
           "sinks"_a = 0, "saved"_a = 0, "saved_bytes"_a = 0, Guard())
      .def("backward", &Session::backward, "tensors"_a, "alibi"_a = 0, "alibi_stride"_a = 0, "sinks"_a = 0, "dsinks"_a = 0,
           "saved"_a = 0, "saved_bytes"_a = 0, Guard())
      .def("forward_new", &Session::forward_new, "empty"_a, "results"_a, "heads_first"_a, "q"_a, "k"_a, "v"_a)
      .def("backward_new", &Session::backward_new, "empty"_a, "results"_a, "heads_first"_a, "given"_a, "saved"_a.none())
      .def("set_seed", &Session::set_seed, "seed"_a, "Of dropout, in the calls that follow.")
      .def("set_deadline", &Session::set_deadline, "seconds"_a, "Of silence from a peer, in the calls that follow.")
      .def("kernels", &Session::kernels, "Of each pass the kernel, and why it is not a library's.")
      .def("wait", &Session::wait, Guard(), "Returns when everything that forward and backward enqueued on a device is done.")
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
      [](const std::vector<Plan>& plans, const Tensor& q, const Tensor& k, const Tensor& v, const Tensor& o, const Tensor& lse,
         Address alibi, std::int64_t alibi_stride, Address sinks, Address saved, std::int64_t saved_bytes) {
        simulate_forward(plans, forward_tensors({}, q, k, v, o, lse, alibi, alibi_stride, sinks), bytes_at(saved, saved_bytes));
      },
      "plans"_a, "q"_a, "k"_a, "v"_a, "o"_a, "lse"_a, "alibi"_a = 0, "alibi_stride"_a = 0, "sinks"_a = 0, "saved"_a = 0,
      "saved_bytes"_a = 0, Guard());
  module.def(
      "simulate_backward",
      [](const std::vector<Plan>& plans, const std::vector<Tensor>& tensors, Address alibi, std::int64_t alibi_stride,
         Address sinks, Address dsinks, Address saved, std::int64_t saved_bytes) {
        simulate_backward(plans, backward_tensors({}, tensors, alibi, alibi_stride, sinks, dsinks),
                          bytes_at(saved, saved_bytes));
      },
      "plans"_a, "tensors"_a, "alibi"_a = 0, "alibi_stride"_a = 0, "sinks"_a = 0, "dsinks"_a = 0, "saved"_a = 0,
      "saved_bytes"_a = 0, Guard());
  bind_simulation_of_shards(module);
}

}  // namespace ringspan::python
