#include "simulate.h"

#include <cstdint>
#include <cstring>
#include <memory>
#include <string>

#include "base/check.h"
#include "plan/plan_data.h"

namespace ringspan::python {
namespace {

// One rank's part of a tensor, dense: (batch, rows, heads, width).
class LocalTensor {
 public:
  LocalTensor(const Shard& shard, std::int64_t batch, std::int64_t heads, std::int64_t row_bytes, std::int64_t element_bytes)
      : shard_(shard),
        batch_(batch),
        heads_(heads),
        row_bytes_(row_bytes),
        element_bytes_(element_bytes),
        bytes_(static_cast<std::size_t>(batch * shard.rows * heads * row_bytes)) {}

  Tensor tensor() {
    const std::int64_t width = row_bytes_ / element_bytes_;
    return {bytes_.data(), shard_.rows * heads_ * width, heads_ * width, width};
  }

  void gather(const ConstTensor& whole) {
    each(
        [&](std::byte* local, std::int64_t offset) {
          std::memcpy(local, static_cast<const std::byte*>(whole.data) + offset, static_cast<std::size_t>(row_bytes_));
        },
        whole);
  }

  void scatter(const Tensor& whole) {
    each(
        [&](const std::byte* local, std::int64_t offset) {
          std::memcpy(static_cast<std::byte*>(whole.data) + offset, local, static_cast<std::size_t>(row_bytes_));
        },
        whole);
  }

 private:
  // copy(local row, offset of the row in the whole tensor, in bytes)
  template <typename Copy>
  void each(const Copy& copy, const ConstTensor& whole) {
    std::byte* local = bytes_.data();
    for (std::int64_t b = 0; b < batch_; ++b) {
      for (const Progression& piece : shard_.pieces) {
        for (std::int64_t i = 0; i < piece.count; ++i) {
          for (std::int64_t h = 0; h < heads_; ++h) {
            copy(local, (b * whole.batch_stride + piece.at(i) * whole.token_stride + h * whole.head_stride) * element_bytes_);
            local += row_bytes_;
          }
        }
      }
    }
  }

  const Shard& shard_;
  std::int64_t batch_, heads_, row_bytes_, element_bytes_;
  std::vector<std::byte> bytes_;
};

// Makes a rank's tensors: the query or the key side, of a width in elements, in the storage dtype or in float32.
class Locals {
 public:
  explicit Locals(const internal::PlanData& plan) : plan_(plan), held_q_(plan.shard_q) {
    const std::int64_t tokens = plan.problem.tokens_q;
    if (plan.problem.replicated_q) held_q_ = {.pieces = {{0, 1, tokens}}, .rows = tokens};
  }

  // Of queries that every rank holds the results are the same on all.
  bool gives_queries() const { return !plan_.problem.replicated_q || plan_.rank == 0; }

  LocalTensor queries(int width) const { return make(held_q_, plan_.problem.heads, width, size_of(plan_.problem.dtype)); }
  LocalTensor keys(int width) const { return make(plan_.shard_k, plan_.problem.kv_heads, width, size_of(plan_.problem.dtype)); }
  LocalTensor statistics() const { return make(held_q_, plan_.problem.heads, 1, 4); }

 private:
  LocalTensor make(const Shard& shard, int heads, int width, std::int64_t element) const {
    return {shard, plan_.problem.batch, heads, width * element, element};
  }

  const internal::PlanData& plan_;
  Shard held_q_;
};

std::int64_t saved_bytes(const internal::PlanData& plan) {
  std::int64_t bytes = 0;
  if (!plan.has_backward) return 0;
  for (const internal::Region& region : plan.forward.regions) {
    if (region.component == internal::Component::saved) bytes += region.bytes;
  }
  return bytes;
}

// Where each rank's part of `saved` begins; checks the whole.
std::vector<std::size_t> saved_offsets(const std::vector<Plan>& plans, std::size_t bytes) {
  std::vector<std::size_t> offsets{0};
  for (const Plan& plan : plans) offsets.push_back(offsets.back() + static_cast<std::size_t>(saved_bytes(plan.data())));
  RINGSPAN_CHECK(offsets.back() == bytes);
  return offsets;
}

// Ranks that share a device: messages are copied there.
std::vector<std::unique_ptr<Communicator>> world_on(const std::string& device, std::size_t ranks) {
  return make_thread_world(std::vector<std::string>(ranks, device));
}

}  // namespace

void simulate_forward(const std::vector<Plan>& plans, const ForwardTensors& whole, std::span<std::byte> saved) {
  const std::vector<std::size_t> offsets = saved_offsets(plans, saved.size());
  run_thread_ranks(static_cast<int>(plans.size()), [&](Communicator& communicator) {
    const auto rank = static_cast<std::size_t>(communicator.rank());
    const Plan& plan = plans[rank];
    const Problem& problem = plan.problem();
    const Locals locals(plan.data());
    LocalTensor q = locals.queries(problem.head_dim);
    LocalTensor k = locals.keys(problem.head_dim);
    LocalTensor v = locals.keys(problem.head_dim_v);
    LocalTensor o = locals.queries(problem.head_dim_v);
    LocalTensor lse = locals.statistics();
    q.gather(whole.q);
    k.gather(whole.k);
    v.gather(whole.v);
    ForwardTensors tensors = whole;
    tensors.q = q.tensor();
    tensors.k = k.tensor();
    tensors.v = v.tensor();
    tensors.o = o.tensor();
    tensors.lse = lse.tensor();
    Attention attention(plan, communicator);
    attention.forward(tensors);
    attention.copy_saved(saved.subspan(offsets[rank], offsets[rank + 1] - offsets[rank]));
    if (locals.gives_queries()) {
      o.scatter(whole.o);
      lse.scatter(whole.lse);
    }
  });
}

void simulate_backward(const std::vector<Plan>& plans, const BackwardTensors& whole, std::span<const std::byte> saved) {
  const std::vector<std::size_t> offsets = saved_offsets(plans, saved.size());
  run_thread_ranks(static_cast<int>(plans.size()), [&](Communicator& communicator) {
    const auto rank = static_cast<std::size_t>(communicator.rank());
    const Plan& plan = plans[rank];
    const Problem& problem = plan.problem();
    const Locals locals(plan.data());
    BackwardTensors tensors = whole;
    LocalTensor q = locals.queries(problem.head_dim);
    LocalTensor k = locals.keys(problem.head_dim);
    LocalTensor v = locals.keys(problem.head_dim_v);
    LocalTensor o = locals.queries(problem.head_dim_v);
    LocalTensor d_out = locals.queries(problem.head_dim_v);
    LocalTensor lse = locals.statistics();
    LocalTensor dlse = locals.statistics();
    LocalTensor dq = locals.queries(problem.head_dim);
    LocalTensor dk = locals.keys(problem.head_dim);
    LocalTensor dv = locals.keys(problem.head_dim_v);
    const auto take = [](LocalTensor& local, ConstTensor* tensor) {
      if (tensor->data == nullptr) return;
      local.gather(*tensor);
      *tensor = local.tensor();
    };
    take(q, &tensors.q);
    take(k, &tensors.k);
    take(v, &tensors.v);
    take(o, &tensors.o);
    take(d_out, &tensors.d_out);
    take(lse, &tensors.lse);
    take(dlse, &tensors.dlse);
    tensors.dq = dq.tensor();
    tensors.dk = dk.tensor();
    tensors.dv = dv.tensor();
    std::vector<float> dsinks(whole.dsinks == nullptr ? 0 : static_cast<std::size_t>(problem.heads));
    if (whole.dsinks != nullptr) tensors.dsinks = dsinks.data();
    Attention attention(plan, communicator);
    attention.restore_saved(saved.subspan(offsets[rank], offsets[rank + 1] - offsets[rank]));
    attention.backward(tensors);
    if (locals.gives_queries()) dq.scatter(whole.dq);
    dk.scatter(whole.dk);
    dv.scatter(whole.dv);
    // Every rank has the sum over all ranks.
    if (rank == 0 && whole.dsinks != nullptr) std::memcpy(whole.dsinks, dsinks.data(), dsinks.size() * sizeof(float));
  });
}

void simulate_forward(const std::vector<Plan>& plans, const std::vector<ForwardTensors>& shards, std::span<std::byte> saved,
                      const ExecuteOptions& execute) {
  const std::vector<std::size_t> offsets = saved_offsets(plans, saved.size());
  run_thread_ranks(world_on(execute.device, plans.size()), [&](Communicator& communicator) {
    const auto rank = static_cast<std::size_t>(communicator.rank());
    Attention attention(plans[rank], communicator, execute);
    attention.forward(shards.at(rank));
    attention.copy_saved(saved.subspan(offsets[rank], offsets[rank + 1] - offsets[rank]));
    attention.wait();
  });
}

void simulate_backward(const std::vector<Plan>& plans, const std::vector<BackwardTensors>& shards,
                       std::span<const std::byte> saved, const ExecuteOptions& execute) {
  const std::vector<std::size_t> offsets = saved_offsets(plans, saved.size());
  run_thread_ranks(world_on(execute.device, plans.size()), [&](Communicator& communicator) {
    const auto rank = static_cast<std::size_t>(communicator.rank());
    Attention attention(plans[rank], communicator, execute);
    attention.restore_saved(saved.subspan(offsets[rank], offsets[rank + 1] - offsets[rank]));
    attention.backward(shards.at(rank));
    attention.wait();
  });
}

}  // namespace ringspan::python
