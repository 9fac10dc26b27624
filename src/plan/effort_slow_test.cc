// What planning costs, counted: slices that the lowering visits, tasks, stages. Times are in plan_bench.
#include <gtest/gtest.h>

#include "pattern/lower.h"
#include "plan/choose.h"
#include "plan/plan_data.h"
#include "plan/route.h"
#include "ringspan/error.h"
#include "ringspan/plan.h"

namespace ringspan {
namespace {

Problem long_net(std::int64_t tokens, int ranks, const char* pattern = "dilated:geometric(2048,4,5)") {
  Problem p;
  p.tokens_q = p.tokens_k = tokens;
  p.heads = p.kv_heads = 8;
  p.ranks = ranks;
  p.pattern = Pattern::parse(pattern);
  return p;
}

constexpr std::int64_t kMillion = 1'048'576;

// Slices that hold a query of the rank: the least that any planner must look at.
std::int64_t own_slices(const Problem& p, int rank) {
  const Shard shard = make_shard(p.sharding_q, p.tokens_q, p.ranks, rank);
  Restriction restriction = unrestricted(p);
  restriction.q_begin = shard.pieces.front().first;
  restriction.q_end = shard.pieces.back().end();
  return static_cast<std::int64_t>(lower(p, restriction).size());
}

TEST(Effort, FollowsTheRanksOwnTasks) {
  const Problem p = long_net(kMillion, 64);
  for (const Strategy strategy : {Strategy::exchange, Strategy::all_gather, Strategy::pass_q}) {
    PlanOptions options;
    options.strategy = strategy;
    for (const int rank : {0, 31, 32, 63}) {
      const Plan plan = make_plan(p, options, rank);
      const std::int64_t own = own_slices(p, rank);
      for (const internal::Program* program : {&plan.data().forward, &plan.data().backward}) {
        const auto tasks = static_cast<std::int64_t>(program->attend_items.size());
        // Each slice is met once per owner of its keys, from both ends, and once more for the tasks.
        EXPECT_LE(program->visited_slices, 3 * (tasks + own)) << to_string(strategy) << " rank " << rank;
        EXPECT_LE(tasks, 16 * own);
      }
    }
  }
}

// A strategy that needs more tasks than a plan may have is no reason not to take another one.
TEST(Effort, LeavesOutWhatNeedsTooManyTasks) {
  Problem p = long_net(262'144, 8, "causal");
  p.sharding_q = p.sharding_k = Sharding::parse("block_striped:64");
  PlanOptions options;
  options.backward = false;
  const Plan plan = make_plan(p, options, 0);
  EXPECT_NE(plan.strategy(), Strategy::ulysses);
  const auto reason = [&](std::string_view name) -> std::string {
    for (const Rejected& rejected : plan.rejected()) {
      if (rejected.candidate == name) return rejected.reason;
    }
    return "";
  };
  EXPECT_NE(reason("ulysses").find("would have more than 8388608 tasks"), std::string::npos) << reason("ulysses");
  options.strategy = Strategy::ulysses;
  EXPECT_THROW(make_plan(p, options, 0), OutOfBudget);
}

// Twice the tokens on twice the ranks are twice the slices, but not for one rank.
TEST(Effort, DoesNotGrowWithTheWorld) {
  const auto visited = [](std::int64_t tokens, int ranks) {
    PlanOptions options;
    options.strategy = Strategy::exchange;
    return make_plan(long_net(tokens, ranks), options, 40).data().forward.visited_slices;
  };
  EXPECT_EQ(visited(2 * kMillion, 128), visited(kMillion, 64));
  EXPECT_EQ(visited(1024 * kMillion, 65'536), visited(kMillion, 64));
}

// Two far pieces do not cost what lies between them.
TEST(Effort, ZigzagLooksAtItsPiecesOnly) {
  Problem p = long_net(kMillion, 64, "dilated:2048x1");
  p.sharding_q = p.sharding_k = Sharding::parse("zigzag");
  PlanOptions options;
  options.strategy = Strategy::all_gather;
  EXPECT_LE(make_plan(p, options, 0).data().forward.visited_slices, 20);
}

// All pairs of ranks look at no more of a long list of blocks than what they have to do with each other, and the way to it.
TEST(Effort, FollowsTheBlocksAtHand) {
  constexpr std::int64_t kBlocks = 250, kRows = 1024;
  Problem p = long_net(kBlocks * kRows, 64, "block:");
  for (std::int64_t i = 0; i < kBlocks; ++i) {
    for (std::int64_t j = 0; j < kBlocks; ++j) {
      p.pattern.blocks->push_back({i * kRows, (i + 1) * kRows, j * kRows, (j + 1) * kRows, BlockKind::full, 0, 0});
    }
  }
  const Lowering lowering(p);
  const std::int64_t chunk = p.tokens_q / p.ranks;
  std::int64_t looked_at = 0, slices = 0;
  for (std::int64_t q = 0; q < p.tokens_q; q += chunk) {
    for (std::int64_t k = 0; k < p.tokens_k; k += chunk) {
      looked_at += lowering.for_each_slice({q, q + chunk, k, k + chunk, 0, p.heads}, [&](const Slice&) { ++slices; });
    }
  }
  EXPECT_LE(looked_at, 12 * slices);
  PlanOptions options;
  options.strategy = Strategy::ring;
  const Plan plan = make_plan(p, options, 31);
  EXPECT_LE(plan.data().forward.visited_slices, 4 * static_cast<std::int64_t>(plan.data().forward.attend_items.size()));
}

// Items of a batch that each have a length of their own are gathered apart, and meet themselves only.
TEST(Effort, FollowsTheItemsOfABatch) {
  Problem p = long_net(64, 8, "full");
  p.batch = 100;
  for (std::int64_t item = 0; item < p.batch; ++item) p.lengths_q.push_back(item % p.tokens_q);
  p.lengths_k = p.lengths_q;
  PlanOptions options;
  options.strategy = Strategy::local;
  const Plan plan = make_plan(p, options, 0);
  for (const internal::Program* program : {&plan.data().forward, &plan.data().backward}) {
    EXPECT_GE(program->attend_items.size(), 90U);
    EXPECT_LE(program->tried_pairs, 2 * static_cast<std::int64_t>(program->attend_items.size()));
  }
}

std::int64_t evaluated_routes(const Problem& p) {
  std::vector<Shard> shards;
  for (int rank = 0; rank < p.ranks; ++rank) shards.push_back(make_shard(p.sharding_q, p.tokens_q, p.ranks, rank));
  return internal::RingRoutes(Lowering(p), shards, shards).evaluated();
}

// The routes of a ring look at the readers that an owner has, and at one from afar that reads all.
TEST(Effort, RoutesFollowTheReaders) {
  for (const int ranks : {64, 1024}) {
    for (const char* pattern : {"full", "causal", "window:4095,0", "window:100,100"}) {
      EXPECT_LE(evaluated_routes(long_net(std::int64_t{4096} * ranks, ranks, pattern)), 6 * ranks) << pattern;
    }
  }
  Problem p = long_net(100, 1024, "causal");  // most ranks hold nothing
  EXPECT_LE(evaluated_routes(p), 6 * 100);
  p = long_net(kMillion, 256, "full");
  p.sharding_q = p.sharding_k = Sharding::parse("striped");
  EXPECT_LE(evaluated_routes(p), 4 * 256);
}

// What a group of ranks gathers is put together once, however many of them hold nothing.
TEST(Effort, GatheringJoinsShardsOnce) {
  Problem p = long_net(100, 4096, "causal");
  PlanOptions options;
  options.strategy = Strategy::local;
  for (options.computing_ranks = 1; options.computing_ranks < p.ranks; options.computing_ranks *= 4) {
    for (const int rank : {0, 1, 99, 2048, 4095}) {
      EXPECT_LE(make_plan(p, options, rank).data().forward.joined_shards, 4 * p.ranks) << options.computing_ranks;
    }
  }
}

// A plan keeps what it says, and no room beside it.
TEST(Effort, PlansKeepNoRoom) {
  PlanOptions options;
  for (const Strategy strategy : {Strategy::exchange, Strategy::ring, Strategy::all_gather}) {
    options.strategy = strategy;
    const Plan plan = make_plan(long_net(11'000, 110, "full"), options, 3);
    for (const internal::Program* program : {&plan.data().forward, &plan.data().backward}) {
      const std::size_t used = program->views.size() * sizeof(internal::View) +
                               program->row_items.size() * sizeof(internal::RowItem) +
                               program->attend_items.size() * sizeof(internal::AttendItem);
      EXPECT_GT(internal::bytes_of(*program), static_cast<std::int64_t>(used));
      EXPECT_EQ(program->views.capacity(), program->views.size());
      EXPECT_EQ(program->row_items.capacity(), program->row_items.size());
      EXPECT_EQ(program->attend_items.capacity(), program->attend_items.size());
    }
  }
}

// A rank that reads every 256th row of a chunk gets them in one message.
TEST(Effort, FewMessagesForSparseReads) {
  Problem p = long_net(kMillion, 64, "dilated:1048576x256");
  PlanOptions options;
  options.strategy = Strategy::exchange;
  const Plan plan = make_plan(p, options, 5);
  EXPECT_LT(plan.bucket_rows(), kMillion / 64);
  for (const PeerBytes& peer : plan.traffic(Pass::forward)) EXPECT_LE(peer.received_messages, 1);
}

// Most candidates lose by far: one rank of each shows it, or none.
TEST(Effort, ChoosingLooksAtWhatMayWin) {
  Problem p = long_net(kMillion, 64, "causal");
  const internal::Choice causal = internal::choose(p, {});
  EXPECT_EQ(causal.rejected.size(), 10U);
  EXPECT_LE(causal.plans, causal.ranks_looked_at + 4);
  p.tokens_q = 1;  // and the keys in small blocks: only pass-q, ulysses share the work
  p.tokens_k = 131'072;
  p.ranks = 4;
  p.sharding_q = p.sharding_k = Sharding::parse("block_striped:16");
  const internal::Choice decode = internal::choose(p, {});
  EXPECT_EQ(decode.setting.options.strategy, Strategy::pass_q);
  EXPECT_LE(decode.plans, 5);
}

// Ranks with other kernels write other launches, but look at the same ranks.
TEST(Effort, IsTheSameOnAllMachines) {
  Problem p = long_net(kMillion / 4, 64, "dilated:2048x1,8192x4");
  p.sharding_q = p.sharding_k = Sharding::parse("striped");
  PlanOptions options;
  const internal::Choice cpu = internal::choose(p, options);
  EXPECT_LT(cpu.ranks_looked_at, 64);
  options.device = DeviceKind::cuda;
  options.most_overhead.gradient_sums = true;  // as ranks of both kinds agree
  const internal::Choice device = internal::choose(p, options);
  EXPECT_EQ(cpu.plans, device.plans);
  EXPECT_EQ(cpu.ranks_looked_at, device.ranks_looked_at);
}

// Tasks that are calls of a library each are more, or fewer, and keep more states: a rank with kernels of ours plans as the
// rank that has such, where they agree.
TEST(Effort, IsTheSameWhateverPartialsARankKeeps) {
  Problem p = long_net(kMillion / 4, 64, "dilated:2048x1,8192x4");
  p.sharding_q = p.sharding_k = Sharding::parse("striped");
  p.dtype = DType::bfloat16;
  for (const std::int64_t budget : {std::int64_t{0}, std::int64_t{200} << 20}) {
    SCOPED_TRACE(budget);
    PlanOptions options;
    options.device = DeviceKind::cuda;
    options.memory_budget = budget;
    options.most_overhead.ungrouped_tasks = true;  // as ranks of both kinds agree
    const internal::Choice ours = internal::choose(p, options);
    options.partials = Partials::storage;
    const internal::Choice library = internal::choose(p, options);
    EXPECT_EQ(ours.setting.bucket_rows, library.setting.bucket_rows);
    EXPECT_EQ(ours.plans, library.plans);
    EXPECT_EQ(ours.ranks_looked_at, library.ranks_looked_at);
  }
}

// More ranks than there is time to look at.
TEST(Effort, ChoosingEnds) {
  const internal::Choice choice = internal::choose(long_net(10'000'000, 1000, "causal"), {});
  EXPECT_GE(choice.ranks_looked_at, 2);
  EXPECT_LE(choice.plans, 20);
  EXPECT_LE(internal::choose(long_net(1'000'000'000, 10'000, "causal"), {}).plans, 8);
}

// More slices than there is time to count.
TEST(Effort, CountingPairsEnds) { EXPECT_LE(internal::choose(long_net(std::int64_t{1} << 38, 4096), {}).plans, 8); }

// A budget that nothing fits: the smallest plan is found without buckets of a few rows, of which there would be millions.
TEST(Effort, ABudgetEnds) {
  PlanOptions options;
  options.memory_budget = 1;
  const Problem p = long_net(100'000'000, 64, "causal");
  EXPECT_THROW(internal::choose(p, options), OutOfBudget);
  options.strategy = Strategy::ring;
  EXPECT_THROW(internal::choose(p, options), OutOfBudget);
}

}  // namespace
}  // namespace ringspan
