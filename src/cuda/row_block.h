// The kernels of kernels/rowwise.h as block programs: fill, copy, add, merge, merge_states, finalize and delta. That of the
// gradient of sinks is in sink_block.h.
//
// A row is handled by 1 to 32 threads of a warp, as its width says (row_layout.h), each of which takes four elements at a time
// where the strides and addresses of all operands allow. All loads of some rows are on their way before any is used: what
// bounds these kernels is the bandwidth of the memory. Tasks that write what others touch come in waves (schedule.h). Cost:
// each operand is read or written once.
#pragma once

#include <type_traits>

#include "cuda/arguments.h"
#include "cuda/block_parts.h"
#include "cuda/finish_row.h"
#include "cuda/machine.h"
#include "cuda/row_layout.h"

namespace ringspan::cuda {

template <typename M, RowOp kOp>
class RowBlock {
 public:
  // shared: of the block.
  RINGSPAN_DEVICE RowBlock(M& m, const RowArguments& arguments, kernels::RowTask& shared)
      : m_(m), arguments_(arguments), task_(shared), lanes_log2_(row_lanes_log2(arguments.width)) {}

  RINGSPAN_DEVICE void run(std::int64_t block) {
    const std::int64_t first = (block - take_task(block)) * (kRowSteps * rows_at_a_time(lanes_log2_));
    const bool by_four = has_runs_of_four();
    for (int step = 0; step < kRowSteps; step += kTogether) {
      place_rows(first + step * rows_at_a_time(lanes_log2_));
      by_four ? run_rows<4>() : run_rows<1>();
    }
  }

 private:
  static constexpr int kTogether = 4;  // rows of a thread whose loads are under way at a time
  static_assert(kRowSteps % kTogether == 0);

  struct Row {
    std::uint32_t batch, row, head;
    bool exists;  // else it is the first one of the task
  };
  // What a thread knows of a row before it changes any of it.
  struct Held {
    float keep, take, m, l;
    bool active, fresh;  // fresh: the row's own state holds nothing yet
  };
  // kCount elements as they lie in memory; of 16 bits two to a word.
  template <int kCount>
  struct Bits {
    std::uint32_t words[kCount];
  };
  struct alignas(8) Words {
    std::uint32_t words[2];
  };

  RINGSPAN_DEVICE int lane_of(int thread) const { return thread & ((1 << lanes_log2_) - 1); }  // of its row

  // The task that has the block, into shared memory; returns its first block.
  RINGSPAN_DEVICE std::int64_t take_task(std::int64_t block) {
    std::int64_t low = 0;
    std::int64_t high = arguments_.task_count - 1;
    while (low < high) {
      const std::int64_t middle = (low + high + 1) / 2;
      const bool at_or_after = arguments_.first_block(middle) <= block;
      low = at_or_after ? middle : low;
      high = at_or_after ? high : middle - 1;
    }
    using Word = std::uint64_t;
    static_assert(sizeof task_ % sizeof(Word) == 0 && sizeof task_ / sizeof(Word) <= kRowThreads);
    const auto* const from = reinterpret_cast<const Word*>(&arguments_.task(low));
    m_.each([&](int thread) {
      if (thread < static_cast<int>(sizeof task_ / sizeof(Word))) reinterpret_cast<Word*>(&task_)[thread] = from[thread];
    });
    m_.sync();
    return arguments_.first_block(low);
  }

  RINGSPAN_DEVICE bool has_runs_of_four() const {
    std::int64_t all = arguments_.width;
    RINGSPAN_UNROLL
    for (int operand = 0; operand < 6; ++operand) {
      if ((wide_operands(kOp) >> operand & 1U) == 0) continue;
      const kernels::Operand& view = task_.operands[operand];
      if (view.data == nullptr) continue;
      all |= view.batch_stride | view.row_stride | view.head_stride;
      all |= static_cast<std::int64_t>(reinterpret_cast<std::uintptr_t>(view.data) / (view.dtype == DType::float32 ? 4 : 2));
    }
    return all % 4 == 0;
  }

  struct Place {
    std::uint32_t batch, row, head;
  };
  RINGSPAN_DEVICE Place place_of(std::int64_t index) const {
    const auto split = [&](auto of, auto rows, auto heads) -> Place {
      return {static_cast<std::uint32_t>(of / heads / rows), static_cast<std::uint32_t>(of / heads % rows),
              static_cast<std::uint32_t>(of % heads)};
    };
    if ((index | task_.row_count | task_.head_count) >> 32 != 0) return split(index, task_.row_count, task_.head_count);
    return split(static_cast<std::uint32_t>(index), static_cast<std::uint32_t>(task_.row_count),
                 static_cast<std::uint32_t>(task_.head_count));  // divisions of 64 bits take long
  }

  RINGSPAN_DEVICE void place_rows(std::int64_t first) {
    const auto rows = static_cast<std::uint32_t>(task_.row_count), heads = static_cast<std::uint32_t>(task_.head_count);
    const std::int64_t count = task_.batch_count * task_.row_count * task_.head_count;
    const Place step = place_of(rows_at_a_time(lanes_log2_));
    m_.each([&](int thread) {
      const std::int64_t index = first + (thread >> lanes_log2_);
      Place place = place_of(index);
      RINGSPAN_UNROLL
      for (int u = 0; u < kTogether; ++u) {
        const bool exists = index + u * rows_at_a_time(lanes_log2_) < count;
        rows_[thread][u] = exists ? Row{place.batch, place.row, place.head, true} : Row{0, 0, 0, false};
        place.head += step.head;
        const bool next_row = place.head >= heads;
        place.head -= next_row ? heads : 0;
        place.row += step.row + (next_row ? 1 : 0);
        const bool next_batch = place.row >= rows;
        place.row -= next_batch ? rows : 0;
        place.batch += step.batch + (next_batch ? 1 : 0);
      }
    });
  }

  RINGSPAN_DEVICE std::int64_t offset(int operand, const Row& row) const {
    const kernels::Operand& view = task_.operands[operand];
    const auto steps = [](std::uint32_t count, std::int64_t stride) { return count * static_cast<std::uint64_t>(stride); };
    return static_cast<std::int64_t>(steps(row.batch, view.batch_stride) + steps(row.row, view.row_stride) +
                                     steps(row.head, view.head_stride));
  }
  RINGSPAN_DEVICE DType dtype(int operand) const { return task_.operands[operand].dtype; }
  // Of operands with one element per row: float32.
  RINGSPAN_DEVICE float& scalar(int operand, const Row& row) const {
    return static_cast<float*>(task_.operands[operand].data)[offset(operand, row)];
  }

  template <int kCount>
  RINGSPAN_DEVICE Bits<kCount> load(int operand, const Row& row, int e) const {
    const std::int64_t at = offset(operand, row) + e;
    const void* const data = task_.operands[operand].data;
    Bits<kCount> bits{};
    if (dtype(operand) == DType::float32) {
      const auto* const from = static_cast<const std::uint32_t*>(data) + at;
      if constexpr (kCount == 4) {
        const Chunk chunk = *reinterpret_cast<const Chunk*>(from);
        RINGSPAN_UNROLL
        for (int i = 0; i < 4; ++i) bits.words[i] = chunk.words[i];
      } else {
        bits.words[0] = *from;
      }
    } else {
      const auto* const from = static_cast<const std::uint16_t*>(data) + at;
      if constexpr (kCount == 4) {
        const Words words = *reinterpret_cast<const Words*>(from);
        bits.words[0] = words.words[0];
        bits.words[1] = words.words[1];
      } else {
        bits.words[0] = *from;
      }
    }
    return bits;
  }
  template <int kCount>
  RINGSPAN_DEVICE void store(int operand, const Row& row, int e, const Bits<kCount>& bits) const {
    const std::int64_t at = offset(operand, row) + e;
    void* const data = task_.operands[operand].data;
    if (dtype(operand) == DType::float32) {
      auto* const to = static_cast<std::uint32_t*>(data) + at;
      if constexpr (kCount == 4) {
        *reinterpret_cast<Chunk*>(to) = {bits.words[0], bits.words[1], bits.words[2], bits.words[3]};
      } else {
        *to = bits.words[0];
      }
    } else {
      auto* const to = static_cast<std::uint16_t*>(data) + at;
      if constexpr (kCount == 4) {
        *reinterpret_cast<Words*>(to) = {bits.words[0], bits.words[1]};
      } else {
        *to = static_cast<std::uint16_t>(bits.words[0]);
      }
    }
  }

  template <int kCount>
  RINGSPAN_DEVICE void floats_of(const Bits<kCount>& bits, DType dtype, float (&values)[kCount]) const {
    if (dtype == DType::float32) {
      RINGSPAN_UNROLL
      for (int i = 0; i < kCount; ++i) values[i] = std::bit_cast<float>(bits.words[i]);
      return;
    }
    RINGSPAN_UNROLL
    for (int i = 0; i < kCount; i += 2) {
      const std::uint32_t word = bits.words[i / 2];
      const FloatPair pair =
          dtype == DType::bfloat16 ? M::template unpack<DType::bfloat16>(word) : M::template unpack<DType::float16>(word);
      values[i] = pair.low;
      if constexpr (kCount > 1) values[i + 1] = pair.high;
    }
  }
  template <int kCount>
  RINGSPAN_DEVICE Bits<kCount> bits_of(const float (&values)[kCount], DType dtype) const {
    Bits<kCount> bits{};
    if (dtype == DType::float32) {
      RINGSPAN_UNROLL
      for (int i = 0; i < kCount; ++i) bits.words[i] = std::bit_cast<std::uint32_t>(values[i]);
      return bits;
    }
    RINGSPAN_UNROLL
    for (int i = 0; i < kCount; i += 2) {
      const float high = kCount > 1 ? values[i + (kCount > 1 ? 1 : 0)] : 0.0F;
      bits.words[i / 2] = dtype == DType::bfloat16 ? M::template pack<DType::bfloat16>(values[i], high)
                                                   : M::template pack<DType::float16>(values[i], high);
    }
    return bits;
  }
  template <int kCount>
  RINGSPAN_DEVICE void store_floats(int operand, const Row& row, int e, const float (&values)[kCount]) const {
    store(operand, row, e, bits_of(values, dtype(operand)));
  }

  // use(thread, row of the thread, element, bits of each operand there), for all rows, after the loads of some rows.
  template <int kCount, int... kOperands, typename Use>
  RINGSPAN_DEVICE void each_run(Use&& use) {
    m_.each([&](int thread) {
      for (int e = lane_of(thread) * kCount; e < arguments_.width; e += kCount << lanes_log2_) {
        [[maybe_unused]] Bits<kCount> bits[kTogether][sizeof...(kOperands) + 1];
        RINGSPAN_UNROLL
        for (int u = 0; u < kTogether; ++u) {
          [[maybe_unused]] int index = 0;
          ((bits[u][index++] = load<kCount>(kOperands, rows_[thread][u], e)), ...);
        }
        RINGSPAN_UNROLL
        for (int u = 0; u < kTogether; ++u) {
          if (rows_[thread][u].exists) use(thread, u, e, bits[u]);
        }
      }
    });
  }

  template <int kCount>
  RINGSPAN_DEVICE void run_rows() {
    if constexpr (kOp == RowOp::fill) {
      float values[kCount];
      RINGSPAN_UNROLL
      for (int i = 0; i < kCount; ++i) values[i] = arguments_.value;
      const Bits<kCount> bits = bits_of(values, dtype(0));
      each_run<kCount>([&](int thread, int u, int e, const auto&) { store(0, rows_[thread][u], e, bits); });
    } else if constexpr (kOp == RowOp::copy) {
      copy<kCount>();
    } else if constexpr (kOp == RowOp::add) {
      add<kCount>();
    } else if constexpr (kOp == RowOp::merge) {
      merge<kCount, 2, 3, 4, 0>();
    } else if constexpr (kOp == RowOp::merge_states) {
      merge<kCount, 3, 4, 5, 2>();
    } else if constexpr (kOp == RowOp::finalize) {
      finalize<kCount>();
    } else {
      delta<kCount>();
    }
  }

  // The bits where the types are the same: a signalling NaN stays one.
  template <int kCount>
  RINGSPAN_DEVICE void copy() {
    const bool rounds = dtype(0) != dtype(1);
    each_run<kCount, 0>([&](int thread, int u, int e, const auto& bits) {
      if (!rounds) return store(1, rows_[thread][u], e, bits[0]);
      float values[kCount];
      floats_of(bits[0], dtype(0), values);
      store_floats(1, rows_[thread][u], e, values);
    });
  }

  template <int kCount>
  RINGSPAN_DEVICE void add() {
    m_.each([&](int thread) {
      for (int e = lane_of(thread) * kCount; e < arguments_.width; e += kCount << lanes_log2_) {
        float sums[kTogether][kCount];
        Bits<kCount> bits[kTogether];
        const auto load_rows = [&](int operand) {
          RINGSPAN_UNROLL
          for (int u = 0; u < kTogether; ++u) bits[u] = load<kCount>(operand, rows_[thread][u], e);
        };
        load_rows(1);
        RINGSPAN_UNROLL
        for (int u = 0; u < kTogether; ++u) floats_of(bits[u], dtype(1), sums[u]);
        RINGSPAN_NO_UNROLL
        for (int source = 0; source < 6; source += source == 0 ? 2 : 1) {
          if (task_.operands[source].data == nullptr) break;
          load_rows(source);
          RINGSPAN_UNROLL
          for (int u = 0; u < kTogether; ++u) {
            float more[kCount];
            floats_of(bits[u], dtype(source), more);
            RINGSPAN_UNROLL
            for (int i = 0; i < kCount; ++i) sums[u][i] += more[i];
          }
        }
        RINGSPAN_UNROLL
        for (int u = 0; u < kTogether; ++u) {
          if (rows_[thread][u].exists) store_floats(1, rows_[thread][u], e, sums[u]);
        }
      }
    });
  }

  // The state in operands kM, kL, kAcc takes in the values with their maximum in operand 1 (a partial: l = 1) or 0 and 1 (a
  // state).
  template <int kCount, int kM, int kL, int kAcc, int kValues>
  RINGSPAN_DEVICE void merge() {
    m_.each([&](int thread) {
      RINGSPAN_UNROLL
      for (int u = 0; u < kTogether; ++u) {
        const Row& row = rows_[thread][u];
        const float m_other = scalar(kOp == RowOp::merge ? 1 : 0, row);
        const float l_other = kOp == RowOp::merge ? 1.0F : scalar(1, row);
        const float m_own = scalar(kM, row);
        const float l_own = scalar(kL, row);
        Held& held = held_[thread][u];
        held.active = m_other != kMinusInfinity;
        held.fresh = m_own == kMinusInfinity;
        held.m = held.fresh || m_own < m_other ? m_other : m_own;  // a NaN stays, whichever has it
        held.keep = m_own == held.m ? 1.0F : expf(m_own - held.m);
        held.take = m_other == held.m ? 1.0F : expf(m_other - held.m);
        held.l = (held.fresh ? 0.0F : l_own * held.keep) + l_other * held.take;
      }
    });
    m_.sync_warps();
    each_run<kCount, kAcc, kValues>([&](int thread, int u, int e, const auto& bits) {
      const Held& held = held_[thread][u];
      if (!held.active) return;
      const Row& row = rows_[thread][u];
      if (e == 0) {
        scalar(kM, row) = held.m;
        scalar(kL, row) = held.l;
      }
      float acc[kCount], values[kCount];
      floats_of(bits[0], dtype(kAcc), acc);
      floats_of(bits[1], dtype(kValues), values);
      RINGSPAN_UNROLL
      for (int i = 0; i < kCount; ++i) acc[i] = (held.fresh ? 0.0F : acc[i] * held.keep) + values[i] * held.take;
      store_floats(kAcc, row, e, acc);
    });
  }

  // lse may take the place of m, and o that of acc: everything is read before anything is written.
  template <int kCount>
  RINGSPAN_DEVICE void finalize() {
    m_.each([&](int thread) {
      RINGSPAN_UNROLL
      for (int u = 0; u < kTogether; ++u) {
        const Row& row = rows_[thread][u];
        const std::int64_t head = task_.head_first + row.head * task_.head_step;
        const float sink = arguments_.sinks != nullptr ? arguments_.sinks[head] : kMinusInfinity;
        results_[thread][u] = finish_state(scalar(0, row), scalar(1, row), sink, arguments_.value);
      }
    });
    m_.sync_warps();
    each_run<kCount, 2>([&](int thread, int u, int e, const auto& bits) {
      const Row& row = rows_[thread][u];
      const RowResult& result = results_[thread][u];
      if (e == 0) scalar(4, row) = result.lse;
      float values[kCount];
      floats_of(bits[0], dtype(2), values);
      RINGSPAN_UNROLL
      for (int i = 0; i < kCount; ++i) values[i] = result.empty ? 0.0F : values[i] * result.factor;
      store_floats(3, row, e, values);
      if (task_.operands[5].data != nullptr) store_floats(5, row, e, values);
    });
  }

  // A thread has runs of four elements however they are loaded: the bits do not depend on addresses.
  template <int kCount>
  RINGSPAN_DEVICE void add_products() {
    const auto add = [&](int thread, int u, const auto& d_out_bits, const auto& out_bits) {
      float d_out[kCount], out[kCount];
      floats_of(d_out_bits, dtype(0), d_out);
      floats_of(out_bits, dtype(1), out);
      RINGSPAN_UNROLL
      for (int i = 0; i < kCount; ++i) sums_[thread][u] = fmaf(d_out[i], out[i], sums_[thread][u]);
    };
    if constexpr (kCount == 4) {
      each_run<4, 0, 1>([&](int thread, int u, int, const auto& bits) { add(thread, u, bits[0], bits[1]); });
    } else {
      m_.each([&](int thread) {
        for (int first = lane_of(thread) * 4; first < arguments_.width; first += 4 << lanes_log2_) {
          RINGSPAN_NO_UNROLL
          for (int e = first; e < first + 4 && e < arguments_.width; ++e) {
            RINGSPAN_UNROLL
            for (int u = 0; u < kTogether; ++u) {
              const Row& row = rows_[thread][u];
              add(thread, u, load<1>(0, row, e), load<1>(1, row, e));
            }
          }
        }
      });
    }
  }

  template <int kCount>
  RINGSPAN_DEVICE void delta() {
    m_.each([&](int thread) {
      RINGSPAN_UNROLL
      for (int u = 0; u < kTogether; ++u) sums_[thread][u] = 0.0F;
    });
    add_products<kCount>();
    m_.sum_lanes(sums_, 1 << lanes_log2_);
    m_.each([&](int thread) {
      if (lane_of(thread) != 0) return;
      RINGSPAN_UNROLL
      for (int u = 0; u < kTogether; ++u) {
        const Row& row = rows_[thread][u];
        const float more = task_.operands[3].data == nullptr ? 0.0F : scalar(3, row);
        if (row.exists) scalar(2, row) = sums_[thread][u] - more;
      }
    });
  }

  M& m_;
  const RowArguments& arguments_;
  kernels::RowTask& task_;
  const int lanes_log2_;
  typename M::template Registers<Row, kTogether> rows_;
  typename M::template Registers<Held, kTogether> held_;
  typename M::template Registers<RowResult, kTogether> results_;
  typename M::template Registers<float, kTogether> sums_;
};

// Calls run(std::integral_constant<RowOp, op>).
template <typename Run>
auto with_row_op(RowOp op, Run&& run) {
  switch (op) {
    case RowOp::fill:
      return run(std::integral_constant<RowOp, RowOp::fill>{});
    case RowOp::copy:
      return run(std::integral_constant<RowOp, RowOp::copy>{});
    case RowOp::add:
      return run(std::integral_constant<RowOp, RowOp::add>{});
    case RowOp::merge:
      return run(std::integral_constant<RowOp, RowOp::merge>{});
    case RowOp::merge_states:
      return run(std::integral_constant<RowOp, RowOp::merge_states>{});
    case RowOp::finalize:
      return run(std::integral_constant<RowOp, RowOp::finalize>{});
    case RowOp::delta:
      break;
  }
  return run(std::integral_constant<RowOp, RowOp::delta>{});
}

}  // namespace ringspan::cuda
