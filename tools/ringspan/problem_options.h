// The options that describe a problem, the same in every command that takes one.
//
//   ProblemOptions options;
//   add_problem_options(app, options);   // pattern, ranks, sharding, score options, strategy, ...
//   add_shape_options(app, options);     // tokens, heads, ...: only where no file gives them
//   ... after parsing:
//   complete(options);                   // fills in what follows from the rest, validates
#pragma once

#include <cstdint>
#include <functional>
#include <optional>
#include <string>
#include <string_view>

#include "ringspan/plan.h"

namespace CLI {
class App;
class Option;
}  // namespace CLI

namespace ringspan::cli {

struct ProblemOptions {
  Problem problem;
  PlanOptions plan;
  std::string pattern_text = "full";
  bool tokens_given = false, tokens_k_given = false, kv_heads_given = false, head_dim_v_given = false;
  bool sharding_k_given = false;
  bool threads_given = false, seed_given = false;
};

// Every option whose value is parsed by a function that throws InvalidArgument.
CLI::Option* add_parsed(CLI::App& app, const std::string& name, const std::string& type, const std::string& help,
                        const std::function<void(const std::string&)>& parse);
// A whole number >= `smallest`.
CLI::Option* add_integer(CLI::App& app, const std::string& name, std::int64_t smallest, std::function<void(std::int64_t)> set,
                         const std::string& help);

// The value of --memory.
std::int64_t parse_budget(const std::string& text);

// --transport threads|processes
CLI::Option* add_transport(CLI::App& app, std::function<void(bool processes)> set);
// --deadline SECONDS
CLI::Option* add_deadline(CLI::App& app, double& seconds);

// --kernel NAME, of both passes or of one; then again of the other
CLI::Option* add_kernel_option(CLI::App& app, PlanOptions& plan);

// --pattern --ranks --sharding --sharding-k --replicated-q --lengths --lengths-k, --scale --softcap --dropout --seed,
// --strategy --computing-ranks --bucket --memory --cost --threads --kernel --tile --backward-tile
void add_problem_options(CLI::App& app, ProblemOptions& options);
inline constexpr const char* kShapeGroup = "shape";  // of the options of add_shape_options
// --tokens --tokens-k --batch --heads --kv-heads --head-dim --head-dim-v --dtype --cu-seqlens --cu-seqlens-k
// --alibi --sinks
void add_shape_options(CLI::App& app, ProblemOptions& options);

// with_tuned_sizes(), for which a tune file that cannot be used is a FileError.
PlanOptions with_tuned_file(const Problem& problem, const PlanOptions& plan);

// Parses the pattern, fills in what was not given (tokens_k = tokens_q, kv_heads = heads, threads = cores / ranks, ...),
// validates the problem, and looks up the sizes that were measured on this machine.
void complete(ProblemOptions& options);

}  // namespace ringspan::cli
