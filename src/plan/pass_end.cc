// What ends a pass: results of own rows, replicated outputs, sink gradients, kernel scratch.
#include "plan/pass.h"

#include <algorithm>

#include "plan/compact_sums.h"
#include "plan/kernel_choice.h"
#include "plan/settle.h"
#include "plan/settle_gradients.h"
#include "plan/split_tasks.h"

namespace ringspan::internal {

void PassBuilder::finalize_own(std::vector<Launch>& where, std::span<const Entry> entries, std::span<const Part> parts) {
  const float scale = problem().pattern.output_scale();
  const int width = problem().head_dim_v;
  const bool sinks = problem().sinks;
  builder_.rows(where, LaunchKind::finalize, over(entries, parts, state_heads_, sinks ? Which::real : Which::all), width, scale,
                sinks);
  if (sinks)
    builder_.rows(where, LaunchKind::finalize, over(entries, parts, state_heads_, Which::padding), width, scale, false);
}

void PassBuilder::end(std::int64_t stage) {
  if (backward_) {
    end_backward(stage);
  } else {
    end_forward(stage);
  }
}

void PassBuilder::end_forward(std::int64_t stage_index) {
  std::vector<Launch>& last = builder_.stage(stage_index, "finish").compute;
  const Part o = part(TensorKind::o);
  const Part lse = part(TensorKind::lse);
  const int width = problem().head_dim_v;
  if (setting_.states == 1) {
    const Part none{};
    const bool kept = setting_.keeps_o_float32();
    const std::vector<Part> parts{
        part(TensorKind::m), part(TensorKind::l), part(TensorKind::acc), o, lse, kept ? part(TensorKind::acc) : none};
    finalize_own(last, own_q_, parts);
  } else if (!own_q_.empty()) {
    // The states join into one; then each becomes its branch's o, in place, kept for the backward pass.
    std::int64_t rows = 0;
    for (const Entry& entry : own_q_) rows += entry.box.positions.count;
    const Box all{0, problem().batch, heads_progression(state_heads_), {0, 1, rows}};
    const bool in_place = problem().dtype == DType::float32;
    const std::int64_t scalars = all.rows() * 4;
    const RegionId region = builder_.region("joined state", Component::state, 2 * scalars + (in_place ? 0 : scalars * width));
    const std::int32_t m = builder_.arena_view(region, 0, part(TensorKind::m), all);
    const std::int32_t l = builder_.arena_view(region, scalars, part(TensorKind::l), all);
    const std::int32_t acc = in_place ? -1 : builder_.arena_view(region, 2 * scalars, part(TensorKind::acc), all);
    std::vector<Entry> joined = own_q_;
    std::int64_t row = 0;
    for (Entry& entry : joined) {
      entry.m[0] = {m, row, 1};
      entry.l[0] = {l, row, 1};
      entry.acc[0] = in_place ? entry.o : Loc{acc, row, 1};
      row += entry.box.positions.count;
    }
    fill(last, joined, part(TensorKind::m), kMinusInfinity, state_heads_);
    for (int s = 0; s < setting_.states; ++s) {
      const std::vector<Part> from{part(TensorKind::m, s), part(TensorKind::l, s), part(TensorKind::acc, s)};
      const std::vector<Part> to{part(TensorKind::m), part(TensorKind::l), part(TensorKind::acc)};
      std::vector<RowItem> items = over(own_q_, from, state_heads_);
      const std::vector<RowItem> targets = over(joined, to, state_heads_);
      for (std::size_t i = 0; i < items.size(); ++i) {
        std::copy_n(targets[i].operands, 3, items[i].operands + 3);
      }
      builder_.rows(last, LaunchKind::merge_states, items, width);
      const std::vector<Part> branch{part(TensorKind::m, s), part(TensorKind::l, s), part(TensorKind::acc, s),
                                     part(TensorKind::acc, s), part(TensorKind::l, s)};
      builder_.rows(last, LaunchKind::finalize, over(own_q_, branch, state_heads_), width, 1.0F, false);
    }
    const std::vector<Part> parts{part(TensorKind::m), part(TensorKind::l), part(TensorKind::acc), o, lse};
    finalize_own(last, joined, parts);
  }
  if (problem().replicated_q) replicate(stage_index + 1, {lse, o});
}

void PassBuilder::end_backward(std::int64_t stage_index) {
  std::vector<Launch>& last = builder_.stage(stage_index, "finish").compute;
  if (problem().dtype != DType::float32) {
    const auto cast = [&](std::span<const Entry> entries, TensorKind kind, HeadRange heads) {
      // part() finds the float32 rows: they took the place of the caller's in the entry.
      const Part p = part(kind);
      std::vector<RowItem> items = over(entries, std::vector<Part>{p}, heads);
      const int h = is_key_side(kind) ? problem().kv_heads : problem().heads;
      const std::int32_t view = builder_.caller_view(kind, p.dtype, p.width, heads_progression(h));
      std::int64_t row = 0;
      std::size_t i = 0;
      for (const Entry& entry : entries) {
        const bool replicated = problem().replicated_q && !is_key_side(kind);
        if (i < items.size()) {
          items[i].operands[1] =
              replicated ? RowRef{view, entry.box.positions.first, entry.box.positions.stride} : RowRef{view, row, 1};
        }
        ++i;
        row += entry.box.positions.count;
      }
      builder_.rows(last, LaunchKind::copy, items, p.width);
    };
    cast(own_q_, TensorKind::dq, all_heads());
    cast(own_k_, TensorKind::dk, {0, problem().kv_heads});
    cast(own_k_, TensorKind::dv, {0, problem().kv_heads});
  }
  if (problem().sinks) sum_sink_gradients(stage_index + 1);
  if (problem().replicated_q) replicate(stage_index + 3, {part(TensorKind::dq)});
}

// Every rank sends its finished rows to every other one, one peer after the other.
void PassBuilder::replicate(std::int64_t first_stage, std::vector<Part> parts) {
  const int ranks = problem().ranks;
  if (ranks == 1) return;
  const auto entries_of = [&](int rank) {
    std::vector<Entry> entries = pieces_as_entries(setting_.shards_q[static_cast<std::size_t>(rank)], problem().heads);
    for (Entry& entry : entries) {
      for (const Part& p : parts) {
        set_loc(entry, p,
                {builder_.caller_view(p.kind, p.dtype, p.width, heads_progression(problem().heads)), entry.box.positions.first,
                 entry.box.positions.stride});
      }
    }
    return entries;
  };
  const auto boxes_of = [](const std::vector<Entry>& entries) {
    std::vector<Box> boxes;
    for (const Entry& entry : entries) boxes.push_back(entry.box);
    return boxes;
  };
  const std::vector<Entry> mine = entries_of(rank_);
  const std::int32_t own = builder_.bundle(boxes_of(mine), parts);
  const RegionId out = builder_.region("replicated rows, own", Component::staging);
  const RegionId in[2] = {builder_.region("replicated rows 0", Component::staging),
                          builder_.region("replicated rows 1", Component::staging)};
  pack(builder_.stage(first_stage, "replicate").before, mine, own, out);
  for (int t = 1; t < ranks; ++t) {
    const std::int64_t index = first_stage + t - 1;
    const int from = (rank_ - t + ranks) % ranks;
    builder_.send(index, 0, (rank_ + t) % ranks, out, own, rank_, TransferOp::copy);
    const std::vector<Entry> theirs = entries_of(from);
    const std::int32_t bundle = builder_.bundle(boxes_of(theirs), parts);
    builder_.receive(index, 0, from, in[t % 2], bundle, from, TransferOp::copy);
    take_in(builder_.stage(index + 1).before, builder_.place(bundle, in[t % 2]), parts, TransferOp::copy, theirs);
  }
}

RegionId PassBuilder::make_sink_gradient() {
  const std::int64_t bytes = std::int64_t{8} * problem().heads * problem().ranks;
  const RegionId region = builder_.region("sink gradient", Component::gradients, bytes);
  builder_.set_sink_gradient(region);
  return region;
}

void PassBuilder::add_sink_gradient(std::vector<Launch>& where, std::span<const Entry> entries) {
  const std::vector<Part> parts{part(TensorKind::lse), part(TensorKind::delta)};
  builder_.rows(where, LaunchKind::sink_gradient, over(entries, parts, all_heads(), Which::real), 1);
}

void PassBuilder::sum_sinks(std::int64_t stage_index) {
  Launch sum;
  sum.kind = LaunchKind::sum_sinks;
  builder_.stage(stage_index).compute.push_back(sum);
}

void PassBuilder::sum_sink_gradients(std::int64_t stage_index) {
  const RegionId region = make_sink_gradient();
  add_sink_gradient(builder_.stage(stage_index - 1).compute, own_q_);
  builder_.sink_exchange(stage_index, rank_, problem().ranks, region, std::int64_t{8} * problem().heads);
  sum_sinks(stage_index + 1);
}

Program PassBuilder::finish() {
  Program& program = builder_.assemble();
  const PlanOptions& options = setting_.options;
  const bool on_device = writes_gradients(options);
  const bool groups = groups_tasks(options);
  if (groups) split_tasks(&program, problem().group());
  if (!backward_) settle(&program, problem().sinks, keys_without_state(problem(), options), groups);
  if (backward_ && on_device) {
    settle_gradients(&program, problem().group(), groups);
    compact_sums(builder_, problem().group());
  }
  if (!program.attend_items.empty() && setting_.options.device == DeviceKind::cpu) {
    const std::int64_t bytes = kernel_scratch_bytes(problem(), setting_.options, backward_ ? Pass::backward : Pass::forward);
    builder_.set_scratch(builder_.region("kernel scratch", Component::scratch, bytes));
  }
  return builder_.finish();
}

}  // namespace ringspan::internal
