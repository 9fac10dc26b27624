#include "api_testing/world.h"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <random>

#include "base/float16.h"
#include "oracle/compare.h"
#include "oracle/dense.h"
#include "ringspan/error.h"

namespace ringspan::testing {
namespace {

std::vector<std::byte> random_tensor(std::mt19937_64& random, std::int64_t elements, DType dtype, float gain) {
  std::normal_distribution<float> normal;
  std::vector<std::byte> bytes(static_cast<std::size_t>(elements * size_of(dtype)));
  for (std::int64_t x = 0; x < elements; ++x) {
    const float value = gain * normal(random);
    const std::uint16_t half = dtype == DType::bfloat16 ? float_to_bfloat16(value) : float_to_float16(value);
    if (dtype == DType::float32) {
      std::memcpy(bytes.data() + x * 4, &value, 4);
    } else {
      std::memcpy(bytes.data() + x * 2, &half, 2);
    }
  }
  return bytes;
}

std::vector<float> random_floats(std::mt19937_64& random, std::int64_t elements) {
  std::normal_distribution<float> normal;
  std::vector<float> values(static_cast<std::size_t>(elements));
  for (float& value : values) value = normal(random);
  return values;
}

Shard query_shard(const Problem& problem, int rank) {
  if (problem.replicated_q) return make_shard(Sharding{}, problem.tokens_q, 1, 0);
  return make_shard(problem.sharding_q, problem.tokens_q, problem.ranks, rank);
}

}  // namespace

std::string to_string(const Case& test) {
  const Problem& p = test.problem;
  return fmt::format(
      "{} over {} x {} q, {} k, {}/{} heads x {},{} {}, {} ranks ({}) q {} k {}{}, {} bucket {}{}{}{}{}{}{}{}, seed {}",
      p.pattern.to_string(), p.batch, p.tokens_q, p.tokens_k, p.heads, p.kv_heads, p.head_dim, p.head_dim_v, to_string(p.dtype),
      p.ranks, test.ranks == Ranks::threads ? "threads" : "processes", p.sharding_q.to_string(), p.sharding_k.to_string(),
      p.replicated_q ? " replicated q" : "", to_string(test.options.strategy), test.options.bucket_rows,
      test.execute.fake_device ? " fake device" : "", p.softcap != 0 ? " softcap" : "", p.alibi ? " alibi" : "",
      p.sinks ? " sinks" : "", p.dropout != 0 ? " dropout" : "", test.dlse ? " dlse" : "",
      test.options.backward ? "" : " forward only", test.seed);
}

Whole::Whole(const Case& test) {
  const Problem& p = test.problem;
  std::mt19937_64 random(test.seed);
  q = random_tensor(random, p.batch * p.tokens_q * p.heads * p.head_dim, p.dtype, test.gain);
  k = random_tensor(random, p.batch * p.tokens_k * p.kv_heads * p.head_dim, p.dtype, 1.0F);
  v = random_tensor(random, p.batch * p.tokens_k * p.kv_heads * p.head_dim_v, p.dtype, 1.0F);
  d_out = random_tensor(random, p.batch * p.tokens_q * p.heads * p.head_dim_v, p.dtype, 1.0F);
  dlse = random_floats(random, test.dlse ? p.batch * p.heads * p.tokens_q : 0);
  sinks = random_floats(random, p.sinks ? p.heads : 0);
  slopes = random_floats(random, p.alibi ? p.heads : 0);
  for (float& slope : slopes) slope = std::abs(slope) * 0.1F;
}

RankTensors::Block RankTensors::add(std::size_t bytes) {
  const Block block{used_, bytes};
  used_ += (bytes + 63) / 64 * 64;
  return block;
}

RankTensors::RankTensors(const Case& test, const Whole& whole, int rank)
    : shard_q(query_shard(test.problem, rank)),
      shard_k(make_shard(test.problem.sharding_k, test.problem.tokens_k, test.problem.ranks, rank)),
      test_(&test) {
  const Problem& p = test.problem;
  const std::int64_t rows_q = p.batch * shard_q.rows * p.heads;
  const std::int64_t rows_k = p.batch * shard_k.rows * p.kv_heads;
  const auto tensor = [&](std::int64_t rows, int width) {
    return add(static_cast<std::size_t>(rows * width * size_of(p.dtype)));
  };
  const auto floats = [&](std::int64_t count) { return add(static_cast<std::size_t>(count) * sizeof(float)); };
  q_ = tensor(rows_q, p.head_dim);
  k_ = tensor(rows_k, p.head_dim);
  v_ = tensor(rows_k, p.head_dim_v);
  d_out_ = tensor(rows_q, p.head_dim_v);
  dlse_ = floats(test.dlse ? rows_q : 0);
  sinks_ = floats(p.sinks ? p.heads : 0);
  slopes_ = floats(p.alibi ? p.heads : 0);
  const std::size_t inputs = used_;
  o_ = tensor(rows_q, p.head_dim_v);
  lse_ = floats(rows_q);
  dq_ = tensor(rows_q, p.head_dim);
  dk_ = tensor(rows_k, p.head_dim);
  dv_ = tensor(rows_k, p.head_dim_v);
  dsinks_ = floats(p.sinks ? p.heads : 0);
  memory_ = std::make_shared<SharedMemory>(used_ + 64);
  std::memset(memory_->bytes().data() + inputs, 0xff, used_ - inputs);  // NaN: what is not written is noticed

  const auto load = [&](const Block& block, const Shard& shard, std::int64_t tokens, std::int64_t outer, const void* full) {
    const std::int64_t rows = outer * shard.rows;
    if (rows > 0 && block.bytes > 0) {
      shard_rows(shard, tokens, outer, static_cast<std::int64_t>(block.bytes) / rows, full, at(block));
    }
  };
  load(q_, shard_q, p.tokens_q, p.batch, whole.q.data());
  load(k_, shard_k, p.tokens_k, p.batch, whole.k.data());
  load(v_, shard_k, p.tokens_k, p.batch, whole.v.data());
  load(d_out_, shard_q, p.tokens_q, p.batch, whole.d_out.data());
  load(dlse_, shard_q, p.tokens_q, p.batch * p.heads, whole.dlse.data());
  std::copy(whole.sinks.begin(), whole.sinks.end(), reinterpret_cast<float*>(at(sinks_)));
  std::copy(whole.slopes.begin(), whole.slopes.end(), reinterpret_cast<float*>(at(slopes_)));
}

std::int64_t RankTensors::bytes() const {
  std::size_t sum = 0;
  for (const Block& block : {q_, k_, v_, d_out_, o_, lse_, dq_, dk_, dv_}) sum += block.bytes;
  return static_cast<std::int64_t>(sum);
}

std::int64_t RankTensors::forward_bytes() const {
  std::size_t sum = 0;
  for (const Block& block : {q_, k_, v_, o_, lse_}) sum += block.bytes;
  return static_cast<std::int64_t>(sum);
}

ForwardTensors RankTensors::forward() const {
  const Problem& p = test_->problem;
  ForwardTensors t;
  t.q = dense_bshd(at(q_), shard_q.rows, p.heads, p.head_dim);
  t.k = dense_bshd(at(k_), shard_k.rows, p.kv_heads, p.head_dim);
  t.v = dense_bshd(at(v_), shard_k.rows, p.kv_heads, p.head_dim_v);
  t.o = dense_bshd(at(o_), shard_q.rows, p.heads, p.head_dim_v);
  t.lse = dense_bhsd(at(lse_), shard_q.rows, p.heads, 1);
  if (p.alibi) t.alibi_slopes = reinterpret_cast<const float*>(at(slopes_));
  if (p.sinks) t.sinks = reinterpret_cast<const float*>(at(sinks_));
  return t;
}

BackwardTensors RankTensors::backward() const {
  const Problem& p = test_->problem;
  const ForwardTensors f = forward();
  BackwardTensors t;
  t.q = f.q;
  t.k = f.k;
  t.v = f.v;
  t.o = f.o;
  t.lse = f.lse;
  t.d_out = dense_bshd(at(d_out_), shard_q.rows, p.heads, p.head_dim_v);
  if (test_->dlse) t.dlse = dense_bhsd(at(dlse_), shard_q.rows, p.heads, 1);
  t.dq = dense_bshd(at(dq_), shard_q.rows, p.heads, p.head_dim);
  t.dk = dense_bshd(at(dk_), shard_k.rows, p.kv_heads, p.head_dim);
  t.dv = dense_bshd(at(dv_), shard_k.rows, p.kv_heads, p.head_dim_v);
  t.alibi_slopes = f.alibi_slopes;
  t.sinks = f.sinks;
  if (p.sinks) t.dsinks = reinterpret_cast<float*>(at(dsinks_));
  return t;
}

namespace {

Attention make_attention(const Case& test, Communicator& communicator, const ExecuteOptions& execute) {
  if (!test.spoil) return {test.problem, test.options, communicator, execute};
  internal::PlanData data = make_plan(test.problem, test.options, communicator.rank()).data();
  test.spoil(data);
  return {Plan(std::make_shared<const internal::PlanData>(std::move(data))), communicator, execute};
}

}  // namespace

void forward_and_backward(Attention& attention, const RankTensors& tensors) {
  attention.forward(tensors.forward());
  if (attention.plan().options().backward) attention.backward(tensors.backward());
}

// Joins the ranks' outputs.
class Gather {
 public:
  Gather(const Case& test, const std::vector<RankTensors>& ranks) : test_(test), ranks_(ranks) {}

  Outputs join() const {
    const Problem& p = test_.problem;
    Outputs outputs;
    outputs.o = tensor(&RankTensors::o_, false, p.heads, p.head_dim_v);
    outputs.lse.resize(static_cast<std::size_t>(p.batch * p.heads * p.tokens_q));
    collect(&RankTensors::lse_, false, p.batch * p.heads, 4, reinterpret_cast<std::byte*>(outputs.lse.data()));
    if (!test_.options.backward) return outputs;
    outputs.dq = tensor(&RankTensors::dq_, false, p.heads, p.head_dim);
    outputs.dk = tensor(&RankTensors::dk_, true, p.kv_heads, p.head_dim);
    outputs.dv = tensor(&RankTensors::dv_, true, p.kv_heads, p.head_dim_v);
    for (const RankTensors& rank : ranks_) {
      const auto* values = reinterpret_cast<const float*>(rank.at(rank.dsinks_));
      std::vector<float> dsinks(values, values + (p.sinks ? p.heads : 0));
      if (p.sinks && &rank != &ranks_.front() && std::memcmp(dsinks.data(), outputs.dsinks.data(), dsinks.size() * 4) != 0) {
        throw Error("ranks hold different dsinks");
      }
      outputs.dsinks = dsinks;
    }
    return outputs;
  }

 private:
  std::vector<std::byte> tensor(RankTensors::Block RankTensors::*block, bool keys, int heads, int width) const {
    const Problem& p = test_.problem;
    const std::int64_t row_bytes = std::int64_t{heads} * width * size_of(p.dtype);
    std::vector<std::byte> full(static_cast<std::size_t>(p.batch * (keys ? p.tokens_k : p.tokens_q) * row_bytes),
                                std::byte{0xff});
    collect(block, keys, p.batch, row_bytes, full.data());
    return full;
  }

  void collect(RankTensors::Block RankTensors::*block, bool keys, std::int64_t outer, std::int64_t row_bytes,
               std::byte* full) const {
    const Problem& p = test_.problem;
    for (const RankTensors& rank : ranks_) {
      const std::byte* local = rank.at(rank.*block);
      const std::size_t bytes = (rank.*block).bytes;
      if (bytes == 0) continue;
      if (!keys && p.replicated_q) {
        if (&rank == &ranks_.front()) std::memcpy(full, local, bytes);
        if (std::memcmp(full, local, bytes) != 0) throw Error("ranks computed different bits of a replicated output");
      } else {
        unshard_rows(keys ? rank.shard_k : rank.shard_q, keys ? p.tokens_k : p.tokens_q, outer, row_bytes, local, full);
      }
    }
  }

  const Case& test_;
  const std::vector<RankTensors>& ranks_;
};

Outputs run(const Case& test, const Whole& whole, const RankScript& script) {
  std::vector<RankTensors> ranks;
  ranks.reserve(static_cast<std::size_t>(test.problem.ranks));
  for (int rank = 0; rank < test.problem.ranks; ++rank) ranks.emplace_back(test, whole, rank);
  const RankBody body = [&](Communicator& communicator) {
    ExecuteOptions execute = test.execute;
    if (!test.devices.empty()) execute.device = test.devices[static_cast<std::size_t>(communicator.rank())];
    execute.fake_device_seed = test.seed * 131 + static_cast<std::uint64_t>(communicator.rank());
    const std::unique_ptr<Communicator> wrapped = test.wrap ? test.wrap(communicator) : nullptr;
    Attention attention = make_attention(test, wrapped ? *wrapped : communicator, execute);
    script(attention, ranks[static_cast<std::size_t>(communicator.rank())]);
  };
  if (test.peer_copies) {
    run_thread_ranks(make_thread_world(test.devices), body);
  } else if (test.ranks == Ranks::threads) {
    run_thread_ranks(test.problem.ranks, body);
  } else {
    run_forked_ranks(test.problem.ranks, body);
  }
  return Gather(test, ranks).join();
}

std::string judge(const Case& test) {
  const Whole whole(test);
  return judge(test, whole, run(test, whole));
}

std::string judge(const Case& test, const Whole& whole, const Outputs& outputs) {
  const Problem& p = test.problem;
  oracle::Inputs inputs;
  inputs.q = oracle::contiguous_view(whole.q.data(), p.dtype, p.tokens_q, p.heads, p.head_dim);
  inputs.k = oracle::contiguous_view(whole.k.data(), p.dtype, p.tokens_k, p.kv_heads, p.head_dim);
  inputs.v = oracle::contiguous_view(whole.v.data(), p.dtype, p.tokens_k, p.kv_heads, p.head_dim_v);
  inputs.d_out = oracle::contiguous_view(whole.d_out.data(), p.dtype, p.tokens_q, p.heads, p.head_dim_v);
  inputs.d_lse = test.dlse ? whole.dlse.data() : nullptr;
  inputs.sinks = p.sinks ? whole.sinks.data() : nullptr;
  inputs.alibi_slopes = p.alibi ? whole.slopes.data() : nullptr;
  inputs.rounded_o = p.dtype != DType::float32 && !test.options.keep_o_float32;
  const bool backward = test.options.backward;
  oracle::Result exact = oracle::dense(p, inputs, oracle::Arithmetic::exact, backward);
  if (test.widen) test.widen(inputs, exact);
  const oracle::Result naive = oracle::dense(p, inputs, oracle::Arithmetic::naive, backward);
  std::string failures;
  const auto compare = [&](const char* name, const oracle::Tensor& right, const oracle::Tensor& plain, const void* data,
                           DType dtype, std::int64_t tokens, std::int64_t heads, std::int64_t width, std::int64_t batch) {
    const oracle::View view = oracle::contiguous_view(data, dtype, tokens, heads, width);
    const oracle::Comparison comparison =
        oracle::compare(name, right, plain, oracle::to_doubles(view, batch, tokens, heads, width), dtype);
    if (!comparison.passed) failures += "\n  " + oracle::to_string(comparison);
  };
  const auto f32 = DType::float32;
  compare("o", exact.o, naive.o, outputs.o.data(), p.dtype, p.tokens_q, p.heads, p.head_dim_v, p.batch);
  compare("lse", exact.lse, naive.lse, outputs.lse.data(), f32, p.heads * p.tokens_q, 1, 1, p.batch);
  if (backward) {
    compare("dq", exact.dq, naive.dq, outputs.dq.data(), p.dtype, p.tokens_q, p.heads, p.head_dim, p.batch);
    compare("dk", exact.dk, naive.dk, outputs.dk.data(), p.dtype, p.tokens_k, p.kv_heads, p.head_dim, p.batch);
    compare("dv", exact.dv, naive.dv, outputs.dv.data(), p.dtype, p.tokens_k, p.kv_heads, p.head_dim_v, p.batch);
    if (p.sinks) compare("dsinks", exact.dsinks, naive.dsinks, outputs.dsinks.data(), f32, 1, p.heads, 1, 1);
  }
  return failures.empty() ? "" : to_string(test) + failures;
}

}  // namespace ringspan::testing
