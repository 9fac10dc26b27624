// The choice among strategies and bucket sizes.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <limits>
#include <string>
#include <string_view>

#include "plan/strategy.h"
#include "plan_testing/check_plan.h"
#include "plan_testing/random_problem.h"
#include "ringspan/error.h"

namespace ringspan {
namespace {

using ::testing::HasSubstr;

Problem problem(std::int64_t tokens, int ranks, const char* pattern = "causal") {
  Problem p;
  p.tokens_q = p.tokens_k = tokens;
  p.heads = 8;
  p.kv_heads = 4;
  p.ranks = ranks;
  p.pattern = Pattern::parse(pattern);
  return p;
}

// The slowest rank's time and the largest rank's bytes of a given strategy.
struct Cost {
  std::int64_t nanoseconds = 0, bytes = 0;
};
Cost cost_of(const Problem& p, PlanOptions options) {
  options.memory_budget = 0;
  Cost cost;
  for (int rank = 0; rank < p.ranks; ++rank) {
    const Plan plan = make_plan(p, options, rank);
    cost.nanoseconds = std::max(cost.nanoseconds, plan.modelled_nanoseconds());
    const Pass pass = options.backward ? Pass::backward : Pass::forward;
    std::int64_t caller = 0;
    for (const MemoryLine& line : plan.memory(pass)) caller += line.in_arena ? 0 : line.bytes;
    cost.bytes = std::max(cost.bytes, caller + plan.arena_bytes());
  }
  return cost;
}

std::string budget_error(const Problem& p, const PlanOptions& options, int rank = 0) {
  try {
    make_plan(p, options, rank);
  } catch (const OutOfBudget& error) {
    return error.what();
  }
  return "";
}

std::int64_t smallest_possible(const std::string& error) {
  const std::string_view words = "the smallest possible is ";
  const std::size_t at = error.find(words);
  return at == std::string::npos ? -1 : std::stoll(error.substr(at + words.size()));
}

TEST(Automatic, IsTheCheapestAndTheSameOnAllRanks) {
  for (std::uint64_t seed = 1; seed <= 60; ++seed) {
    testing::RandomProblem random(seed);
    const Problem p = random.problem(static_cast<int>(random.draw(1, 6)), 60);
    PlanOptions options;
    options.backward = !p.sinks;
    options.cost = {1'000'000 * random.draw(1, 1000), 1'000'000 * random.draw(1, 100), random.draw(0, 20'000)};
    std::vector<Plan> plans = testing::plan_all(p, options);
    for (const Plan& plan : plans) {
      ASSERT_EQ(plan.fingerprint(), plans[0].fingerprint()) << testing::describe(p, options, seed);
      ASSERT_EQ(plan.rejected().size(), plans[0].rejected().size());
    }
    std::int64_t best = std::numeric_limits<std::int64_t>::max();
    for (const internal::StrategyRow& row : internal::strategies()) {
      PlanOptions given = options;
      given.strategy = row.strategy;
      for (int computing = 1; computing < std::max(p.ranks, 2); computing *= 2) {
        given.computing_ranks = row.strategy == Strategy::local ? computing : 0;
        best = std::min(best, cost_of(p, given).nanoseconds);
      }
    }
    ASSERT_EQ(cost_of(p, plans[0].options()).nanoseconds, best) << testing::describe(p, plans[0].options(), seed);
    ASSERT_EQ(testing::check_plans(plans), "") << testing::describe(p, options, seed);
  }
}

TEST(Automatic, KeepsTheRejectedAndWhy) {
  const Plan plan = make_plan(problem(4096, 4), {}, 1);
  std::vector<std::string> names{std::string(to_string(plan.strategy()))};
  if (plan.strategy() == Strategy::local) names[0] += ":" + std::to_string(plan.options().computing_ranks);
  for (const Rejected& rejected : plan.rejected()) {
    names.push_back(rejected.candidate);
    EXPECT_THAT(rejected.reason, HasSubstr("slower by the cost model"));
    EXPECT_GT(rejected.nanoseconds, 0);
  }
  EXPECT_THAT(names,
              ::testing::UnorderedElementsAre("local:1", "local:2", "all-gather", "exchange", "ring", "pass-q", "ulysses"));
}

TEST(Automatic, CallsTiesTies) {
  for (const Rejected& rejected : make_plan(problem(1000, 1), {}, 0).rejected())
    EXPECT_THAT(rejected.reason, HasSubstr("no faster by the cost model")) << rejected.candidate;
}

// The price of messages, bytes and operations decides.
TEST(Automatic, FollowsTheCosts) {
  PlanOptions options;
  options.cost.message_nanoseconds = 10'000'000'000;  // few messages: no buckets
  EXPECT_EQ(make_plan(problem(65'536, 4), options, 0).strategy(), Strategy::all_gather);
  options.cost = {1'000'000, std::int64_t{1} << 50, 0};  // compute is all that counts: everybody takes part, evenly
  Problem p = problem(1024, 4);
  p.sharding_q = p.sharding_k = Sharding::parse("zigzag");
  EXPECT_NE(make_plan(p, options, 0).strategy(), Strategy::local);
  options.cost = {std::int64_t{1} << 50, 1'000'000, 0};  // bytes: few queries travel, not the many keys
  p = problem(8192, 4, "full");
  p.tokens_q = 64;
  p.kv_heads = p.heads;
  EXPECT_EQ(make_plan(p, options, 0).strategy(), Strategy::pass_q);
}

// Every fourth rank reads thousands of rows of others, the first of each four none: evenly spaced ranks of 61 are all of these.
Problem in_step(std::int64_t rows, int ranks) {
  Problem p = problem(rows * ranks, ranks);
  p.pattern = Pattern::parse("dilated:" + std::to_string(4 * rows) + "x1 & causal");
  p.heads = p.kv_heads = ranks;
  return p;
}

TEST(Automatic, SeesRanksInStepWithThePattern) {
  const Problem p = in_step(1000, 61);
  const Plan plan = make_plan(p, {}, 0);
  EXPECT_EQ(plan.strategy(), Strategy::ulysses);
  PlanOptions others;
  for (const auto& [strategy, slow] :
       {std::pair{Strategy::all_gather, 3}, {Strategy::exchange, 3}, {Strategy::ring, 3}, {Strategy::pass_q, 0}}) {
    others.strategy = strategy;
    EXPECT_LT(plan.slowest_nanoseconds(), make_plan(p, others, slow).modelled_nanoseconds()) << to_string(strategy);
  }
}

// Too many to look at all: the one that has the most to do is among those that are looked at.
TEST(Automatic, LooksAtTheRankThatMatters) {
  constexpr int kRanks = 512, kLarge = 299;
  std::string lists;
  for (int rank = 0, first = 0; rank < kRanks; ++rank) {
    const int rows = rank == 0 ? 512 : rank == kLarge ? 3584 : 2048;
    if (rank > 0) lists += ';';
    lists += std::to_string(first) + '-' + std::to_string(first + rows - 1);
    first += rows;
  }
  Problem p = problem(2048 * kRanks, kRanks, "full");
  p.sharding_q = p.sharding_k = Sharding::parse("explicit:" + lists);
  const Plan plan = make_plan(p, {}, 0);
  EXPECT_LT(plan.ranks_looked_at(), kRanks);
  EXPECT_EQ(make_plan(p, plan.options(), kLarge).modelled_nanoseconds(), plan.slowest_nanoseconds());
}

// What the choice takes for granted of strategies in which the owner of the query computes.
TEST(Automatic, NothingBeatsAllAtOnce) {
  for (std::uint64_t seed = 1; seed <= 60; ++seed) {
    testing::RandomProblem random(seed);
    const Problem p = random.problem(static_cast<int>(random.draw(2, 7)), 60);
    PlanOptions options;
    options.backward = !p.sinks;
    options.strategy = Strategy::all_gather;
    PlanOptions others = options;
    for (int rank = 0; rank < p.ranks; ++rank) {
      const std::int64_t least = make_plan(p, options, rank).modelled_nanoseconds();
      for (const Strategy strategy : {Strategy::exchange, Strategy::ring}) {
        for (const std::int64_t rows : {1, 7, 256}) {
          others.strategy = strategy;
          others.bucket_rows = rows;
          EXPECT_GE(make_plan(p, others, rank).modelled_nanoseconds(), least) << testing::describe(p, others, seed);
        }
      }
    }
  }
}

TEST(Automatic, SaysHowItsTimesCompare) {
  const Plan plan = make_plan(problem(1 << 16, 4), {}, 3);
  EXPECT_EQ(plan.ranks_looked_at(), 4);
  EXPECT_EQ(plan.slowest_nanoseconds(), cost_of(plan.problem(), plan.options()).nanoseconds);
  for (const Rejected& rejected : plan.rejected()) EXPECT_GE(rejected.nanoseconds, plan.slowest_nanoseconds());
  PlanOptions given;
  given.strategy = Strategy::ring;
  EXPECT_EQ(make_plan(problem(1 << 16, 4), given, 3).ranks_looked_at(), 0);
}

TEST(Automatic, OneRankIsLocal) { EXPECT_EQ(make_plan(problem(100, 1), {}, 0).strategy(), Strategy::local); }

TEST(Automatic, SaysWhyACombinationIsRefused) {
  PlanOptions options;
  options.bucket_rows = 128;
  const Plan plan = make_plan(problem(4096, 4), options, 0);
  EXPECT_EQ(plan.bucket_rows(), 128);
  const std::vector<Rejected> rejected = plan.rejected();
  const auto ulysses =
      std::find_if(rejected.begin(), rejected.end(), [](const Rejected& r) { return r.candidate == "ulysses"; });
  ASSERT_NE(ulysses, rejected.end());
  EXPECT_EQ(ulysses->reason,
            "strategy ulysses moves everything at once: bucket_rows (128) must be none or auto; use exchange, ring or pass-q");
}

// Scratch, and so the arena, follows the tiles; what travels, and so the fingerprint, does not.
TEST(Tiles, AreTheRanksOwn) {
  PlanOptions options;
  options.strategy = Strategy::ring;
  options.attend_kernel = options.attend_backward_kernel = "portable";
  const Plan own = make_plan(problem(4096, 4), options, 0);
  EXPECT_EQ(own.kernel(Pass::forward).tile, (Tile{96, 256}));
  options.attend_tile = {384, 1024};
  options.attend_backward_tile = {510, 1008};
  const Plan large = make_plan(problem(4096, 4), options, 0);
  EXPECT_EQ(large.kernel(Pass::backward).tile, (Tile{510, 1008}));
  EXPECT_GT(large.arena_bytes(), own.arena_bytes());
  EXPECT_EQ(large.fingerprint(), own.fingerprint());
  options.tuned.bucket_rows = 1024;
  EXPECT_NE(make_plan(problem(4096, 4), options, 0).fingerprint(), own.fingerprint());
}

// Times that no clock will show are compared like others.
TEST(Automatic, OfTheSlowestMachineSharesTheWork) {
  Problem p = problem(std::int64_t{1} << 40, 4);
  p.heads = p.kv_heads = 16'384;
  p.pattern = Pattern::parse("full");
  p.head_dim = p.head_dim_v = 1;
  PlanOptions options;
  options.cost.flops_per_second = options.cost.bytes_per_second = 1;
  options.cost.message_nanoseconds = 0;
  const Plan plan = make_plan(p, options, 0);
  EXPECT_NE(plan.options().strategy, Strategy::local);
  EXPECT_GT(plan.slowest_nanoseconds(), 0);
}

// A budget that a bucket size needs to the byte gives that size, on every rank.
TEST(Budget, SizesTheBuckets) {
  const Problem p = problem(3 * 4096, 3);
  for (const Strategy strategy : {Strategy::exchange, Strategy::ring, Strategy::pass_q}) {
    PlanOptions options;
    options.strategy = strategy;
    EXPECT_EQ(make_plan(p, options, 0).bucket_rows(), 512);
    for (const std::int64_t bucket : {512, 128, 16}) {
      options.bucket_rows = bucket;
      options.memory_budget = cost_of(p, options).bytes;
      options.bucket_rows = PlanOptions::kBucketAuto;
      for (int rank = 0; rank < 3; ++rank) EXPECT_EQ(make_plan(p, options, rank).bucket_rows(), bucket);
    }
  }
}

// A rank that evenly spaced ones do not show needs the most.
TEST(Budget, HoldsForRanksInStepWithThePattern) {
  Problem p = in_step(100, 61);
  p.head_dim = p.head_dim_v = 8;
  PlanOptions options;
  options.strategy = Strategy::exchange;
  options.bucket_rows = 16;
  options.memory_budget = cost_of(p, options).bytes;
  options.bucket_rows = PlanOptions::kBucketAuto;
  for (int rank = 0; rank < 61; ++rank) ASSERT_EQ(budget_error(p, options, rank), "");
  options.strategy = Strategy::automatic;
  for (int rank = 0; rank < 61; ++rank) ASSERT_EQ(budget_error(p, options, rank), "");
}

TEST(Budget, ImpossibleNamesTheSmallestAndWhatDominates) {
  for (const Strategy strategy :
       {Strategy::automatic, Strategy::ring, Strategy::exchange, Strategy::all_gather, Strategy::local}) {
    for (const int ranks : {1, 3, 4}) {
      const Problem p = problem(3001, ranks);
      PlanOptions options;
      options.strategy = strategy;
      options.memory_budget = 1;
      const std::string error = budget_error(p, options);
      EXPECT_THAT(error, HasSubstr("no plan fits memory_budget (1 bytes): the smallest possible is "));
      EXPECT_THAT(error,
                  ::testing::MatchesRegex(".*, with strategy [a-z:0-9-]+; [a-z ,]+ takes most of it \\([0-9]+ bytes\\)"));
      const std::int64_t smallest = smallest_possible(error);
      options.memory_budget = smallest;
      for (int rank = 0; rank < ranks; ++rank) EXPECT_EQ(budget_error(p, options, rank), "") << error;
      EXPECT_EQ(cost_of(p, make_plan(p, options, 0).options()).bytes, smallest) << "forecast and error agree";
      options.memory_budget = smallest - 1;
      EXPECT_EQ(smallest_possible(budget_error(p, options)), smallest);
    }
  }
}

TEST(Budget, AGivenBucketIsKept) {
  PlanOptions options;
  options.strategy = Strategy::ring;
  options.bucket_rows = 4096;
  const Problem p = problem(1 << 16, 4);
  options.memory_budget = cost_of(p, options).bytes;
  EXPECT_EQ(make_plan(p, options, 2).bucket_rows(), 4096);
  --options.memory_budget;
  EXPECT_THAT(budget_error(p, options), HasSubstr("with strategy ring"));
}

std::string argument_error(const Problem& p, const PlanOptions& options, int rank = 0) {
  try {
    make_plan(p, options, rank);
  } catch (const Error& error) {
    return error.what();
  }
  return "";
}

TEST(Options, AreChecked) {
  const Problem p = problem(100, 4);
  const auto with = [](auto change) {
    PlanOptions options;
    change(options);
    return options;
  };
  using O = PlanOptions;
  EXPECT_EQ(argument_error(p, {}, 4), "rank (4) must be in [0, 4)");
  EXPECT_EQ(argument_error(p, {}, -1), "rank (-1) must be in [0, 4)");
  EXPECT_EQ(argument_error(p, with([](O& o) { o.bucket_rows = -2; })),
            "bucket_rows (-2) must be positive, auto (0) or none (-1)");
  EXPECT_EQ(argument_error(p, with([](O& o) { o.attend_tile = {96, 0}; })),
            "attend_tile (96 x 0) must name queries and keys, or neither");
  EXPECT_EQ(argument_error(p, with([](O& o) { o.attend_backward_tile = {-32, -48}; })),
            "attend_backward_tile (-32 x -48) must name queries and keys, or neither");
  EXPECT_EQ(argument_error(p, with([](O& o) {
                             o.attend_kernel = "portable";
                             o.attend_tile = {97, 256};
                           })),
            "the queries of a tile (97) must be 0 or a multiple of 6 from 48 to 384 for kernel 'attend_f32_portable'");
  EXPECT_EQ(argument_error(p, with([](O& o) { o.memory_budget = -1; })),
            "memory_budget (-1) must be 0 (unlimited) or positive");
  EXPECT_EQ(argument_error(p, with([](O& o) {
                             o.strategy = Strategy::local;
                             o.computing_ranks = 5;
                           })),
            "computing_ranks (5) must be in [0, ranks (4)]");
  EXPECT_EQ(argument_error(p, with([](O& o) { o.computing_ranks = 2; })),
            "computing_ranks (2) is for strategy local only, not auto");
  EXPECT_EQ(argument_error(p, with([](O& o) {
                             o.strategy = Strategy::ring;
                             o.computing_ranks = 2;
                           })),
            "computing_ranks (2) is for strategy local only, not ring");
  EXPECT_EQ(argument_error(p, with([](O& o) { o.threads = 0; })), "threads (0) must be in [1, 4096]");
  EXPECT_EQ(argument_error(p, with([](O& o) { o.partials = Partials{9}; })), "partials (9) must be float32 or storage");
  EXPECT_EQ(argument_error(p, with([](O& o) { o.device = DeviceKind{9}; })), "device (9) must be cpu or cuda");
  EXPECT_EQ(argument_error(p, with([](O& o) { o.cost = {0, 1, 1}; })),
            "cost (0,1,1) must be flops/s >= 1, bytes/s >= 1, nanoseconds >= 0");
  EXPECT_EQ(argument_error(p, with([](O& o) {
                             o.strategy = Strategy::all_gather;
                             o.bucket_rows = 5;
                           })),
            "strategy all-gather moves everything at once: bucket_rows (5) must be none or auto; use exchange, ring or pass-q");
  EXPECT_THAT(argument_error(p, with([](O& o) { o.attend_kernel = "abacus"; })), HasSubstr("unknown kernel 'abacus'"));
  // What no pass uses is looked at all the same.
  EXPECT_THAT(argument_error(p, with([](O& o) { o.backward = false, o.attend_backward_kernel = "abacus"; })),
              HasSubstr("unknown kernel 'abacus'"));
  EXPECT_THAT(argument_error(p, with([](O& o) { o.backward = false, o.attend_backward_tile = {7, 7}; })),
              HasSubstr("of a tile (7) must be"));
  EXPECT_EQ(argument_error(p, with([](O& o) { o.tuned.bucket_rows = -3; })), "tuned.bucket_rows (-3) must not be negative");
  EXPECT_EQ(argument_error(p, with([](O& o) { o.tuned.attend_tile = {48, 0}; })),
            "tuned.attend_tile (48 x 0) must name queries and keys, or neither");
  EXPECT_EQ(argument_error(p, with([](O& o) { o.most_overhead.forward_scratch = -1; })),
            "most_overhead.forward_scratch (-1) must not be negative");
  EXPECT_EQ(argument_error(p, with([](O& o) { o.most_overhead.backward_scratch = -1; })),
            "most_overhead.backward_scratch (-1) must not be negative");
  EXPECT_EQ(
      argument_error(p, with([](O& o) { o.device_messages = true; })),
      "no strategy supports this combination: device_messages are messages in memory of a device, but this rank computes on "
      "the CPU");
  EXPECT_THAT(argument_error(problem(std::int64_t{1} << 30, 512), with([](O& o) {
                               o.strategy = Strategy::ring;
                               o.bucket_rows = 1;
                             })),
              HasSubstr("use larger buckets"));
}

TEST(Strategies, HaveNames) {
  for (const internal::StrategyRow& row : internal::strategies()) {
    EXPECT_EQ(parse_strategy(row.name), row.strategy);
    EXPECT_EQ(to_string(row.strategy), row.name);
  }
  EXPECT_EQ(parse_strategy("auto"), Strategy::automatic);
  try {
    parse_strategy("rings");
    FAIL();
  } catch (const InvalidArgument& error) {
    EXPECT_STREQ(error.what(),
                 "unknown strategy 'rings': expected one of auto, local, all-gather, exchange, ring, pass-q, ulysses");
  }
}

// Times beyond 64 bits are the largest of these to a caller, and still compared.
TEST(CostModel, Saturates) {
  Problem p = problem(std::int64_t{1} << 36, 1, "full");
  p.heads = p.kv_heads = 64;
  PlanOptions options;
  options.strategy = Strategy::local;
  options.cost.flops_per_second = 1;
  EXPECT_EQ(make_plan(p, options, 0).modelled_nanoseconds(), std::numeric_limits<std::int64_t>::max());
  p.ranks = 4;
  options.strategy = Strategy::automatic;
  const Plan plan = make_plan(p, options, 0);
  EXPECT_NE(plan.options().strategy, Strategy::local);  // with one computing rank, the slowest by far
  EXPECT_THAT(plan.to_string(), HasSubstr("years on this rank"));
  EXPECT_THAT(plan.to_string(), HasSubstr("(at least 292.3 years)"));
}

}  // namespace
}  // namespace ringspan
