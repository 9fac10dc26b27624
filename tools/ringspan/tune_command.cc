// ringspan tune: measures tiles of the kernels and rows of a bucket on this machine, and keeps those that are faster.
#include <fmt/format.h>

#include <CLI/App.hpp>
#include <algorithm>
#include <chrono>
#include <cmath>
#include <ctime>
#include <memory>
#include <nlohmann/json.hpp>
#include <optional>
#include <string>
#include <vector>

#include "api/tune_file.h"
#include "command.h"
#include "file_error.h"
#include "kernels/attend.h"
#include "problem_options.h"
#include "random_inputs.h"
#include "ringspan/error.h"
#include "ringspan/tuning.h"
#include "text.h"
#include "tune_measure.h"
#include "tune_search.h"
#include "watch.h"

namespace ringspan::cli {
namespace {

using internal::TuneEntry;
using nlohmann::ordered_json;

constexpr std::int64_t kDefaultTokens = 4096, kQuickTokens = 2048;

struct TuneOptions {
  std::vector<DType> dtypes{DType::float32, DType::bfloat16, DType::float16};
  std::vector<std::int64_t> head_dims{64, 128};
  std::int64_t tokens = 0;
  bool quick = false, dry_run = false, json = false;
  PlanOptions plan;  // the names of the kernels
};

// A dtype and a head_dim with what is tried for them. The first of each list is the default.
struct Combination {
  Problem problem, on_two_ranks;
  PlanOptions options;
  TuneEntry entry;
  std::vector<Tile> forward, backward;
  std::vector<std::int64_t> buckets;
  Finding of_forward, of_backward, of_buckets;
  PassSeconds seconds;           // of a run with the defaults
  double two_ranks_seconds = 0;  // both passes
};

void add_new(std::vector<int>& list, int value) {
  if (std::find(list.begin(), list.end(), value) == list.end()) list.push_back(value);
}

// Multiples of the kernel's own size that it takes; its own first.
std::vector<int> sizes_around(int own, int step, int least, int most, std::initializer_list<double> factors) {
  std::vector<int> sizes{own};
  for (const double factor : factors) {
    const int size = static_cast<int>(std::lround(factor * own / step)) * step;
    if (size >= least && size <= most) add_new(sizes, size);
  }
  return sizes;
}

std::vector<Tile> tiles_around(const kernels::TileSizes& sizes, bool quick) {
  if (sizes.step.queries == 0) return {Tile{}};
  const auto around = [&](int kernels::TileSize::*of, std::initializer_list<double> factors) {
    return sizes_around(sizes.own.*of, sizes.step.*of, sizes.least.*of, sizes.most.*of, factors);
  };
  const auto queries =
      quick ? around(&kernels::TileSize::queries, {0.5, 2}) : around(&kernels::TileSize::queries, {0.5, 0.75, 1.5, 2, 3});
  const auto keys =
      quick ? around(&kernels::TileSize::keys, {0.5, 2}) : around(&kernels::TileSize::keys, {0.25, 0.5, 0.75, 1.5, 2});
  std::vector<Tile> tiles;
  for (const int q : queries) {
    for (const int k : keys) tiles.push_back({q, k});
  }
  return tiles;
}

std::string today() {
  const std::time_t now = std::chrono::system_clock::to_time_t(std::chrono::system_clock::now());
  std::tm day{};
  ::gmtime_r(&now, &day);
  return fmt::format("{:04}-{:02}-{:02}", day.tm_year + 1900, day.tm_mon + 1, day.tm_mday);
}

// One head, causal; for buckets twice as many tokens, dealt zigzag to two ranks in a ring, so that a rank has as many.
Combination combination(const TuneOptions& options, DType dtype, int head_dim) {
  Combination c;
  Problem& p = c.problem;
  p.tokens_q = p.tokens_k = options.tokens;
  p.heads = p.kv_heads = 1;
  p.head_dim = p.head_dim_v = head_dim;
  p.dtype = dtype;
  p.pattern = Pattern::parse("causal");
  c.on_two_ranks = p;
  c.on_two_ranks.tokens_q = c.on_two_ranks.tokens_k = 2 * options.tokens;
  c.on_two_ranks.ranks = 2;
  c.on_two_ranks.sharding_q = c.on_two_ranks.sharding_k = Sharding::parse("zigzag");
  c.options = options.plan;

  kernels::AttendShape shape;
  shape.dtype = dtype;
  shape.head_dim = shape.head_dim_v = head_dim;
  p.validate();
  const kernels::AttendKernel& attend = select_attend(shape, c.options.attend_kernel);
  const kernels::AttendKernel& backward = select_attend_backward(shape, c.options.attend_backward_kernel);
  c.entry = {dtype, head_dim, today(), std::string(attend.name), std::string(backward.name), {}, {}, 0};
  c.forward = tiles_around(attend.tile_sizes(shape), options.quick);
  c.backward = tiles_around(backward.tile_sizes(shape), options.quick);

  PlanOptions ring = c.options;
  ring.strategy = Strategy::ring;
  c.buckets = {make_plan(c.on_two_ranks, ring, 0).bucket_rows()};
  for (const double factor : {0.25, 0.5, 2.0, 4.0, 8.0}) {
    const auto rows = static_cast<std::int64_t>(factor * static_cast<double>(c.buckets.front()));
    if (rows >= 16 && rows <= options.tokens) c.buckets.push_back(rows);
  }
  return c;
}

class Tuner {
 public:
  Tuner(const TuneOptions& options, std::string file) : options_(options), file_(std::move(file)), line_(true) {
    if (options.quick) stages_ = {2, 3, 3, 7};
  }

  int run() {
    for (const DType dtype : options_.dtypes) {
      for (const std::int64_t head_dim : options_.head_dims) {
        combinations_.push_back(combination(options_, dtype, static_cast<int>(head_dim)));
      }
    }
    estimate();
    for (std::size_t i = 0; i < combinations_.size(); ++i) {
      tune(combinations_[i]);
      if (!options_.dry_run) keep(i);  // first: where nobody reads what is printed, the program ends there
      if (!options_.json) print(combinations_[i]);
    }
    line_.clear();
    if (options_.json) {
      print_json(!options_.dry_run);
    } else {
      fmt::print("{}\n", options_.dry_run ? "nothing was written" : fmt::format("written to {}", file_));
    }
    return kOk;
  }

 private:
  // What was measured is told, even where it cannot be written.
  void keep(std::size_t index) {
    try {
      internal::write_tune_entry(file_, internal::this_machine(), combinations_[index].entry);
    } catch (const Error& error) {
      line_.clear();
      combinations_.resize(index + 1);
      if (options_.json) {
        print_json(false);
      } else {
        print(combinations_[index]);
      }
      throw FileError(error.what());
    }
  }

  // Runs the defaults once, and says what the rest will cost.
  void estimate() {
    double seconds = 0;
    std::int64_t runs = 0, pairs = 0;
    for (Combination& c : combinations_) {
      line_.say(fmt::format("first runs, {} of head_dim {}", to_string(c.entry.dtype), c.entry.head_dim));
      c.seconds = time_once(c.problem, c.options);
      const PassSeconds on_two = time_once(c.on_two_ranks, ring_of(c, c.buckets.front()));
      c.two_ranks_seconds = on_two.forward + on_two.backward;
      const double both = c.seconds.forward + c.seconds.backward;
      const int forward = repeats_of(c.seconds.forward) * stages_.runs(c.forward.size());
      const int backward = repeats_of(both) * stages_.runs(c.backward.size());
      runs += forward + backward;
      pairs += stages_.runs(c.buckets.size());
      seconds += forward * c.seconds.forward + backward * both + stages_.runs(c.buckets.size()) * c.two_ranks_seconds;
    }
    line_.clear();
    total_ = seconds;
    if (options_.json) return;
    fmt::print(
        "{} of dtype and head_dim; forward and backward, causal: {} runs of {} tokens on 1 thread,\n"
        "{} of {} on 2 ranks: about {}\n\n",
        combinations_.size() == 1 ? "1 combination" : fmt::format("{} combinations", combinations_.size()), count_text(runs),
        count_text(options_.tokens), count_text(pairs), count_text(2 * options_.tokens), seconds_text(seconds));
    fmt::print("{:<10}{:>8}  {:<9}{:>11}{:>11}{:>7}{:>10}{:>9}\n", "dtype", "head_dim", "size", "default", "best", "tried",
               "gain", "spread");
  }

  // So that short runs add up to some time, in which a disturbance passes.
  static int repeats_of(double seconds) {
    constexpr double kSeconds = 0.08;
    return static_cast<int>(std::clamp(kSeconds / std::max(seconds, 1e-9), 1.0, 10.0));
  }

  static PassSeconds time_once(const Problem& problem, const PlanOptions& options) {
    const RandomInputs random(problem);
    return run_in_turns(problem, {options}, random.inputs(), 1, 1, [] {})[0][0];
  }

  static PlanOptions ring_of(const Combination& c, std::int64_t bucket) {
    PlanOptions options = c.options;
    options.strategy = Strategy::ring;
    options.bucket_rows = bucket;
    options.attend_tile = c.entry.attend_tile;
    options.attend_backward_tile = c.entry.attend_backward_tile;
    return options;
  }

  // `weight`: of the forecast seconds, for what is shown.
  std::function<void()> step(const Combination& c, const char* what, double weight) {
    return [this, &c, what, weight] {
      throw_if_interrupted();
      done_ += weight;
      const std::chrono::duration<double> passed = std::chrono::steady_clock::now() - begin_;
      line_.show(fmt::format("{} of head_dim {}, {}", to_string(c.entry.dtype), c.entry.head_dim, what),
                 total_ > 0 ? std::min(1.0, done_ / total_) : -1, passed.count());
    };
  }

  void tune(Combination& c) {
    {
      const RandomInputs random(c.problem);
      const auto tiles = [&](const std::vector<Tile>& list, Tile PlanOptions::*of, double PassSeconds::*pass,
                             const char* what) {
        const bool backward = pass == &PassSeconds::backward;
        const double weight = c.seconds.forward + (backward ? c.seconds.backward : 0);
        const int repeats = repeats_of(weight);
        return search(list.size(), stages_, [&](const std::vector<std::size_t>& candidates, int rounds) {
          std::vector<PlanOptions> options(candidates.size(), c.options);
          for (std::size_t i = 0; i < candidates.size(); ++i) {
            options[i].*of = list[candidates[i]];
            options[i].backward = backward;
          }
          std::vector<std::vector<double>> seconds;
          for (const auto& runs :
               run_in_turns(c.problem, options, random.inputs(), rounds, repeats, step(c, what, repeats * weight))) {
            seconds.emplace_back();
            for (const PassSeconds& run : runs) seconds.back().push_back(run.*pass);
          }
          return seconds;
        });
      };
      c.of_forward = tiles(c.forward, &PlanOptions::attend_tile, &PassSeconds::forward, "tiles forward");
      c.of_backward = tiles(c.backward, &PlanOptions::attend_backward_tile, &PassSeconds::backward, "tiles backward");
      if (c.of_forward.used) c.entry.attend_tile = c.forward[c.of_forward.best];
      if (c.of_backward.used) c.entry.attend_backward_tile = c.backward[c.of_backward.best];
    }
    const RandomInputs random(c.on_two_ranks);
    c.of_buckets = search(c.buckets.size(), stages_, [&](const std::vector<std::size_t>& candidates, int rounds) {
      std::vector<PlanOptions> options;
      for (const std::size_t candidate : candidates) options.push_back(ring_of(c, c.buckets[candidate]));
      std::vector<std::vector<double>> seconds;
      for (const auto& runs :
           run_in_turns(c.on_two_ranks, options, random.inputs(), rounds, 1, step(c, "buckets", c.two_ranks_seconds))) {
        seconds.emplace_back();
        for (const PassSeconds& run : runs) seconds.back().push_back(run.forward + run.backward);
      }
      return seconds;
    });
    if (c.of_buckets.used) c.entry.bucket_rows = c.buckets[c.of_buckets.best];
  }

  static std::string tile_text(Tile tile) { return tile == Tile{} ? "-" : fmt::format("{} x {}", tile.queries, tile.keys); }

  void print(const Combination& c) {
    line_.clear();
    const auto row = [&](const char* size, const Finding& f, const auto& list, const auto& text, bool first) {
      const std::string gain = f.best == 0 ? "-" : fmt::format("{:+.1f} %", 100 * f.gain);
      const std::string spread = f.best == 0 ? "-" : fmt::format("{:.1f} %", 100 * f.spread);
      fmt::print("{:<10}{:>8}  {:<9}{:>11}{:>11}{:>7}{:>10}{:>9}  {}\n", first ? to_string(c.entry.dtype) : "",
                 first ? fmt::format("{}", c.entry.head_dim) : "", size, text(list.front()), text(list[f.best]), list.size(),
                 gain, spread,
                 f.used        ? "used"
                 : f.best == 0 ? "default is best"
                               : "within the noise: default");
    };
    row("forward", c.of_forward, c.forward, tile_text, true);
    row("backward", c.of_backward, c.backward, tile_text, false);
    row("bucket", c.of_buckets, c.buckets, [](std::int64_t rows) { return fmt::format("{} rows", rows); }, false);
    std::fflush(stdout);
  }

  void print_json(bool written) const {
    const auto json_of = [](const Finding& f, const auto& list, const auto& value) {
      ordered_json tried = ordered_json::array();
      for (std::size_t i = 0; i < list.size(); ++i) tried.push_back({{"size", value(list[i])}, {"seconds", f.seconds[i]}});
      return ordered_json{{"default", value(list.front())},
                          {"best", value(list[f.best])},
                          {"used", f.used},
                          {"gain", f.gain},
                          {"spread", f.spread},
                          {"default_seconds", f.default_seconds},
                          {"best_seconds", f.best_seconds},
                          {"tried", std::move(tried)}};
    };
    const auto tile = [](Tile t) { return ordered_json::array({t.queries, t.keys}); };
    const auto rows = [](std::int64_t n) { return n; };
    const internal::TuneMachine machine = internal::this_machine();
    ordered_json list = ordered_json::array();
    for (const Combination& c : combinations_) {
      ordered_json forward = json_of(c.of_forward, c.forward, tile), backward = json_of(c.of_backward, c.backward, tile);
      forward["kernel"] = c.entry.attend_kernel;
      backward["kernel"] = c.entry.attend_backward_kernel;
      list.push_back({{"dtype", to_string(c.entry.dtype)},
                      {"head_dim", c.entry.head_dim},
                      {"forward", std::move(forward)},
                      {"backward", std::move(backward)},
                      {"bucket", json_of(c.of_buckets, c.buckets, rows)}});
    }
    const ordered_json json{{"version", 1},
                            {"date", today()},
                            {"processor", machine.processor},
                            {"instructions", machine.instructions},
                            {"library", machine.version},
                            {"tokens", options_.tokens},
                            {"quick", options_.quick},
                            {"file", written ? ordered_json(file_) : ordered_json()},
                            {"combinations", std::move(list)}};
    fmt::print("{}\n", json_text(json));
  }

  const TuneOptions& options_;
  std::string file_;
  ProgressLine line_;
  Stages stages_;
  std::vector<Combination> combinations_;
  std::chrono::steady_clock::time_point begin_ = std::chrono::steady_clock::now();
  double total_ = 0, done_ = 0;
};

int run(TuneOptions& options) {
  if (options.tokens == 0) options.tokens = options.quick ? kQuickTokens : kDefaultTokens;
  const std::string file = options.dry_run ? "" : tuning_file();
  if (!options.dry_run && file.empty()) {
    throw InvalidArgument(
        "there is no file to write: RINGSPAN_TUNE_FILE is empty, or HOME is not set; name one, or use --dry-run");
  }
  if (!file.empty()) as_file_error([&] { internal::prepare_tune_file(file); });  // refuses before the work
  return Tuner(options, file).run();
}

// Each would be measured twice.
template <typename T>
void require_different(const std::string& option, const std::string& text, const std::vector<T>& list) {
  for (auto at = list.begin(); at != list.end(); ++at) {
    if (std::find(list.begin(), at, *at) == at) continue;
    throw InvalidArgument(fmt::format("{} ({}) names one of them twice", option, text));
  }
}

std::vector<std::string> parts_of(const std::string& text) {
  std::vector<std::string> parts(1);
  for (const char c : text) {
    if (c == ',') {
      parts.emplace_back();
    } else {
      parts.back().push_back(c);
    }
  }
  return parts;
}

}  // namespace

Body setup_tune(CLI::App& app) {
  auto options = std::make_shared<TuneOptions>();
  app.footer(
      "Sizes that are faster than the kernels' own by more than the noise are kept for this machine, in\n"
      "$RINGSPAN_TUNE_FILE, else $XDG_CACHE_HOME/ringspan/tune.json, else ~/.cache/ringspan/tune.json.\n"
      "`ringspan plan` names the source of each size. Measure while the machine does nothing else.\n\n"
      "example\n  ringspan tune --dtype bfloat16 --head-dim 128");
  add_parsed(app, "--dtype", "LIST", "which (default float32,bfloat16,float16)", [options](const std::string& text) {
    options->dtypes.clear();
    for (const std::string& part : parts_of(text)) options->dtypes.push_back(parse_dtype(part));
    require_different("--dtype", text, options->dtypes);
  });
  add_parsed(app, "--head-dim", "LIST", "which (default 64,128)", [options](const std::string& text) {
    options->head_dims = parse_integers("--head-dim", text);
    for (const std::int64_t d : options->head_dims) {
      if (d < 1 || d > 256) throw InvalidArgument(fmt::format("--head-dim ({}) must be in [1, 256]", d));
    }
    require_different("--head-dim", text, options->head_dims);
  });
  add_integer(
      app, "--tokens", 64, [options](std::int64_t n) { options->tokens = n; }, "of a run (default 4096, 2048 with --quick)");
  add_kernel_option(app, options->plan);
  app.add_flag("--quick", options->quick, "fewer sizes and runs");
  app.add_flag("--dry-run", options->dry_run, "measure and print, write nothing");
  app.add_flag("--json", options->json, "print JSON, with all that was tried");
  return [options] { return run(*options); };
}

}  // namespace ringspan::cli
