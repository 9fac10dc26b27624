// ringspan plan: what each rank would compute, send and keep.
#include <fmt/format.h>

#include <CLI/App.hpp>
#include <fstream>
#include <memory>
#include <string>
#include <string_view>

#include "command.h"
#include "file_error.h"
#include "problem_options.h"
#include "qkv_file.h"
#include "ringspan/draw.h"
#include "ringspan/error.h"
#include "text.h"

namespace ringspan::cli {
namespace {

constexpr const char* kFooter = R"(examples
  memory, traffic and the rejected strategies for LongNet over 1,024 ranks
    ringspan plan --tokens 1000000000 --ranks 1024 --pattern dilated:2048x1,4096x2,8192x4
  the shapes of a file, a ring under a budget, as rank 3 sees it
    ringspan plan --input qkv.safetensors --ranks 8 --rank 3 --pattern causal --strategy ring \
      --memory 2GiB
  who attends to whom
    ringspan plan --tokens 24 --ranks 3 --pattern window:5,0 --draw text)";

struct PlanCommandOptions {
  ProblemOptions problem;
  std::string input, layout, draw;
  int rank = 0;
  bool json = false, forward_only = false;
};

void draw(const PlanCommandOptions& options) {
  const Problem& problem = options.problem.problem;
  if (options.draw == "text") {
    fmt::print("{}", draw_text(problem, options.problem.plan));
    return;
  }
  const std::string svg = draw_svg(problem, options.problem.plan);
  constexpr std::string_view kToFile = "svg:";
  if (!options.draw.starts_with(kToFile)) {
    fmt::print("{}", svg);
    return;
  }
  const std::string path = options.draw.substr(kToFile.size());
  std::ofstream file(path, std::ios::binary);
  file << svg;
  file.close();
  if (!file) throw FileError(fmt::format("{}: cannot be written", path));
}

int run(PlanCommandOptions& options) {
  ProblemOptions& problem = options.problem;
  if (!options.input.empty()) {
    if (problem.tokens_given) throw InvalidArgument("--tokens and --input exclude each other: the file has the shapes");
    QkvFile file(options.input);
    std::optional<Layout> layout;
    if (!options.layout.empty()) layout = parse_layout(options.layout);
    file.describe(problem, layout);
  } else if (!problem.tokens_given) {
    throw InvalidArgument("plan needs --tokens N or --input FILE");
  }
  problem.plan.backward = !options.forward_only;
  if (problem.plan.host_tensors) problem.plan.keep_o_float32 = false;  // there is no option for it, and it would be refused
  complete(problem);
  if (!options.draw.empty()) {
    draw(options);
    return kOk;
  }
  const Plan plan = make_plan(problem.problem, problem.plan, options.rank);
  fmt::print("{}\n", options.json ? plan.to_json() : plan.to_string());
  return kOk;
}

}  // namespace

Body setup_plan(CLI::App& app) {
  auto options = std::make_shared<PlanCommandOptions>();
  app.footer(kFooter);
  add_integer(app, "--rank", 0, [options](std::int64_t n) { options->rank = static_cast<int>(n); }, "whose plan (default 0)");
  add_parsed(app, "--device", "cpu|cuda", "what the rank computes on, whose memory is booked (default cpu)",
             [options](const std::string& text) { options->problem.plan.device = parse_device_kind(text); });
  app.add_flag("--host-tensors", options->problem.plan.host_tensors,
               "tensors stream from the host through the device; o is not kept in float32");
  add_parsed(app, "--host-bandwidth", "BYTES/S", "of the model, between tensors on the host and the device (default 25e9)",
             [options](const std::string& text) {
               const double bytes = parse_real("--host-bandwidth", text);
               if (!(bytes >= 1 && bytes < 9e18)) {
                 throw InvalidArgument(fmt::format("--host-bandwidth ({}) must be in [1, 9e18)", text));
               }
               options->problem.plan.cost.host_bytes_per_second = static_cast<std::int64_t>(bytes);
             });
  app.add_flag("--forward-only", options->forward_only, "leave the backward pass out");
  app.add_flag("--json", options->json, "print JSON");
  add_parsed(app, "--draw", "text|svg[:FILE]", "draw who attends to whom, for small problems, instead of printing the plan",
             [options](const std::string& text) {
               if (text != "text" && text != "svg" && !(text.starts_with("svg:") && text.size() > 4)) {
                 throw InvalidArgument(fmt::format("--draw ({}) must be text, svg or svg:FILE", text));
               }
               options->draw = text;
             });
  app.add_option("--input", options->input, "take shapes, dtype and documents from this file")->type_name("FILE");
  app.add_option("--layout", options->layout, "of the file: bshd or bhsd")->type_name("LAYOUT");
  add_shape_options(app, options->problem);
  add_problem_options(app, options->problem);
  return [options] { return run(*options); };
}

}  // namespace ringspan::cli
