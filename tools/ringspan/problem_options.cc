#include "problem_options.h"

#include <fmt/format.h>

#include <CLI/App.hpp>
#include <algorithm>
#include <cmath>
#include <limits>
#include <tuple>
#include <utility>

#include "base/processor.h"
#include "file_error.h"
#include "pattern/validate.h"
#include "ringspan/error.h"
#include "ringspan/tuning.h"
#include "text.h"

namespace ringspan::cli {
namespace {

constexpr const char* kProblemGroup = "problem";
constexpr const char* kScoreGroup = "scores";
constexpr const char* kPlanGroup = "how it is computed";

std::vector<std::int32_t> parse_offsets(const std::string& option, const std::string& text) {
  std::vector<std::int32_t> offsets;
  for (const std::int64_t value : parse_integers(option, text)) {
    if (value < 0 || value > std::numeric_limits<std::int32_t>::max()) {
      throw InvalidArgument(fmt::format("{}: offset {} ({}) must be in [0, 2147483647]", option, offsets.size(), value));
    }
    offsets.push_back(static_cast<std::int32_t>(value));
  }
  return offsets;
}

std::int64_t parse_bucket(const std::string& text) {
  if (text == "auto") return PlanOptions::kBucketAuto;
  if (text == "none") return PlanOptions::kBucketNone;
  std::int64_t rows = 0;
  try {
    rows = parse_integer("--bucket", text);
  } catch (const InvalidArgument&) {
    rows = 0;
  }
  if (rows < 1) throw InvalidArgument(fmt::format("--bucket ({}) must be a number of rows >= 1, none or auto", text));
  return rows;
}

CostModel parse_cost(const std::string& text) {
  double values[3] = {};
  std::size_t begin = 0;
  for (int i = 0; i < 3; ++i) {
    const std::size_t end = std::min(text.find(',', begin), text.size());
    const bool last = end == text.size();
    if (last != (i == 2))
      throw InvalidArgument(fmt::format("--cost ({}) must be F,B,L: flops/s, bytes/s, nanoseconds per message", text));
    values[i] = parse_real("--cost", text.substr(begin, end - begin));
    if (values[i] > 9e18) throw InvalidArgument(fmt::format("--cost ({}) must stay below 9e18", text));
    begin = end + 1;
  }
  if (values[0] < 1 || values[1] < 1) throw InvalidArgument(fmt::format("--cost ({}) must have rates of at least 1", text));
  CostModel cost;
  cost.flops_per_second = static_cast<std::int64_t>(values[0]);
  cost.bytes_per_second = static_cast<std::int64_t>(values[1]);
  cost.message_nanoseconds = static_cast<std::int64_t>(values[2]);
  return cost;
}

Tile parse_tile(const std::string& option, const std::string& text) {
  constexpr std::int64_t kMost = 1 << 20;
  const std::size_t x = text.find('x');
  std::int64_t queries = 0, keys = 0;
  try {
    queries = parse_integer(option, text.substr(0, x));
    keys = x == std::string::npos ? 0 : parse_integer(option, text.substr(x + 1));
  } catch (const InvalidArgument&) {
    queries = 0;
  }
  if (queries >= 1 && keys >= 1 && queries <= kMost && keys <= kMost) {
    return {static_cast<int>(queries), static_cast<int>(keys)};
  }
  throw InvalidArgument(fmt::format("{} ({}) must be queries x keys, each in [1, {}], such as 96x256", option, text, kMost));
}

constexpr std::string_view kForwardKernel = "attend_", kBackwardKernel = "attend_backward_";

// attend_backward_... names a kernel of the backward pass, attend_... one of the forward pass, a suffix one of each.
void set_kernel(PlanOptions& plan, const std::string& name) {
  if (name.empty()) throw InvalidArgument("--kernel () must be the name of a kernel, such as reference");
  const bool backward = name.starts_with(kBackwardKernel);
  const auto set = [&](std::string& kernel, const char* pass) {
    if (!kernel.empty()) throw InvalidArgument(fmt::format("--kernel {}: the {} pass has --kernel {}", name, pass, kernel));
    kernel = name;
  };
  if (!backward) set(plan.attend_kernel, "forward");
  if (backward || !name.starts_with(kForwardKernel)) set(plan.attend_backward_kernel, "backward");
}

// Sizes and kernels of a pass that is not run would be ignored.
void require_backward(const PlanOptions& plan) {
  const bool tile = plan.attend_backward_tile != Tile{};
  if (plan.backward || !(tile || plan.attend_backward_kernel.starts_with(kBackwardKernel))) return;
  throw InvalidArgument(fmt::format("{} is given, but there is no backward pass",
                                    tile ? "--backward-tile" : "--kernel " + plan.attend_backward_kernel));
}

// The library refuses it too, as unsupported where a strategy is named.
void require_local(const PlanOptions& plan) {
  if (plan.computing_ranks == 0 || plan.strategy == Strategy::local) return;
  throw InvalidArgument(fmt::format("--computing-ranks ({}) is for --strategy local only, not {}", plan.computing_ranks,
                                    to_string(plan.strategy)));
}

// 0 of a float32 stands for the default: what is too small for one must not become 0.
float parse_float32(const std::string& option, const std::string& text) {
  const double value = parse_real(option, text);
  const auto narrowed = static_cast<float>(value);
  if (std::isfinite(narrowed) && (narrowed == 0) == (value == 0)) return narrowed;
  throw InvalidArgument(fmt::format("{} ({}) must be a number that float32 can hold", option, text));
}

// Said after all options are known: --dropout may come later, and may be 0.
void require_dropout(const ProblemOptions& options) {
  if (!options.seed_given || options.problem.dropout != 0) return;
  throw InvalidArgument(fmt::format("--seed ({}) is for dropout, but --dropout is 0", options.problem.seed));
}

void add_score_options(CLI::App& app, ProblemOptions& options) {
  Problem& problem = options.problem;
  const auto real = [&](const char* name, float* target, const char* help) {
    return add_parsed(app, name, "X", help, [name, target](const std::string& text) { *target = parse_float32(name, text); })
        ->group(kScoreGroup);
  };
  add_parsed(app, "--scale", "X", "softmax scale (default 1/sqrt(head_dim))", [&problem](const std::string& text) {
    problem.scale = parse_float32("--scale", text);
    if (problem.scale == 0) throw InvalidArgument(fmt::format("--scale ({}) must not be 0", text));
  })->group(kScoreGroup);
  real("--softcap", &problem.softcap, "X * tanh(score / X); 0: off");
  CLI::Option* dropout = real("--dropout", &problem.dropout, "probability with which a pair is dropped");
  add_parsed(app, "--seed", "N", "of dropout",
             [&options](const std::string& text) {
               options.problem.seed = parse_seed("--seed", text);
               options.seed_given = true;
             })
      ->group(kScoreGroup)
      ->needs(dropout);
}

void add_plan_options(CLI::App& app, ProblemOptions& options) {
  PlanOptions& plan = options.plan;
  add_parsed(app, "--strategy", "NAME",
             "auto, local, all-gather, exchange, ring, pass-q, ulysses (default auto: the cheapest by --cost)",
             [&plan](const std::string& text) { plan.strategy = parse_strategy(text); })
      ->group(kPlanGroup);
  add_integer(
      app, "--computing-ranks", 1, [&plan](std::int64_t n) { plan.computing_ranks = static_cast<int>(n); },
      "with --strategy local: how many ranks compute (default 1)")
      ->group(kPlanGroup);
  add_parsed(app, "--bucket", "ROWS", "rows that travel at once: a number, none (whole chunks) or auto",
             [&plan](const std::string& text) { plan.bucket_rows = parse_bucket(text); })
      ->group(kPlanGroup);
  add_parsed(app, "--memory", "BYTES", "budget of each rank, its tensors included: 8GiB, 512MiB, 1e9",
             [&plan](const std::string& text) { plan.memory_budget = parse_budget(text); })
      ->group(kPlanGroup);
  add_parsed(app, "--cost", "F,B,L", "for auto: flops/s, bytes/s of a rank, nanoseconds per message (default 1e11,5e9,20000)",
             [&plan](const std::string& text) {
               const std::int64_t host = plan.cost.host_bytes_per_second;  // has an option of its own
               plan.cost = parse_cost(text);
               plan.cost.host_bytes_per_second = host;
             })
      ->group(kPlanGroup);
  add_integer(
      app, "--threads", 1,
      [&options](std::int64_t n) {
        options.plan.threads = static_cast<int>(n);
        options.threads_given = true;
      },
      "of each rank's kernels (default: cores / ranks)")
      ->group(kPlanGroup);
  add_kernel_option(app, plan)->group(kPlanGroup);
  for (const auto& [name, tile, of] : {std::tuple{"--tile", &plan.attend_tile, "the forward kernel"},
                                       std::tuple{"--backward-tile", &plan.attend_backward_tile, "the backward kernel"}}) {
    add_parsed(app, name, "QxK", fmt::format("queries and keys of a tile of {} (default: as tuned, else its own)", of),
               [name = name, tile = tile](const std::string& text) { *tile = parse_tile(name, text); })
        ->group(kPlanGroup);
  }
}

}  // namespace

std::int64_t parse_budget(const std::string& text) {
  const std::int64_t bytes = parse_bytes("--memory", text);
  if (bytes == 0) throw InvalidArgument(fmt::format("--memory ({}) must be at least 1 byte", text));
  return bytes;
}

CLI::Option* add_kernel_option(CLI::App& app, PlanOptions& plan) {
  return app
      .add_option_function<std::vector<std::string>>(
          "--kernel",
          [&plan](const std::vector<std::string>& names) {
            for (const std::string& name : names) set_kernel(plan, name);
          },
          "by name, such as reference; may be given for each pass (default: the best for the shape)")
      ->type_name("NAME")
      ->allow_extra_args(false);  // one name each time
}

CLI::Option* add_parsed(CLI::App& app, const std::string& name, const std::string& type, const std::string& help,
                        const std::function<void(const std::string&)>& parse) {
  return app.add_option_function<std::string>(name, parse, help)->type_name(type);
}

CLI::Option* add_integer(CLI::App& app, const std::string& name, std::int64_t smallest, std::function<void(std::int64_t)> set,
                         const std::string& help) {
  const auto parse = [name, smallest, set = std::move(set)](const std::string& text) {
    const std::int64_t value = parse_integer(name, text);
    const std::int64_t largest = name.starts_with("--tokens") ? internal::kMaxTokens : std::int64_t{1} << 30;
    if (value < smallest || value > largest) {
      throw InvalidArgument(fmt::format("{} ({}) must be in [{}, {}]", name, value, smallest, largest));
    }
    set(value);
  };
  return add_parsed(app, name, "N", help, parse);
}

CLI::Option* add_transport(CLI::App& app, std::function<void(bool)> set) {
  return add_parsed(
      app, "--transport", "NAME", "what ranks are: threads or processes (default threads)",
      [set = std::move(set)](const std::string& text) {
        if (text == "nccl") {
          throw Unsupported(
              "--transport nccl moves messages between GPUs, but this program computes on the CPU; NCCL is used from "
              "C++ (make_nccl_communicator) and from Python");
        }
        if (text != "threads" && text != "processes") {
          throw InvalidArgument(fmt::format("--transport ({}) must be threads or processes", text));
        }
        set(text == "processes");
      });
}

CLI::Option* add_deadline(CLI::App& app, double& seconds) {
  return add_parsed(app, "--deadline", "SECONDS", "of silence after which a rank gives a peer up (default 30)",
                    [&seconds](const std::string& text) {
                      seconds = parse_real("--deadline", text);
                      if (seconds <= 0) throw InvalidArgument(fmt::format("--deadline ({}) must be positive", text));
                    });
}

void add_problem_options(CLI::App& app, ProblemOptions& options) {
  Problem& problem = options.problem;
  add_parsed(app, "--pattern", "PATTERN",
             "who attends to whom, such as causal, window:1023,0 or dilated:2048x1,4096x2 & causal (default full)",
             [&options](const std::string& text) { options.pattern_text = text; })
      ->group(kProblemGroup);
  add_integer(
      app, "--ranks", 1, [&problem](std::int64_t n) { problem.ranks = static_cast<int>(n); }, "over so many ranks (default 1)")
      ->group(kProblemGroup);
  add_parsed(app, "--sharding", "SHARDING",
             "who holds which tokens: contiguous, zigzag, striped, block_striped:SIZE, explicit:... (default contiguous)",
             [&problem](const std::string& text) { problem.sharding_q = Sharding::parse(text); })
      ->group(kProblemGroup);
  add_parsed(app, "--sharding-k", "SHARDING", "of keys and values (default: as --sharding)", [&](const std::string& text) {
    options.problem.sharding_k = Sharding::parse(text);
    options.sharding_k_given = true;
  })->group(kProblemGroup);
  app.add_flag("--replicated-q", problem.replicated_q, "every rank holds all queries and gets all outputs")
      ->group(kProblemGroup);
  add_parsed(app, "--lengths", "LENGTHS", "tokens of each batch item, separated by commas; the rest is padding",
             [&problem](const std::string& text) { problem.lengths_q = parse_integers("--lengths", text); })
      ->group(kProblemGroup);
  add_parsed(app, "--lengths-k", "LENGTHS", "of the keys (default: as --lengths)", [&problem](const std::string& text) {
    problem.lengths_k = parse_integers("--lengths-k", text);
  })->group(kProblemGroup);
  add_parsed(app, "--starts-k", "STARTS", "first key of each batch item; those before it are padding (default: 0)",
             [&problem](const std::string& text) { problem.starts_k = parse_integers("--starts-k", text); })
      ->group(kProblemGroup);
  add_score_options(app, options);
  add_plan_options(app, options);
}

void add_shape_options(CLI::App& app, ProblemOptions& options) {
  Problem& problem = options.problem;
  const auto integer = [&](const char* name, std::int64_t smallest, std::function<void(std::int64_t)> set, const char* help) {
    add_integer(app, name, smallest, std::move(set), help)->group(kShapeGroup);
  };
  integer(
      "--tokens", 0,
      [&options](std::int64_t n) {
        options.problem.tokens_q = n;
        options.tokens_given = true;
      },
      "queries of each batch item, over all ranks");
  integer(
      "--tokens-k", 0,
      [&options](std::int64_t n) {
        options.problem.tokens_k = n;
        options.tokens_k_given = true;
      },
      "keys (default: as --tokens)");
  integer("--batch", 1, [&problem](std::int64_t n) { problem.batch = n; }, "items (default 1)");
  integer("--heads", 1, [&problem](std::int64_t n) { problem.heads = static_cast<int>(n); }, "query heads (default 8)");
  integer(
      "--kv-heads", 1,
      [&options](std::int64_t n) {
        options.problem.kv_heads = static_cast<int>(n);
        options.kv_heads_given = true;
      },
      "key and value heads, a divisor of --heads (default: as --heads)");
  integer(
      "--head-dim", 1, [&problem](std::int64_t n) { problem.head_dim = static_cast<int>(n); },
      "of q and k, up to 256 (default 64)");
  integer(
      "--head-dim-v", 1,
      [&options](std::int64_t n) {
        options.problem.head_dim_v = static_cast<int>(n);
        options.head_dim_v_given = true;
      },
      "of v and o (default: as --head-dim)");
  problem.heads = 8;
  const auto parsed = [&](const char* name, const char* type, const char* help,
                          const std::function<void(const std::string&)>& parse) {
    add_parsed(app, name, type, help, parse)->group(kShapeGroup);
  };
  parsed("--dtype", "DTYPE", "float32, bfloat16 or float16 (default float32)",
         [&problem](const std::string& text) { problem.dtype = parse_dtype(text); });
  parsed("--cu-seqlens", "OFFSETS", "where documents begin and end: 0,100,250 (with `documents` in the pattern)",
         [&problem](const std::string& text) { problem.cu_seqlens_q = parse_offsets("--cu-seqlens", text); });
  parsed("--cu-seqlens-k", "OFFSETS", "of the keys (default: as --cu-seqlens)",
         [&problem](const std::string& text) { problem.cu_seqlens_k = parse_offsets("--cu-seqlens-k", text); });
  app.add_flag("--alibi", problem.alibi, "with ALiBi slopes")->group(kShapeGroup);
  app.add_flag("--sinks", problem.sinks, "with an attention sink per head")->group(kShapeGroup);
}

PlanOptions with_tuned_file(const Problem& problem, const PlanOptions& plan) {
  return as_file_error([&] { return with_tuned_sizes(problem, plan); });
}

void complete(ProblemOptions& options) {
  Problem& problem = options.problem;
  problem.pattern = Pattern::parse(options.pattern_text);
  if (!options.tokens_k_given) problem.tokens_k = problem.tokens_q;
  if (!options.kv_heads_given) problem.kv_heads = problem.heads;
  if (!options.head_dim_v_given) problem.head_dim_v = problem.head_dim;
  if (!options.sharding_k_given) problem.sharding_k = problem.sharding_q;
  if (problem.lengths_k.empty() && !problem.lengths_q.empty()) problem.lengths_k = problem.lengths_q;
  if (!options.threads_given) options.plan.threads = std::max(1, usable_processors() / problem.ranks);
  require_backward(options.plan);
  require_local(options.plan);
  require_dropout(options);
  problem.validate();
  options.plan = with_tuned_file(problem, options.plan);
}

}  // namespace ringspan::cli
