// Causal attention over 4 ranks (threads) on the caller's memory. With q = 0 and v_j = j, o_i must be i / 2, which is checked.
#include <ringspan/ringspan.h>

#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <memory>
#include <vector>

int main() {
  ringspan::Problem problem;
  problem.tokens_q = problem.tokens_k = 1000;
  problem.heads = problem.kv_heads = 8;
  problem.pattern = ringspan::Pattern::parse("causal");
  problem.ranks = 4;
  problem.sharding_q = problem.sharding_k = ringspan::Sharding::parse("zigzag");
  const int heads = problem.heads, dim = problem.head_dim;

  ringspan::run_thread_ranks(problem.ranks, [&](ringspan::Communicator& world) {
    const ringspan::Shard shard = ringspan::make_shard(problem.sharding_q, problem.tokens_q, world.size(), world.rank());
    const std::vector<std::int64_t> positions = shard.positions();
    std::vector<float> q(shard.rows * heads * dim), k(q.size()), v(q.size()), o(q.size()), lse(shard.rows * heads);
    for (std::size_t x = 0; x < v.size(); ++x) v[x] = static_cast<float>(positions[x / (heads * dim)]);

    const ringspan::Plan plan = ringspan::make_plan(problem, {.backward = false}, world.rank());
    const std::size_t arena_bytes = (plan.arena_bytes() + 63) / 64 * 64;
    const std::unique_ptr<void, decltype(&std::free)> arena(std::aligned_alloc(64, arena_bytes), std::free);
    ringspan::Attention attention(plan, world, {}, {static_cast<std::byte*>(arena.get()), arena_bytes});

    const auto rows = [&](float* data) { return ringspan::dense_bshd(data, shard.rows, heads, dim); };
    const ringspan::Tensor lse_rows = ringspan::dense_bhsd(lse.data(), shard.rows, heads, 1);
    attention.forward({rows(q.data()), rows(k.data()), rows(v.data()), rows(o.data()), lse_rows});
    for (std::size_t x = 0; x < o.size(); ++x) {
      const float expected = static_cast<float>(positions[x / (heads * dim)]) / 2;
      if (!(std::abs(o[x] - expected) <= 1e-5F * expected)) throw ringspan::Error("wrong output");
    }
    std::printf("rank %d: %zu tokens, arena %zu bytes\n", world.rank(), positions.size(), arena_bytes);
  });
}
