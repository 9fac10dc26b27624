#include <nanobind/stl/optional.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include <string>

#include "bindings.h"
#include "ringspan/problem.h"

namespace nb = nanobind;
using namespace nb::literals;

namespace ringspan::python {
namespace {

std::vector<std::pair<std::int64_t, std::int64_t>> branches_of(const Pattern& pattern) {
  std::vector<std::pair<std::int64_t, std::int64_t>> result;
  if (!pattern.dilated) return result;
  for (const DilatedBranch& branch : pattern.dilated->branches) result.emplace_back(branch.segment, branch.rate);
  return result;
}

void bind_pattern(nb::module_& module) {
  nb::class_<Pattern>(module, "Pattern", "Who may attend to whom; see docs/cli.md for the grammar.")
      .def(
          "__init__", [](Pattern* self, const std::string& text) { new (self) Pattern(Pattern::parse(text)); },
          "text"_a = "full")
      .def_rw("causal", &Pattern::causal)
      .def_rw("documents", &Pattern::documents)
      .def_prop_rw(
          "top_left", [](const Pattern& p) { return p.align == Align::top_left; },
          [](Pattern& p, bool value) { p.align = value ? Align::top_left : Align::bottom_right; },
          "Diagonals begin at the upper left corner instead of ending at the lower right one.")
      .def_prop_rw(
          "window",
          [](const Pattern& p) {
            std::optional<std::pair<std::int64_t, std::int64_t>> result;
            if (p.window) result.emplace(p.window->left, p.window->right);
            return result;
          },
          [](Pattern& p, std::optional<std::pair<std::int64_t, std::int64_t>> window) {
            p.window.reset();
            if (window) p.window = Window{window->first, window->second};
          },
          nb::arg("window").none())
      .def_prop_ro("branches", &branches_of, "(segment, rate) of each dilated branch.")
      .def_prop_ro("states", &Pattern::states)
      .def("__str__", &Pattern::to_string)
      .def("__repr__", [](const Pattern& p) { return "Pattern('" + p.to_string() + "')"; })
      .def(
          "__eq__", [](const Pattern& a, const Pattern& b) { return a == b; }, nb::is_operator())
      .def("__hash__", [](const Pattern& p) { return std::hash<std::string>()(p.to_string()); });
}

}  // namespace

void bind_problem(nb::module_& module) {
  bind_pattern(module);
  nb::class_<Problem>(module, "Problem", "Everything that decides the result and how it is spread over ranks; no data.")
      .def(nb::init<>())
      .def("__copy__", [](const Problem& p) { return Problem(p); })
      .def_rw("batch", &Problem::batch)
      .def_rw("tokens_q", &Problem::tokens_q)
      .def_rw("tokens_k", &Problem::tokens_k)
      .def_rw("heads", &Problem::heads)
      .def_rw("kv_heads", &Problem::kv_heads)
      .def_rw("head_dim", &Problem::head_dim)
      .def_rw("head_dim_v", &Problem::head_dim_v)
      .def_rw("pattern", &Problem::pattern)
      .def_rw("cu_seqlens_q", &Problem::cu_seqlens_q)
      .def_rw("cu_seqlens_k", &Problem::cu_seqlens_k)
      .def_rw("lengths_q", &Problem::lengths_q)
      .def_rw("lengths_k", &Problem::lengths_k)
      .def_rw("starts_k", &Problem::starts_k)
      .def_rw("scale", &Problem::scale)
      .def_rw("softcap", &Problem::softcap)
      .def_rw("alibi", &Problem::alibi)
      .def_rw("sinks", &Problem::sinks)
      .def_rw("dropout", &Problem::dropout)
      .def_rw("seed", &Problem::seed)
      .def_rw("ranks", &Problem::ranks)
      .def_rw("replicated_q", &Problem::replicated_q)
      .def_prop_rw(
          "dtype", [](const Problem& p) { return std::string(to_string(p.dtype)); },
          [](Problem& p, const std::string& name) { p.dtype = parse_dtype(name); })
      .def_prop_rw(
          "sharding_q", [](const Problem& p) { return p.sharding_q.to_string(); },
          [](Problem& p, const std::string& text) { p.sharding_q = Sharding::parse(text); })
      .def_prop_rw(
          "sharding_k", [](const Problem& p) { return p.sharding_k.to_string(); },
          [](Problem& p, const std::string& text) { p.sharding_k = Sharding::parse(text); })
      .def("validate", &Problem::validate);

  module.def(
      "shard_pieces",
      [](const std::string& sharding, std::int64_t tokens, int ranks, int rank) {
        const Sharding parsed = Sharding::parse(sharding);
        validate(parsed, tokens, ranks);
        std::vector<std::tuple<std::int64_t, std::int64_t, std::int64_t>> result;
        for (const Progression& piece : make_shard(parsed, tokens, ranks, rank).pieces) {
          result.emplace_back(piece.first, piece.stride, piece.count);
        }
        return result;
      },
      "sharding"_a, "tokens"_a, "ranks"_a, "rank"_a,
      "(first, stride, count) of each progression of positions that the rank holds, in the order in which it stores them.");
  module.def(
      "shard_rows",
      [](const std::string& sharding, std::int64_t tokens, int ranks, int rank) {
        return make_shard(Sharding::parse(sharding), tokens, ranks, rank).rows;
      },
      "sharding"_a, "tokens"_a, "ranks"_a, "rank"_a);
  module.def("canonical_sharding", [](const std::string& text) { return Sharding::parse(text).to_string(); }, "text"_a);
}

}  // namespace ringspan::python
