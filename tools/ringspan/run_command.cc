// ringspan run: attention on the q, k, v of a file.
#include <fmt/format.h>

#include <CLI/App.hpp>
#include <filesystem>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "command.h"
#include "file_error.h"
#include "files.h"
#include "io/problem_line.h"
#include "problem_options.h"
#include "qkv_file.h"
#include "report.h"
#include "sequential.h"
#include "text.h"
#include "verification.h"
#include "watch.h"

namespace ringspan::cli {
namespace {

constexpr const char* kRunFooter = R"(The input holds q, k, v as (batch, tokens, heads, head_dim), and may hold cu_seqlens (or
cu_seqlens_q and cu_seqlens_k), sinks and alibi_slopes. The output holds o and lse, and with --grad
dq, dk, dv (and dsinks); it appears when all of it is there.

examples
  causal attention over 4 ranks
    ringspan run --input qkv.safetensors --output out.safetensors --ranks 4 --pattern causal \
      --sharding zigzag --strategy ring
  packed documents, with gradients for a random d_out, checked against float64
    ringspan run --input packed.safetensors --output out.safetensors --ranks 4 \
      --pattern "causal & documents" --grad random:1 --verify
  LongNet, one rank after the other in the memory of one
    ringspan run --input long.safetensors --output out.safetensors --ranks 8 \
      --pattern dilated:2048x1,4096x2 --strategy exchange --sequential)";

struct RunOptions {
  ProblemOptions problem;
  std::string input, output, gradient, json;
  std::optional<Layout> layout;
  bool gradient_wanted = false, json_wanted = false, verify = false, sequential = false;
  std::string transport;  // empty: not given
  int compare = 0;
  double deadline = 30;
};

// Results go to the file under its temporary name.
class FileTarget final : public Target {
 public:
  explicit FileTarget(io::SafetensorsWriter& writer) : writer_(writer) {}
  void write(std::string_view name, std::int64_t offset, const void* data, std::int64_t bytes) override {
    writer_.write(name, offset, data, bytes);
  }

 private:
  io::SafetensorsWriter& writer_;
};

std::vector<io::TensorSpec> output_tensors(const Problem& problem, Layout layout, bool backward) {
  const OutputShapes shapes(problem, layout);
  std::vector<io::TensorSpec> specs;
  const auto add = [&](const char* name, const TensorShape& s) {
    specs.push_back({name, std::string(file_dtype(s.dtype)),
                     s.layout == Layout::bshd ? std::vector{s.batch, s.tokens, s.heads, s.width}
                                              : std::vector{s.batch, s.heads, s.tokens, s.width}});
  };
  add("o", shapes.o);
  specs.push_back({"lse", "F32", {problem.batch, problem.heads, problem.tokens_q}});
  if (!backward) return specs;
  add("dq", shapes.dq);
  add("dk", shapes.dk);
  add("dv", shapes.dv);
  if (problem.sinks) specs.push_back({"dsinks", "F32", {problem.heads}});
  return specs;
}

// What was written so far, mapped.
Outputs outputs_of(const io::SafetensorsReader& reader) {
  const auto data = [&](const char* name) -> const std::byte* {
    const io::TensorInfo* info = reader.find(name);
    return info == nullptr ? nullptr : reader.data(*info);
  };
  return {data("o"), data("lse"), data("dq"), data("dk"), data("dv"), data("dsinks")};
}

class Run {
 public:
  explicit Run(RunOptions& options) : options_(options), file_(options.input) {}

  int run() {
    {
      const EndAtSignal interruptible;  // choosing does not ask, and nothing has to be cleaned up
      prepare();
    }
    std::unique_ptr<io::SafetensorsWriter> writer = make_writer();
    remove_when_killed(writer->temporary_path());
    FileTarget target(*writer);
    RunReport report = execute(target, std::filesystem::path(writer->temporary_path()).parent_path().string());
    if (options_.compare > 0) compare(report);
    if (options_.verify) verify(report, *writer);
    const bool good = !report.verification || report.verification->passed;
    throw_if_interrupted();
    if (good) {
      as_file_error([&] { writer->finish(); });
      report.output = options_.output;
    } else {
      report.notes.push_back("verification failed: no output was written");
    }
    remove_when_killed({});
    print(report);
    return good ? kOk : kVerificationFailed;
  }

 private:
  const Problem& problem() const { return options_.problem.problem; }
  const PlanOptions& plan_options() const { return options_.problem.plan; }

  void prepare() {
    const GradientSpec gradient = options_.gradient_wanted ? parse_gradient(options_.gradient) : GradientSpec{};
    std::vector<NamedFile> files{{"--input", options_.input}, {"--output", options_.output, true}};
    if (gradient.kind == GradientSpec::Kind::file) files.push_back({"--grad", gradient.file});
    if (!options_.json.empty()) files.push_back({"--json", options_.json, true});
    check_files(files);
    options_.problem.plan.backward = gradient.wanted();
    file_.describe(options_.problem, options_.layout);
    complete(options_.problem);
    file_.inputs().gradient = gradient;
    if (gradient.kind == GradientSpec::Kind::file) file_.attach_gradient(gradient.file, problem());
    if (options_.sequential && !options_.transport.empty()) {
      throw InvalidArgument("--sequential and --transport exclude each other: there is one rank at a time");
    }
    if (options_.sequential && options_.compare > 0) {
      throw InvalidArgument("--sequential and --compare exclude each other: ranks that take turns are not faster");
    }
    if (options_.compare > 0) {  // refused before the work
      const auto [other, plan] = on(options_.compare);
      other.validate();
      make_plan(other, plan, 0);
    }
    file_.load();
  }

  std::unique_ptr<io::SafetensorsWriter> make_writer() const {
    const io::Metadata metadata{
        {"problem", io::print_problem(problem())},
        {"layout", file_.layout() == Layout::bshd ? "batch,tokens,heads,head_dim" : "batch,heads,tokens,head_dim"},
        {"writer", "ringspan " + program_version()}};
    const std::vector<io::TensorSpec> specs = output_tensors(problem(), file_.layout(), plan_options().backward);
    return as_file_error([&] { return std::make_unique<io::SafetensorsWriter>(options_.output, specs, metadata); });
  }

  // `folder`: where the output will be, with room for what ranks that take turns add up.
  RunReport execute(Target& target, const std::string& folder) {
    RunReport report(make_plan(problem(), plan_options(), 0));
    // What rank 0 chose is what every rank runs: automatic decides once.
    PlanOptions resolved = report.plan.options();
    resolved.memory_budget = plan_options().memory_budget;  // which each rank has to hold, looked at or not
    report.plans = plan_all(problem(), resolved);
    report.dlse = file_.inputs().dlse.data != nullptr;
    report.one_rank_bytes = one_rank_bytes(report.dlse);
    report.input = options_.input;
    report.transport = options_.sequential ? "sequential" : options_.transport.empty() ? "threads" : options_.transport;
    report.chosen = plan_options().strategy == Strategy::automatic && problem().ranks > 1;
    report.problem_line = io::print_problem(problem());
    report.notes = file_.notes();
    const WorldOptions world = world_options();
    if (options_.sequential) {
      report.sequential =
          run_sequentially(problem(), resolved, file_.inputs(), file_.layout(), world, folder.empty() ? "." : folder, target);
      report.world = report.sequential->world;
    } else {
      report.world = run_world(report.plans, file_.inputs(), file_.layout(), world, &target);
    }
    return report;
  }

  WorldOptions world_options() const {
    WorldOptions world;
    world.processes = options_.transport == "processes";
    world.show_progress = true;
    world.execute.deadline = Communicator::Seconds(options_.deadline);
    return world;
  }

  // The problem on another number of ranks, planned anew for the same kernels and tiles; lists of positions hold for the number
  // that they were made for.
  std::pair<Problem, PlanOptions> on(int ranks) const {
    Problem other = problem();
    other.ranks = ranks;
    if (ranks != problem().ranks) {
      for (Sharding* sharding : {&other.sharding_q, &other.sharding_k}) {
        if (sharding->kind == ShardingKind::explicit_lists) *sharding = {};
      }
    }
    PlanOptions plan;
    plan.backward = plan_options().backward;
    plan.threads = plan_options().threads;
    plan.attend_kernel = plan_options().attend_kernel;
    plan.attend_backward_kernel = plan_options().attend_backward_kernel;
    plan.attend_tile = plan_options().attend_tile;
    plan.attend_backward_tile = plan_options().attend_backward_tile;
    plan.tuned = plan_options().tuned;
    return {other, plan};
  }

  std::int64_t one_rank_bytes(bool dlse) const {
    const auto [one, plan] = on(1);
    return memory_bytes(make_plan(one, plan, 0), dlse);
  }

  void compare(RunReport& report) {
    const auto [other, plan] = on(options_.compare);
    WorldOptions world = world_options();
    world.progress_prefix = fmt::format("{} rank{} for comparison, ", other.ranks, other.ranks == 1 ? "" : "s");
    report.compared_ranks = options_.compare;
    if (other.sharding_q.kind != problem().sharding_q.kind || other.sharding_k.kind != problem().sharding_k.kind)
      report.notes.push_back(
          fmt::format("explicit lists are for {} ranks: those of --compare {} have contiguous shards instead", problem().ranks,
                      other.ranks));
    // As above: automatic decides once.
    report.compared =
        run_world(plan_all(other, make_plan(other, plan, 0).options()), file_.inputs(), file_.layout(), world, nullptr);
  }

  void verify(RunReport& report, const io::SafetensorsWriter& writer) {
    ProgressLine line(true);
    line.say("verifying against float64");
    const io::SafetensorsReader written = open_safetensors(writer.temporary_path());
    report.verification = verify_outputs(problem(), file_.inputs(), file_.layout(), outputs_of(written), 1);
  }

  void print(const RunReport& report) const {
    const bool json_on_stdout = options_.json_wanted && options_.json.empty();
    if (json_on_stdout) {
      fmt::print("{}\n", to_json(report));
      return;
    }
    fmt::print("{}", to_text(report));
    if (options_.json_wanted) write_file(options_.json, to_json(report) + "\n");
  }

  RunOptions& options_;
  QkvFile file_;
};

}  // namespace

Body setup_run(CLI::App& app) {
  auto options = std::make_shared<RunOptions>();
  app.footer(kRunFooter);
  app.add_option("--input", options->input, "safetensors file with q, k, v")->type_name("FILE")->required();
  app.add_option("--output", options->output, "safetensors file for the results")->type_name("FILE")->required();
  CLI::Option* gradient =
      app.add_option(
             "--grad", options->gradient,
             "run the backward pass too: gradient of o from a file (d_out, and dlse if it is there), random:SEED or ones")
          ->type_name("FILE|random:SEED|ones");
  add_parsed(app, "--layout", "LAYOUT",
             "bshd (batch, tokens, heads, head_dim) or bhsd (default: what the file's metadata says, else bshd)",
             [options](const std::string& text) { options->layout = parse_layout(text); });
  add_transport(app, [options](bool processes) { options->transport = processes ? "processes" : "threads"; });
  app.add_flag("--sequential", options->sequential,
               "one rank after the other, in the memory of one (needs --strategy exchange)");
  app.add_flag("--verify", options->verify, "check the results against float64 before they are written");
  add_integer(
      app, "--compare", 1, [options](std::int64_t n) { options->compare = static_cast<int>(n); },
      "also time the problem on so many ranks: speed-up and efficiency");
  CLI::Option* json = app.add_option("--json", options->json, "print the summary as JSON, or write it to FILE")
                          ->type_name("[FILE]")
                          ->expected(0, 1);
  add_deadline(app, options->deadline);
  add_problem_options(app, options->problem);
  return [options, gradient, json] {
    options->gradient_wanted = gradient->count() > 0;
    options->json_wanted = json->count() > 0;
    return Run(*options).run();
  };
}

}  // namespace ringspan::cli
