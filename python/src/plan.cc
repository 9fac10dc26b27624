#include "ringspan/plan.h"

#include <nanobind/stl/string.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include <memory>
#include <string>

#include "bindings.h"
#include "plan/plan_data.h"
#include "ringspan/draw.h"
#include "ringspan/tuning.h"

namespace nb = nanobind;
using namespace nb::literals;

namespace ringspan::python {
namespace {

Pass parse_pass(bool backward) { return backward ? Pass::backward : Pass::forward; }

// The seed of dropout decides nothing of a plan but the numbers that kernels draw.
Plan with_seed(const Plan& plan, std::uint64_t seed) {
  auto data = std::make_shared<internal::PlanData>(plan.data());
  data->problem.seed = seed;
  return Plan(std::move(data));
}

// Also in what was not taken, and in where sizes come from, which the options of a plan do not tell any more.
bool same(const Plan& a, const Plan& b) {
  return &a.data() == &b.data() ||
         (a.rank() == b.rank() && a.problem() == b.problem() && a.options() == b.options() && a.to_json() == b.to_json());
}

std::vector<std::tuple<std::string, std::int64_t, bool>> memory_of(const Plan& plan, bool backward) {
  std::vector<std::tuple<std::string, std::int64_t, bool>> result;
  for (const MemoryLine& line : plan.memory(parse_pass(backward)))
    result.emplace_back(line.component, line.bytes, line.in_arena);
  return result;
}

std::vector<std::tuple<std::int64_t, std::int64_t>> traffic_of(const Plan& plan, bool backward) {
  std::vector<std::tuple<std::int64_t, std::int64_t>> result;
  for (const PeerBytes& peer : plan.traffic(parse_pass(backward))) result.emplace_back(peer.sent_bytes, peer.received_bytes);
  return result;
}

std::tuple<std::int64_t, std::int64_t> host_bytes_of(const Plan& plan, bool backward) {
  const Plan::HostBytes bytes = plan.host_bytes(parse_pass(backward));
  return {bytes.to_device, bytes.to_host};
}

std::vector<std::tuple<std::string, std::string, std::int64_t>> rejected_of(const Plan& plan) {
  std::vector<std::tuple<std::string, std::string, std::int64_t>> result;
  for (const Rejected& candidate : plan.rejected()) {
    result.emplace_back(candidate.candidate, candidate.reason, candidate.nanoseconds);
  }
  return result;
}

using TilePair = std::tuple<int, int>;

template <Tile PlanOptions::*kTile>
TilePair tile_of(const PlanOptions& options) {
  return {(options.*kTile).queries, (options.*kTile).keys};
}
template <Tile PlanOptions::*kTile>
void set_tile(PlanOptions& options, TilePair tile) {
  options.*kTile = {std::get<0>(tile), std::get<1>(tile)};
}

// With the sizes that were measured on this machine.
Plan make_tuned_plan(const Problem& problem, const PlanOptions& options, int rank, bool tuned) {
  return make_plan(problem, tuned ? with_tuned_sizes(problem, options) : options, rank);
}

void bind_options(nb::module_& module) {
  nb::class_<PlanOptions>(module, "PlanOptions", "How to plan; see docs/strategies.md.")
      .def(nb::init<>())
      .def_prop_rw(
          "strategy", [](const PlanOptions& o) { return std::string(to_string(o.strategy)); },
          [](PlanOptions& o, const std::string& name) { o.strategy = parse_strategy(name); })
      .def_rw("computing_ranks", &PlanOptions::computing_ranks)
      .def_rw("bucket_rows", &PlanOptions::bucket_rows)
      .def_rw("memory_budget", &PlanOptions::memory_budget)
      .def_rw("backward", &PlanOptions::backward)
      .def_rw("keep_o_float32", &PlanOptions::keep_o_float32)
      .def_rw("threads", &PlanOptions::threads)
      .def_prop_rw(
          "device", [](const PlanOptions& o) { return std::string(to_string(o.device)); },
          [](PlanOptions& o, const std::string& name) { o.device = parse_device_kind(name); },
          "cpu or cuda: whose memory it books.")
      .def_rw("host_tensors", &PlanOptions::host_tensors,
              "The tensors lie in pinned host memory and stream through the device in pieces of bucket_rows rows.")
      .def_rw("attend_kernel", &PlanOptions::attend_kernel)
      .def_rw("attend_backward_kernel", &PlanOptions::attend_backward_kernel)
      .def_prop_rw(
          "partials", [](const PlanOptions& o) { return std::string(to_string(o.partials)); },
          [](PlanOptions& o, const std::string& name) { o.partials = parse_partials(name); },
          "float32, or storage: a library's fused attention also computes rows that take several of its calls.")
      .def_prop_rw("attend_tile", &tile_of<&PlanOptions::attend_tile>, &set_tile<&PlanOptions::attend_tile>,
                   "(queries, keys) of a tile; (0, 0): as tuned, else the kernel's own.")
      .def_prop_rw("attend_backward_tile", &tile_of<&PlanOptions::attend_backward_tile>,
                   &set_tile<&PlanOptions::attend_backward_tile>);
}

}  // namespace

void bind_plan(nb::module_& module) {
  bind_options(module);
  nb::class_<Plan>(module, "Plan", "What one rank computes, sends and keeps.")
      .def_prop_ro("problem", [](const Plan& p) { return Problem(p.problem()); })
      .def_prop_ro("rank", &Plan::rank)
      .def_prop_ro("strategy", [](const Plan& p) { return std::string(to_string(p.strategy())); })
      .def_prop_ro("bucket_rows", &Plan::bucket_rows)
      .def_prop_ro("fingerprint", &Plan::fingerprint)
      .def_prop_ro(
          "pairs", [](const Plan& p) { return nb::int_(nb::str(p.pairs().c_str())); },
          "(batch, head, query, key) pairs that this rank computes.")
      .def_prop_ro("rejected", &rejected_of, "(candidate, reason, modelled nanoseconds) of strategies not taken.")
      .def_prop_ro("modelled_nanoseconds", &Plan::modelled_nanoseconds)
      .def_prop_ro("excess_rows", &Plan::excess_rows)
      .def("arena_bytes", nb::overload_cast<>(&Plan::arena_bytes, nb::const_))
      .def("memory", &memory_of, "backward"_a = false, "(component, bytes, in the arena) of one pass.")
      .def(
          "memory_bytes", [](const Plan& p, bool backward) { return p.memory_bytes(parse_pass(backward)); },
          "backward"_a = false)
      .def(
          "pinned_bytes", [](const Plan& p, bool backward) { return p.pinned_bytes(parse_pass(backward)); },
          "backward"_a = false)
      .def("host_bytes", &host_bytes_of, "backward"_a = false, "(to the device, to the host): copied bytes of host_tensors.")
      .def("traffic", &traffic_of, "backward"_a = false, "(sent, received) bytes per peer.")
      .def(
          "flops", [](const Plan& p, bool backward) { return p.flops(parse_pass(backward)); }, "backward"_a = false)
      .def("to_json", &Plan::to_json)
      .def("with_seed", &with_seed, "seed"_a)
      .def("__eq__", &same, nb::is_operator())
      .def("__str__", &Plan::to_string);
  module.def("make_plan", &make_tuned_plan, "problem"_a, "options"_a, "rank"_a = 0, "tuned"_a = true,
             nb::call_guard<nb::gil_scoped_release>(), "tuned: whether sizes that `ringspan tune` found for CPUs count.");
  module.def("draw_svg", &draw_svg, "problem"_a, "options"_a, nb::call_guard<nb::gil_scoped_release>());
  module.def("draw_text", &draw_text, "problem"_a, "options"_a, nb::call_guard<nb::gil_scoped_release>());
  module.attr("MAX_DRAWN_TOKENS") = kMaxDrawnTokens;
  module.attr("MAX_THREADS") = PlanOptions::kMaxThreads;
}

}  // namespace ringspan::python
