// The running state of a block's rows, between memory and accumulator fragments, and the results that it ends as. The sum of a
// row is kept in four parts, one per thread that holds the row, until then.
//
// Cost: of a row whose m is -inf nothing else is read; of one that is finished no state is written.
#pragma once

#include "cuda/block_parts.h"
#include "cuda/finish_row.h"
#include "cuda/store_rows.h"

namespace ringspan::cuda {

template <typename P, typename M>
struct StateRows {
  typename M::template Registers<float, P::kDim / 2> acc;
  typename M::template Registers<float, 2> max, sum;
  typename M::template Registers<int, 2> seen;  // whether the row has taken in any pair

  // The rows of the task; others are empty.
  RINGSPAN_DEVICE void load(M& m, const kernels::AttendTask& task, const RowsOfBlock& of, int width) {
    if (task.m.data == nullptr) return clear(m);
    const auto m_rows = view_of<const float>(task.m, of.batch, of.head);
    const auto l_rows = view_of<const float>(task.l, of.batch, of.head);
    const auto acc_rows = view_of<float>(task.acc, of.batch, of.head);
    const bool pairs = are_pairs(acc_rows) && width == P::kDim;
    m.each([&](int thread) {
      const Lane lane = lane_of(M::hidden(thread));
      RINGSPAN_UNROLL
      for (int half = 0; half < 2; ++half) {
        const int row = lane.row + half * 8;
        const float before = row < of.count ? *m_rows.row(of.first + row) : kMinusInfinity;
        const bool holds = before != kMinusInfinity;  // else l and acc hold anything
        max[thread][half] = before;
        sum[thread][half] = holds && lane.column == 0 ? *l_rows.row(of.first + row) : 0.0F;  // the others hold later parts
        RINGSPAN_UNROLL
        for (int j = 0; j < P::kDim / 8; ++j) {
          const float* const from = acc_rows.row(of.first + row) + j * 8 + lane.column;
          FloatPair pair{};
          if (holds) pair = pairs ? *reinterpret_cast<const FloatPair*>(from) : load_pair(from, width - j * 8 - lane.column);
          acc[thread][j * 4 + half * 2] = pair.low;
          acc[thread][j * 4 + half * 2 + 1] = pair.high;
        }
      }
    });
  }

  // Which rows have taken in a pair of any task of the group: before store(), where it stores states. Or it is known already,
  // by row of the block.
  RINGSPAN_DEVICE void note_seen(M& m, const bool* rows) {
    m.each([&](int thread) {
      const Lane lane = lane_of(M::hidden(thread));
      RINGSPAN_UNROLL
      for (int half = 0; half < 2; ++half) seen[thread][half] = rows[lane.row + half * 8] ? 1 : 0;
    });
  }
  RINGSPAN_DEVICE void note_seen(M& m, const AttendArguments& arguments, const Group& group, const RowsOfBlock& of) {
    m.each([&](int thread) {
      const Lane lane = lane_of(M::hidden(thread));
      RINGSPAN_UNROLL
      for (int half = 0; half < 2; ++half) {
        const int row = lane.row + half * 8;
        bool any = false;
        for (std::int64_t index = 0; index < group.task_count && row < of.count && !any; ++index) {
          any = !kernels::keys_of_row(arguments.tasks[group.first_task + index], of.first + row).empty();
        }
        seen[thread][half] = any ? 1 : 0;
      }
    });
  }

  // Maxima in another unit (score_unit of arguments.h): after load(), and back before store(), where one that has not moved is
  // again what it was, bit by bit, so that launch after launch does not wear it down. `task`: the first one of the group.
  RINGSPAN_DEVICE void begin_unit(M& m, const AttendArguments& arguments) {
    m.each([&](int thread) {
      RINGSPAN_UNROLL
      for (int half = 0; half < 2; ++half) max[thread][half] *= arguments.inverse_score_unit;
    });
  }
  RINGSPAN_DEVICE void end_unit(M& m, const AttendArguments& arguments, const kernels::AttendTask& task,
                                const RowsOfBlock& of) {
    const bool has_state = task.m.data != nullptr;
    const auto m_rows = view_of<const float>(task.m, of.batch, of.head);
    m.each([&](int thread) {
      const Lane lane = lane_of(M::hidden(thread));
      RINGSPAN_UNROLL
      for (int half = 0; half < 2; ++half) {
        const int row = lane.row + half * 8;
        const float before = has_state && row < of.count ? *m_rows.row(of.first + row) : kMinusInfinity;
        const float now = max[thread][half];
        max[thread][half] = now == before * arguments.inverse_score_unit ? before : now * arguments.score_unit;
      }
    });
  }

  // By the last task over the rows: their states, but of a row without a pair, which keeps its bits; or, where the task has
  // results, these of all rows, and no state. `tile`: shared memory of kRows x (kDim + 8) elements that nobody else uses.
  RINGSPAN_DEVICE void store(M& m, const kernels::AttendParams& params, const kernels::AttendTask& task, const RowsOfBlock& of,
                             typename P::Element* tile) {
    constexpr bool kRounds = P::kType != DType::float32;
    const int width = params.shape.head_dim_v;
    const bool finish = task.o.data != nullptr;
    join_sums(m);
    if (finish) {
      const float sink = params.sinks != nullptr ? params.sinks[task.head_first + of.head * task.head_step] : kMinusInfinity;
      scale_results(m, view_of<float>(task.lse, of.batch, of.head), of.first, of.count, sink, params.output_scale);
    } else {
      store_scalars(m, view_of<float>(task.m, of.batch, of.head), view_of<float>(task.l, of.batch, of.head), of.first,
                    of.count);
    }
    const kernels::Rows& floats = finish ? task.o32 : task.acc;
    if (floats.data != nullptr)
      store_floats<P>(m, acc, seen, view_of<float>(floats, of.batch, of.head), of.first, of.count, width);
    if (!finish) return;
    if constexpr (kRounds) {
      store_rounded<P>(m, acc, view_of<typename P::Element>(task.o, of.batch, of.head), of.first, of.count, width, tile);
    } else {
      store_floats<P>(m, acc, seen, view_of<float>(task.o, of.batch, of.head), of.first, of.count, width);
    }
  }

 private:
  RINGSPAN_DEVICE void clear(M& m) {
    m.each([&](int thread) {
      RINGSPAN_UNROLL
      for (int half = 0; half < 2; ++half) {
        max[thread][half] = kMinusInfinity;
        sum[thread][half] = 0.0F;
      }
      RINGSPAN_UNROLL
      for (int index = 0; index < P::kDim / 2; ++index) acc[thread][index] = 0.0F;
    });
  }

  // What only NaN went into has a maximum from now on, so that it stays.
  RINGSPAN_DEVICE void join_sums(M& m) {
    m.quad_sum(sum);
    m.each([&](int thread) {
      RINGSPAN_UNROLL
      for (int half = 0; half < 2; ++half) {
        if (max[thread][half] == kMinusInfinity && sum[thread][half] != 0.0F) max[thread][half] = 0.0F;
      }
    });
  }

  RINGSPAN_DEVICE void store_scalars(M& m, RowsView<float> m_rows, RowsView<float> l_rows, std::int64_t first, int rows) {
    m.each([&](int thread) {
      const Lane lane = lane_of(M::hidden(thread));
      RINGSPAN_UNROLL
      for (int half = 0; half < 2; ++half) {
        const int row = lane.row + half * 8;
        if (row >= rows || seen[thread][half] == 0 || lane.column != 0) continue;
        *m_rows.row(first + row) = max[thread][half];
        *l_rows.row(first + row) = sum[thread][half];
      }
    });
  }

  // acc becomes o, of all rows.
  RINGSPAN_DEVICE void scale_results(M& m, RowsView<float> lse_rows, std::int64_t first, int rows, float sink,
                                     float output_scale) {
    m.each([&](int thread) {
      const Lane lane = lane_of(M::hidden(thread));
      RINGSPAN_UNROLL
      for (int half = 0; half < 2; ++half) {
        const int row = lane.row + half * 8;
        const RowResult result = finish_state(max[thread][half], sum[thread][half], sink, output_scale);
        if (row < rows && lane.column == 0) *lse_rows.row(first + row) = result.lse;
        seen[thread][half] = 1;
        if (M::any_lane(result.empty)) {  // whatever acc holds
          RINGSPAN_UNROLL
          for (int index = half * 2; index < P::kDim / 2; index += 4) {
            if (result.empty) acc[thread][index] = acc[thread][index + 1] = 0.0F;
          }
        }
        RINGSPAN_UNROLL
        for (int index = half * 2; index < P::kDim / 2; index += 4) {
          acc[thread][index] *= result.factor;
          acc[thread][index + 1] *= result.factor;
        }
      }
    });
  }
};

}  // namespace ringspan::cuda
