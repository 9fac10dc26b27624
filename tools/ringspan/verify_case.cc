#include "verify_case.h"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <memory>
#include <vector>

#include "base/float16.h"
#include "gradient.h"
#include "problem_options.h"
#include "ringspan/attention.h"
#include "ringspan/error.h"
#include "ringspan/transports.h"
#include "watch.h"

namespace ringspan::cli {
namespace {

Shard all_rows(std::int64_t tokens) { return make_shard(Sharding{}, tokens, 1, 0); }

// A whole tensor in memory that forked ranks share with their parent.
class SharedTensor {
 public:
  SharedTensor() = default;
  explicit SharedTensor(const TensorShape& shape)
      : shape_(shape),
        memory_(std::make_unique<SharedMemory>(static_cast<std::size_t>(std::max<std::int64_t>(shape.bytes(), 1)))) {}

  std::byte* data() const { return memory_ ? memory_->bytes().data() : nullptr; }
  const TensorShape& shape() const { return shape_; }
  void poison() const {
    std::memset(data(), 0xff, static_cast<std::size_t>(shape_.bytes()));
  }  // NaN: what nobody writes is seen

 private:
  TensorShape shape_;
  std::unique_ptr<SharedMemory> memory_;
};

void multiply_q(const SharedTensor& q, float gain) {
  const TensorShape& shape = q.shape();
  const std::int64_t count = shape.bytes() / size_of(shape.dtype);
  auto* floats = reinterpret_cast<float*>(q.data());
  auto* halves = reinterpret_cast<std::uint16_t*>(q.data());
  for (std::int64_t x = 0; x < count; ++x) {
    float product = 0;
    if (shape.dtype == DType::float32) {
      product = floats[x] *= gain;
    } else if (shape.dtype == DType::bfloat16) {
      product = bfloat16_to_float(halves[x] = float_to_bfloat16(gain * bfloat16_to_float(halves[x])));
    } else {
      product = float16_to_float(halves[x] = float_to_float16(gain * float16_to_float(halves[x])));
    }
    if (!std::isfinite(product)) {
      throw InvalidArgument(fmt::format("gain={}: expected one with which {} can hold every q", gain, to_string(shape.dtype)));
    }
  }
}

// The inputs of a case and where its outputs go.
struct Whole {
  explicit Whole(const VerifyCase& test);
  Inputs inputs() const;
  Outputs outputs() const;

  bool backward;
  SharedTensor q, k, v, d_out, dlse;
  std::vector<float> sinks, slopes;
  std::vector<SharedTensor> o, lse, dq;  // one each, or one per rank where queries are replicated
  SharedTensor dk, dv, dsinks;           // dsinks: (ranks, heads)
};

Whole::Whole(const VerifyCase& test) : backward(test.options.backward) {
  const Problem& p = test.problem;
  const OutputShapes shapes(p, Layout::bshd);
  const auto normals = [&](std::uint64_t stream, const TensorShape& shape) {
    SharedTensor tensor(shape);
    fill_normal(test.data_seed * 16 + stream, all_rows(shape.tokens), shape, tensor.data());
    return tensor;
  };
  q = normals(1, shapes.dq);
  k = normals(2, shapes.dk);
  v = normals(3, shapes.dv);
  if (test.gain != 1.0F) multiply_q(q, test.gain);
  for (int h = 0; h < p.heads; ++h) {
    sinks.push_back(normal(test.data_seed * 16 + 4, static_cast<std::uint64_t>(h)));
    slopes.push_back(0.1F * std::abs(normal(test.data_seed * 16 + 5, static_cast<std::uint64_t>(h))));
  }
  const auto output = [&](const TensorShape& shape) {
    SharedTensor tensor(shape);
    tensor.poison();
    return tensor;
  };
  for (int copy = 0; copy < (p.replicated_q ? p.ranks : 1); ++copy) {
    o.push_back(output(shapes.o));
    lse.push_back(output(shapes.lse));
    if (backward) dq.push_back(output(shapes.dq));
  }
  if (!backward) return;
  d_out = normals(6, shapes.o);
  if (test.dlse) dlse = normals(7, shapes.lse);
  dk = output(shapes.dk);
  dv = output(shapes.dv);
  dsinks = output({1, p.ranks, p.heads, 1, DType::float32, Layout::bshd});
}

Inputs Whole::inputs() const {
  Inputs inputs;
  inputs.q = {q.data(), q.shape()};
  inputs.k = {k.data(), k.shape()};
  inputs.v = {v.data(), v.shape()};
  inputs.sinks = sinks.data();
  inputs.alibi_slopes = slopes.data();
  if (!backward) return inputs;
  inputs.gradient.kind = GradientSpec::Kind::file;
  inputs.d_out = {d_out.data(), d_out.shape()};
  if (dlse.data() != nullptr) inputs.dlse = {dlse.data(), dlse.shape()};
  return inputs;
}

Outputs Whole::outputs() const {
  Outputs outputs;
  outputs.o = o.front().data();
  outputs.lse = lse.front().data();
  if (!backward) return outputs;
  outputs.dq = dq.front().data();
  outputs.dk = dk.data();
  outputs.dv = dv.data();
  outputs.dsinks = dsinks.data();
  return outputs;
}

// What a rank holds of a whole tensor: the rows themselves where they are one run, otherwise a copy.
class Part {
 public:
  Part(const SharedTensor& whole, const Shard& shard) : whole_(whole), shard_(shard) {
    if (whole.data() == nullptr || shard.rows == 0) return;
    if (is_one_run()) {
      const TensorShape& shape = whole.shape();
      view_ = as_tensor(whole.data(), shape);
      view_.data = whole.data() + shard.pieces.front().first * view_.token_stride * size_of(shape.dtype);
      return;
    }
    TensorShape local = whole.shape();
    local.tokens = shard.rows;
    copy_ = Pages(local.bytes());
    gather(shard, {whole.data(), whole.shape()}, copy_.data());
    view_ = as_tensor(copy_.data(), local);
  }

  const Tensor& tensor() const { return view_; }
  void store() const {
    if (copy_.data() == nullptr) return;
    for_each_run(shard_, whole_.shape(), [&](std::int64_t local, std::int64_t global, std::int64_t bytes) {
      std::memcpy(whole_.data() + global, copy_.data() + local, static_cast<std::size_t>(bytes));
    });
  }

 private:
  bool is_one_run() const { return shard_.pieces.size() == 1 && shard_.pieces.front().stride == 1; }

  const SharedTensor& whole_;
  const Shard& shard_;
  Pages copy_;
  Tensor view_;
};

// One rank, from its rows of the inputs to its rows of the outputs.
class VerifyRank {
 public:
  VerifyRank(const VerifyCase& test, const Whole& whole, int rank)
      : test_(test),
        whole_(whole),
        rank_(static_cast<std::size_t>(rank)),
        copy_(test.problem.replicated_q ? rank_ : 0),
        shard_q_(test.problem.replicated_q
                     ? all_rows(test.problem.tokens_q)
                     : make_shard(test.problem.sharding_q, test.problem.tokens_q, test.problem.ranks, rank)),
        shard_k_(make_shard(test.problem.sharding_k, test.problem.tokens_k, test.problem.ranks, rank)) {}

  void run(Attention& attention, WatchedCommunicator& watched) {
    const Problem& p = test_.problem;
    const Part q(whole_.q, shard_q_), k(whole_.k, shard_k_), v(whole_.v, shard_k_);
    const Part o(whole_.o[copy_], shard_q_), lse(whole_.lse[copy_], shard_q_);
    ForwardTensors forward;
    forward.q = q.tensor();
    forward.k = k.tensor();
    forward.v = v.tensor();
    forward.o = o.tensor();
    forward.lse = lse.tensor();
    if (p.alibi) forward.alibi_slopes = whole_.slopes.data();
    if (p.sinks) forward.sinks = whole_.sinks.data();
    watched.begin(Pass::forward, "forward");
    attention.forward(forward);
    if (test_.options.backward) backward(forward, attention, watched);
    o.store();
    lse.store();
  }

 private:
  void backward(const ForwardTensors& forward, Attention& attention, WatchedCommunicator& watched) {
    const Part d_out(whole_.d_out, shard_q_), dlse(whole_.dlse, shard_q_);
    const Part dq(whole_.dq[copy_], shard_q_), dk(whole_.dk, shard_k_), dv(whole_.dv, shard_k_);
    BackwardTensors tensors;
    tensors.q = forward.q;
    tensors.k = forward.k;
    tensors.v = forward.v;
    tensors.o = forward.o;
    tensors.lse = forward.lse;
    tensors.d_out = d_out.tensor();
    if (test_.dlse) tensors.dlse = dlse.tensor();
    tensors.dq = dq.tensor();
    tensors.dk = dk.tensor();
    tensors.dv = dv.tensor();
    tensors.alibi_slopes = forward.alibi_slopes;
    tensors.sinks = forward.sinks;
    const std::size_t heads = static_cast<std::size_t>(test_.problem.heads);
    if (test_.problem.sinks) tensors.dsinks = reinterpret_cast<float*>(whole_.dsinks.data()) + rank_ * heads;
    watched.begin(Pass::backward, "backward");
    attention.backward(tensors);
    dq.store();
    dk.store();
    dv.store();
  }

  const VerifyCase& test_;
  const Whole& whole_;
  std::size_t rank_, copy_;
  Shard shard_q_, shard_k_;
};

// What several ranks hold must be the same on all.
void expect_same_bits(Verification& verification, const VerifyCase& test, const Whole& whole) {
  const auto expect = [&](const char* name, const std::byte* first, const std::byte* other, std::int64_t bytes,
                          std::size_t rank) {
    if (std::memcmp(first, other, static_cast<std::size_t>(bytes)) == 0) return;
    oracle::Comparison comparison;
    comparison.name = std::string(name) + " of rank " + std::to_string(rank) + " against rank 0's, bit for bit";
    comparison.passed = verification.passed = false;
    for (std::int64_t at = 0; at < bytes; ++at) {
      if (first[at] == other[at]) continue;
      if (comparison.worst < 0) comparison.worst = at;
      ++comparison.failures;
    }
    comparison.elements = bytes;
    verification.comparisons.push_back(comparison);
  };
  for (std::size_t rank = 1; rank < whole.o.size(); ++rank) {
    expect("o", whole.o[0].data(), whole.o[rank].data(), whole.o[0].shape().bytes(), rank);
    expect("lse", whole.lse[0].data(), whole.lse[rank].data(), whole.lse[0].shape().bytes(), rank);
    if (whole.backward) expect("dq", whole.dq[0].data(), whole.dq[rank].data(), whole.dq[0].shape().bytes(), rank);
  }
  if (!whole.backward || !test.problem.sinks) return;
  const std::int64_t bytes = test.problem.heads * std::int64_t{4};
  for (std::int64_t rank = 1; rank < test.problem.ranks; ++rank) {
    expect("dsinks", whole.dsinks.data(), whole.dsinks.data() + rank * bytes, bytes, static_cast<std::size_t>(rank));
  }
}

}  // namespace

Verification run_case(const VerifyCase& test, const VerifySetting& setting) {
  test.problem.validate();
  PlanOptions options = with_tuned_file(test.problem, test.options);  // as Attention would
  if (setting.memory_budget > 0) options.memory_budget = setting.memory_budget;
  {
    const EndAtSignal interruptible;      // planning does not ask, and nothing has to be cleaned up
    make_plan(test.problem, options, 0);  // refuses before anything is filled
  }
  const Whole whole(test);
  const RankBody body = [&](Communicator& communicator) {
    throw_if_interrupted();
    ProgressLine line(setting.show_progress && communicator.rank() == 0);
    WatchedCommunicator watched(communicator, make_plan(test.problem, options, communicator.rank()), &line);
    ExecuteOptions execute;
    execute.deadline = Communicator::Seconds(setting.deadline);
    execute.fake_device = test.fake_device;
    execute.fake_device_seed = test.data_seed * 131 + static_cast<std::uint64_t>(communicator.rank());
    Attention attention(test.problem, options, watched, execute);
    VerifyRank(test, whole, communicator.rank()).run(attention, watched);
  };
  if (setting.processes) {
    run_forked_ranks(test.problem.ranks, body);
  } else {
    const EndAtSignal interruptible;  // all ranks plan at the same time without asking, and nothing has to be cleaned up
    run_thread_ranks(test.problem.ranks, body);
  }
  throw_if_interrupted();
  const bool rounded_o = !options.keep_o_float32 && test.problem.dtype != DType::float32;
  Verification verification =
      verify_outputs(test.problem, whole.inputs(), Layout::bshd, whole.outputs(), test.data_seed, rounded_o);
  expect_same_bits(verification, test, whole);
  return verification;
}

}  // namespace ringspan::cli
