// ringspan plan: what each rank would compute, send and keep.
#include <fmt/format.h>

#include <CLI/App.hpp>
#include <chrono>
#include <limits>
#include <memory>
#include <optional>
#include <string>
#include <string_view>

#include "command.h"
#include "files.h"
#include "plan/rank_costs.h"
#include "problem_options.h"
#include "qkv_file.h"
#include "ringspan/draw.h"
#include "ringspan/error.h"
#include "text.h"
#include "watch.h"

namespace ringspan::cli {
namespace {

constexpr const char* kPlanFooter = R"(examples
  memory, traffic and the rejected strategies for LongNet over 1,024 ranks
    ringspan plan --tokens 1000000000 --ranks 1024 --pattern dilated:2048x1,4096x2,8192x4
  the shapes of a file, a ring under a budget, as rank 3 sees it
    ringspan plan --input qkv.safetensors --ranks 8 --rank 3 --pattern causal --strategy ring \
      --memory 2GiB
  what every rank computes, keeps and sends
    ringspan plan --tokens 1000000 --ranks 16 --pattern causal --sharding zigzag --rank all
  who attends to whom
    ringspan plan --tokens 24 --ranks 3 --pattern window:5,0 --draw text)";

struct PlanCommandOptions {
  ProblemOptions problem;
  std::string input, draw;
  std::optional<Layout> layout;
  int rank = 0;  // or, below 0, all
  bool has_input = false, json = false, forward_only = false;
};

int parse_rank(const std::string& text) {
  if (text == "all") return -1;
  const std::int64_t rank = parse_integer("--rank", text);
  if (rank < 0 || rank > std::numeric_limits<int>::max()) {
    throw InvalidArgument(fmt::format("--rank ({}) must be a rank, from 0 on, or all", text));
  }
  return static_cast<int>(rank);
}

constexpr std::string_view kToFile = "svg:";

void draw(const PlanCommandOptions& options) {
  const Problem& problem = options.problem.problem;
  if (options.draw == "text") {
    fmt::print("{}", draw_text(problem, options.problem.plan));
    return;
  }
  const std::string svg = draw_svg(problem, options.problem.plan);
  if (options.draw.starts_with(kToFile)) {
    write_file(options.draw.substr(kToFile.size()), svg);
  } else {
    fmt::print("{}", svg);
  }
}

int run(const CLI::App& app, PlanCommandOptions& options) {
  ProblemOptions& problem = options.problem;
  std::vector<NamedFile> files;
  if (options.draw.starts_with(kToFile)) files.push_back({"--draw", options.draw.substr(kToFile.size()), true});
  if (options.has_input) files.push_back({"--input", options.input});
  check_files(files);
  if (options.has_input) {
    const auto shapes =
        app.get_options([](const CLI::Option* option) { return option->get_group() == kShapeGroup && option->count() > 0; });
    if (!shapes.empty()) {
      throw InvalidArgument(
          fmt::format("{} and --input exclude each other: the file has the shapes", shapes.front()->get_name()));
    }
    QkvFile(options.input).describe(problem, options.layout);
  } else if (!problem.tokens_given) {
    throw InvalidArgument("plan needs --tokens N or --input FILE");
  }
  problem.plan.backward = !options.forward_only;
  if (problem.plan.device != DeviceKind::cpu && problem.threads_given) {
    throw Unsupported(fmt::format("--threads ({}) is for kernels of the CPU, but this rank computes on {}",
                                  problem.plan.threads, to_string(problem.plan.device)));
  }
  if (problem.plan.host_tensors) problem.plan.keep_o_float32 = false;  // there is no option for it, and it would be refused
  complete(problem);
  if (!options.draw.empty()) {
    draw(options);
    return kOk;
  }
  ProgressLine line(true);
  if (options.rank < 0) {
    const auto begin = std::chrono::steady_clock::now();
    const internal::RankCosts costs(problem.problem, problem.plan, [&](int planned) {
      line.show("planning", static_cast<double>(planned) / problem.problem.ranks,
                std::chrono::duration<double>(std::chrono::steady_clock::now() - begin).count());
    });
    line.clear();
    fmt::print("{}\n", options.json ? costs.to_json() : costs.to_string());
    return kOk;
  }
  line.say("planning");  // seldom long, as of LongNet dealt in stripes
  const Plan plan = make_plan(problem.problem, problem.plan, options.rank);
  line.clear();
  fmt::print("{}\n", options.json ? plan.to_json() : printable(plan.to_string(), '\n'));
  return kOk;
}

}  // namespace

Body setup_plan(CLI::App& app) {
  auto options = std::make_shared<PlanCommandOptions>();
  app.footer(kPlanFooter);
  CLI::Option* rank = add_parsed(app, "--rank", "N|all", "whose plan (default 0); all: a table of what every rank takes",
                                 [options](const std::string& text) { options->rank = parse_rank(text); });
  add_parsed(app, "--device", "cpu|cuda", "what the rank computes on, whose memory is booked (default cpu)",
             [options](const std::string& text) { options->problem.plan.device = parse_device_kind(text); });
  CLI::Option* host_tensors = app.add_flag("--host-tensors", options->problem.plan.host_tensors,
                                           "tensors stream from the host through the device; o is not kept in float32");
  add_parsed(app, "--host-bandwidth", "BYTES/S", "of the model, between tensors on the host and the device (default 25e9)",
             [options](const std::string& text) {
               const double bytes = parse_real("--host-bandwidth", text);
               if (!(bytes >= 1 && bytes < 9e18)) {
                 throw InvalidArgument(fmt::format("--host-bandwidth ({}) must be in [1, 9e18)", text));
               }
               options->problem.plan.cost.host_bytes_per_second = static_cast<std::int64_t>(bytes);
             })
      ->needs(host_tensors);
  app.add_flag("--forward-only", options->forward_only, "leave the backward pass out");
  CLI::Option* json = app.add_flag("--json", options->json, "print JSON");
  CLI::Option* draw =
      add_parsed(app, "--draw", "text|svg[:FILE]", "draw who attends to whom, for small problems, instead of printing the plan",
                 [options](const std::string& text) {
                   if (text != "text" && text != "svg" && !(text.starts_with("svg:") && text.size() > 4)) {
                     throw InvalidArgument(fmt::format("--draw ({}) must be text, svg or svg:FILE", text));
                   }
                   options->draw = text;
                 });
  draw->excludes(rank)->excludes(json);  // it shows all ranks, and is no JSON
  CLI::Option* input = app.add_option("--input", options->input, "take shapes, dtype and documents from this file");
  input->type_name("FILE");
  add_parsed(app, "--layout", "LAYOUT", "of the file: bshd or bhsd", [options](const std::string& text) {
    options->layout = parse_layout(text);
  })->needs(input);
  add_shape_options(app, options->problem);
  add_problem_options(app, options->problem);
  return [&app, options, input] {
    options->has_input = input->count() > 0;
    return run(app, *options);
  };
}

}  // namespace ringspan::cli
