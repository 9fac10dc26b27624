#include "kernels/rowwise.h"

#include <gtest/gtest.h>

#include <cmath>
#include <vector>

#include "kernels/attend_world.h"

namespace ringspan::kernels::testing {
namespace {

Operand operand(Tensor& tensor, DType dtype) {
  return {tensor.at(0, 0, 0), dtype, tensor.batch_stride, tensor.row_stride, tensor.head_stride};
}
Operand operand(Tensor& tensor) { return operand(tensor, DType::float32); }

RowTask task_of(const Tensor& tensor, std::initializer_list<Operand> operands) {
  RowTask task;
  task.batch_count = tensor.batch(), task.row_count = tensor.rows(), task.head_count = tensor.heads();
  int index = 0;
  for (const Operand& view : operands) task.operands[index++] = view;
  return task;
}

// Threads, and rows: with the larger count a task is cut into pieces.
class RowwiseTest : public ::testing::TestWithParam<std::tuple<int, std::int64_t>> {
 protected:
  RowwiseTest() : pool_(std::get<0>(GetParam())), rows_(std::get<1>(GetParam())) {}
  Context context() { return {pool_, nullptr, progress_}; }
  static constexpr auto progress_function = [] {};
  ThreadPool pool_;
  FunctionRef<void()> progress_{progress_function};
  std::int64_t rows_;
};

constexpr DType kAllTypes[] = {DType::float32, DType::bfloat16, DType::float16};

TEST_P(RowwiseTest, CopyAddFillOverAllTypes) {
  for (const DType from : kAllTypes) {
    for (const DType to : kAllTypes) {
      Tensor source = random_tensor(from, 2, rows_, 3, 17, false, 1);
      Tensor target = random_tensor(to, 2, rows_, 3, 17, true, 2);
      const Tensor before = target;
      add_rows(std::vector{task_of(source, {operand(source, from), operand(target, to)})}, 17, context());
      target.for_each([&](auto b, auto r, auto h, auto e) {
        const float sum = static_cast<float>(before.get(b, r, h, e)) + static_cast<float>(source.get(b, r, h, e));
        ASSERT_EQ(target.get(b, r, h, e), round_to(to, sum));
      });
      copy_rows(std::vector{task_of(source, {operand(source, from), operand(target, to)})}, 17, context());
      target.for_each(
          [&](auto b, auto r, auto h, auto e) { ASSERT_EQ(target.get(b, r, h, e), round_to(to, source.get(b, r, h, e))); });
      fill_rows(std::vector{task_of(target, {operand(target, to)})}, 17, -1.5F, context());
      target.for_each([&](auto b, auto r, auto h, auto e) { ASSERT_EQ(target.get(b, r, h, e), -1.5); });
      EXPECT_TRUE(target.gaps_intact());
    }
  }
}

// Rows without gaps on one side, on both, in another order: what lies side by side in one tensor need not in the other.
TEST_P(RowwiseTest, CopyAndAddBetweenLayouts) {
  for (const bool from_inner : {false, true}) {
    for (const bool to_inner : {false, true}) {
      for (const std::int64_t from_pad : {0, 3}) {
        for (const std::int64_t to_pad : {0, 3}) {
          for (const DType to : {DType::float32, DType::bfloat16}) {
            Tensor source = random_tensor(DType::float32, 2, rows_, 3, 16, from_inner, 3, from_pad);
            Tensor target(to, 2, rows_, 3, 16, to_inner, to_pad);
            const std::vector tasks{task_of(source, {operand(source), operand(target, to)})};
            copy_rows(tasks, 16, context());
            const Tensor copied = target;
            copied.for_each([&](auto b, auto r, auto h, auto e) {
              ASSERT_EQ(copied.get(b, r, h, e), round_to(to, source.get(b, r, h, e)));
            });
            add_rows(tasks, 16, context());
            target.for_each([&](auto b, auto r, auto h, auto e) {
              const float sum = static_cast<float>(copied.get(b, r, h, e)) + static_cast<float>(source.get(b, r, h, e));
              ASSERT_EQ(target.get(b, r, h, e), round_to(to, sum));
            });
            EXPECT_TRUE(target.gaps_intact());
          }
        }
      }
    }
  }
}

// Whatever lies without gaps is filled in one piece: with gaps and without, all rows and some, zeros of either sign.
TEST_P(RowwiseTest, FillTouchesExactlyItsRows) {
  for (const DType type : kAllTypes) {
    for (const bool rows_inner : {false, true}) {
      for (const std::int64_t pad : {0, 3}) {
        for (const float value : {0.0F, -0.0F, -1.5F}) {
          for (const std::int64_t left_out : {0, 1}) {
            Tensor target(type, 2, rows_, 3, 16, rows_inner, pad);
            target.fill(2.0);
            RowTask task = task_of(target, {operand(target, type)});
            task.row_count -= left_out, task.head_count -= left_out;
            fill_rows(std::vector{task}, 16, value, context());
            target.for_each([&](auto b, auto r, auto h, auto e) {
              const bool filled = r < task.row_count && h < task.head_count;
              const double got = target.get(b, r, h, e);
              ASSERT_EQ(got, filled ? value : 2.0);
              ASSERT_EQ(std::signbit(got), filled && std::signbit(value));
            });
            EXPECT_TRUE(target.gaps_intact());
          }
        }
      }
    }
  }
}

TEST_P(RowwiseTest, CopyKeepsNanBitsOfTheSameType) {
  Tensor source = random_tensor(DType::float16, 1, rows_, 1, 5, false, 1);
  source.set(0, 0, 0, 2, std::nan(""));
  Tensor target = source;
  target.fill(0.0);
  copy_rows(std::vector{task_of(source, {operand(source, DType::float16), operand(target, DType::float16)})}, 5, context());
  EXPECT_EQ(source.bytes(), target.bytes());
}

struct State {
  Tensor m, l, acc;
  State(std::int64_t rows, std::int64_t heads, std::int64_t width, std::uint64_t seed)
      : m(random_tensor(DType::float32, 2, rows, heads, 1, false, seed)),
        l(random_tensor(DType::float32, 2, rows, heads, 1, true, seed + 1)),
        acc(random_tensor(DType::float32, 2, rows, heads, width, false, seed + 2)) {
    l.for_each([&](auto b, auto r, auto h, auto e) { l.set(b, r, h, e, 1.0 + std::abs(l.get(b, r, h, e))); });
  }
  // Every third row of the state is the identity.
  void empty_some(std::int64_t residue) {
    m.for_each([&](auto b, auto r, auto h, auto) {
      if ((r + h) % 3 != residue) return;
      m.set(b, r, h, 0, -kInfinity), l.set(b, r, h, 0, 0.0);
      for (std::int64_t e = 0; e < acc.width(); ++e) acc.set(b, r, h, e, 0.0);
    });
  }
};

TEST_P(RowwiseTest, MergeRows) {
  for (const DType dtype : kAllTypes) {
    State state(rows_, 3, 9, 10);
    state.empty_some(0);
    const State before = state;
    Tensor o = random_tensor(dtype, 2, rows_, 3, 9, false, 20);
    Tensor lse = random_tensor(DType::float32, 2, rows_, 3, 1, false, 21);
    lse.for_each([&](auto b, auto r, auto h, auto) {
      if ((r + 2 * h) % 4 != 0) return;
      lse.set(b, r, h, 0, -kInfinity);  // the identity: o is never looked at
      o.set(b, r, h, 3, std::nan(""));
    });
    merge_rows(
        std::vector{task_of(o, {operand(o, dtype), operand(lse), operand(state.m), operand(state.l), operand(state.acc)})}, 9,
        context());
    o.for_each([&](auto b, auto r, auto h, auto e) {
      const double m0 = before.m.get(b, r, h, 0), l0 = before.l.get(b, r, h, 0), m1 = lse.get(b, r, h, 0);
      if (m1 == -kInfinity) {
        ASSERT_EQ(state.m.get(b, r, h, 0), m0);
        ASSERT_EQ(state.l.get(b, r, h, 0), l0);
        ASSERT_EQ(state.acc.get(b, r, h, e), before.acc.get(b, r, h, e));
        return;
      }
      const double m = std::max(m0, m1);
      const double keep = m0 == -kInfinity ? 0.0 : std::exp(m0 - m);
      ASSERT_EQ(state.m.get(b, r, h, 0), m);
      ASSERT_NEAR(state.l.get(b, r, h, 0), l0 * keep + std::exp(m1 - m), 1e-6 * (1 + l0));
      ASSERT_NEAR(state.acc.get(b, r, h, e), before.acc.get(b, r, h, e) * keep + std::exp(m1 - m) * o.get(b, r, h, e), 1e-5);
    });
    EXPECT_TRUE(state.acc.gaps_intact() && state.m.gaps_intact() && state.l.gaps_intact());
  }
}

TEST_P(RowwiseTest, MergeStates) {
  State source(rows_, 3, 9, 30), target(rows_, 3, 9, 40);
  source.empty_some(0);
  target.empty_some(1);
  const State before = target;
  merge_states(std::vector{task_of(source.acc, {operand(source.m), operand(source.l), operand(source.acc), operand(target.m),
                                                operand(target.l), operand(target.acc)})},
               9, context());
  source.acc.for_each([&](auto b, auto r, auto h, auto e) {
    const double ms = source.m.get(b, r, h, 0), mt = before.m.get(b, r, h, 0), m = std::max(ms, mt);
    const double take = ms == -kInfinity ? 0.0 : std::exp(ms - m), keep = mt == -kInfinity ? 0.0 : std::exp(mt - m);
    ASSERT_EQ(target.m.get(b, r, h, 0), m);
    ASSERT_NEAR(target.l.get(b, r, h, 0), before.l.get(b, r, h, 0) * keep + source.l.get(b, r, h, 0) * take, 1e-5);
    ASSERT_NEAR(target.acc.get(b, r, h, e), before.acc.get(b, r, h, e) * keep + source.acc.get(b, r, h, e) * take, 1e-5);
  });
}

TEST_P(RowwiseTest, FinalizeWithAndWithoutSinks) {
  const std::vector<float> sinks{0.3F, -2.0F, 5.0F, 9.0F, -1e30F, -INFINITY, 4.0F};
  for (const DType dtype : kAllTypes) {
    for (const bool with_sinks : {false, true}) {
      State state(rows_, 3, 9, 50);
      state.empty_some(0);
      Tensor o = random_tensor(dtype, 2, rows_, 3, 9, true, 60);
      Tensor lse = random_tensor(DType::float32, 2, rows_, 3, 1, true, 61);
      Tensor o32 = random_tensor(DType::float32, 2, rows_, 3, 9, false, 62);
      RowTask task =
          task_of(o, {operand(state.m), operand(state.l), operand(state.acc), operand(o, dtype), operand(lse), operand(o32)});
      task.head_first = 1, task.head_step = 2;  // heads 1, 3, 5
      finalize_rows(std::vector{task}, 9, 0.5F, with_sinks ? sinks.data() : nullptr, context());
      o.for_each([&](auto b, auto r, auto h, auto e) {
        const double m = state.m.get(b, r, h, 0), l = state.l.get(b, r, h, 0);
        const double sink = with_sinks ? sinks[static_cast<std::size_t>(1 + 2 * h)] : -kInfinity;
        const double top = std::max(m, sink);
        if (top == -kInfinity) {
          ASSERT_EQ(lse.get(b, r, h, 0), -kInfinity);
          ASSERT_EQ(o.get(b, r, h, e), 0.0);
          ASSERT_EQ(o32.get(b, r, h, e), 0.0);
          return;
        }
        const double total =
            (m == -kInfinity ? 0.0 : l * std::exp(m - top)) + (sink == -kInfinity ? 0.0 : std::exp(sink - top));
        const double expected = m == -kInfinity ? 0.0 : 0.5 * state.acc.get(b, r, h, e) * std::exp(m - top) / total;
        ASSERT_NEAR(lse.get(b, r, h, 0), top + std::log(total), 2e-6 * (1 + std::abs(top)));
        ASSERT_NEAR(o32.get(b, r, h, e), expected, 1e-6);
        ASSERT_EQ(o.get(b, r, h, e), round_to(dtype, o32.get(b, r, h, e)));
      });
      EXPECT_TRUE(o.gaps_intact() && lse.gaps_intact() && o32.gaps_intact());
    }
  }
}

// Rows without keys are zeros whatever acc holds; others keep their NaN where a large sink makes the factor 0.
TEST_P(RowwiseTest, FinalizeKeepsNanUnderALargeSink) {
  const std::vector<float> sinks{200.0F, 200.0F};
  State state(rows_, 2, 9, 55);
  state.empty_some(0);
  state.acc.fill(kNan);
  Tensor o = random_tensor(DType::bfloat16, 2, rows_, 2, 9, true, 56);
  Tensor lse = random_tensor(DType::float32, 2, rows_, 2, 1, true, 57);
  finalize_rows(std::vector{task_of(
                    o, {operand(state.m), operand(state.l), operand(state.acc), operand(o, DType::bfloat16), operand(lse)})},
                9, 1.0F, sinks.data(), context());
  o.for_each([&](auto b, auto r, auto h, auto e) {
    ASSERT_EQ(lse.get(b, r, h, 0), 200.0);
    const double value = o.get(b, r, h, e);
    ASSERT_TRUE((r + h) % 3 == 0 ? value == 0.0 : std::isnan(value)) << value << " in row " << r << " of head " << h;
  });
}

TEST_P(RowwiseTest, FinalizeInPlace) {
  State state(rows_, 2, 9, 70);
  const State before = state;
  Tensor lse = random_tensor(DType::float32, 2, rows_, 2, 1, true, 71);
  finalize_rows(std::vector{task_of(
                    state.acc, {operand(state.m), operand(state.l), operand(state.acc), operand(state.acc), operand(lse)})},
                9, 1.0F, nullptr, context());
  state.acc.for_each([&](auto b, auto r, auto h, auto e) {
    ASSERT_NEAR(state.acc.get(b, r, h, e), before.acc.get(b, r, h, e) / before.l.get(b, r, h, 0), 1e-6);
  });
}

// (merge after finalize) = finalize after merge_states: partial results carry all there is to know.
TEST_P(RowwiseTest, PartialResultsMergeLikeStates) {
  State a(rows_, 2, 9, 80), b(rows_, 2, 9, 90);
  a.empty_some(1), b.empty_some(2);
  State joined = b;
  Tensor lse = random_tensor(DType::float32, 2, rows_, 2, 1, true, 95);
  Tensor o = random_tensor(DType::float32, 2, rows_, 2, 9, true, 96);
  const auto result = [&](State& state) {
    return std::vector{task_of(o, {operand(state.m), operand(state.l), operand(state.acc), operand(o), operand(lse)})};
  };
  finalize_rows(result(a), 9, 1.0F, nullptr, context());
  State merged = b;
  merge_rows(std::vector{task_of(o, {operand(o), operand(lse), operand(merged.m), operand(merged.l), operand(merged.acc)})}, 9,
             context());
  finalize_rows(result(merged), 9, 1.0F, nullptr, context());
  const Tensor o_merged = o, lse_merged = lse;
  merge_states(std::vector{task_of(
                   o, {operand(a.m), operand(a.l), operand(a.acc), operand(joined.m), operand(joined.l), operand(joined.acc)})},
               9, context());
  finalize_rows(result(joined), 9, 1.0F, nullptr, context());
  o.for_each([&](auto i, auto r, auto h, auto e) {
    ASSERT_NEAR(o.get(i, r, h, e), o_merged.get(i, r, h, e), 2e-6);
    if (lse.get(i, r, h, 0) == -kInfinity) {
      ASSERT_EQ(lse_merged.get(i, r, h, 0), -kInfinity);
    } else {
      ASSERT_NEAR(lse.get(i, r, h, 0), lse_merged.get(i, r, h, 0), 2e-6);
    }
  });
}

TEST_P(RowwiseTest, DeltaOverAllTypes) {
  for (const DType a : kAllTypes) {
    for (const DType b : kAllTypes) {
      for (const std::int64_t width : {1, 7, 8, 9, 64, 100}) {
        Tensor d_out = random_tensor(a, 2, rows_, 2, width, false, 100);
        Tensor o = random_tensor(b, 2, rows_, 2, width, true, 101);
        Tensor delta = random_tensor(DType::float32, 2, rows_, 2, 1, true, 102);
        delta_rows(std::vector{task_of(o, {operand(d_out, a), operand(o, b), operand(delta)})}, static_cast<int>(width),
                   context());
        delta.for_each([&](auto i, auto r, auto h, auto) {
          double sum = 0.0, size = 0.0;
          for (std::int64_t e = 0; e < width; ++e) {
            sum += d_out.get(i, r, h, e) * o.get(i, r, h, e);
            size += std::abs(d_out.get(i, r, h, e) * o.get(i, r, h, e));
          }
          ASSERT_NEAR(delta.get(i, r, h, 0), sum, 2e-6 * size);
        });
      }
    }
  }
}

TEST_P(RowwiseTest, DeltaSubtractsDlse) {
  Tensor d_out = random_tensor(DType::float32, 2, rows_, 2, 16, false, 103);
  Tensor o = random_tensor(DType::float32, 2, rows_, 2, 16, true, 104);
  Tensor delta = random_tensor(DType::float32, 2, rows_, 2, 1, true, 105);
  Tensor dlse = random_tensor(DType::float32, 2, rows_, 2, 1, false, 106);
  delta_rows(std::vector{task_of(o, {operand(d_out), operand(o), operand(delta)})}, 16, context());
  const Tensor without = delta;
  delta_rows(std::vector{task_of(o, {operand(d_out), operand(o), operand(delta), operand(dlse)})}, 16, context());
  delta.for_each([&](auto b, auto r, auto h, auto) {
    ASSERT_EQ(delta.get(b, r, h, 0), static_cast<float>(without.get(b, r, h, 0) - dlse.get(b, r, h, 0)));
  });
}

TEST_P(RowwiseTest, SinkGradient) {
  const std::vector<float> sinks{0.3F, -2.0F, 1.0F, 0.5F};
  Tensor lse = random_tensor(DType::float32, 2, rows_, 2, 1, false, 110);
  Tensor delta = random_tensor(DType::float32, 2, rows_, 2, 1, true, 111);
  lse.set(0, 0, 1, 0, -kInfinity);
  std::vector<double> gradient{7.0, 7.0, 7.0, 7.0}, expected = gradient;
  RowTask task = task_of(lse, {operand(lse), operand(delta)});
  task.head_first = 1, task.head_step = 2;
  sink_gradient(std::vector{task}, sinks.data(), gradient.data(), context());
  lse.for_each([&](auto b, auto r, auto h, auto) {
    const auto head = static_cast<std::size_t>(1 + 2 * h);
    if (lse.get(b, r, h, 0) == -kInfinity) return;
    expected[head] -= std::exp(sinks[head] - lse.get(b, r, h, 0)) * delta.get(b, r, h, 0);
  });
  for (std::size_t head = 0; head < 4; ++head)
    EXPECT_NEAR(gradient[head], expected[head], 1e-9 * (1 + std::abs(expected[head])));
}

// Other ranks must see that this one lives: some forty milliseconds of one head.
TEST_P(RowwiseTest, SinkGradientShowsProgress) {
  float lse = 0.5F, delta = 0.25F;
  RowTask task;
  task.batch_count = task.head_count = 1, task.row_count = rows_ * 4000;  // one row, again and again
  task.operands[0] = {&lse, DType::float32, 0, 0, 0}, task.operands[1] = {&delta, DType::float32, 0, 0, 0};
  const float sink = 0.0F;
  double gradient = 0.0;
  int calls = 0;
  const auto count = [&] { ++calls; };
  sink_gradient(std::vector{task}, &sink, &gradient, {pool_, nullptr, FunctionRef<void()>(count)});
  EXPECT_NEAR(gradient, -std::exp(-0.5) * 0.25 * static_cast<double>(task.row_count), 1e-3);
  EXPECT_GE(calls, rows_ > 1000 ? 2 : 0);
}

TEST_P(RowwiseTest, TasksOnTheSameRowsRunInOrder) {
  Tensor source = random_tensor(DType::float32, 2, rows_, 3, 8, false, 120);
  Tensor target = random_tensor(DType::bfloat16, 2, rows_, 3, 8, false, 121);
  const Tensor before = target;
  const RowTask task = task_of(source, {operand(source), operand(target, DType::bfloat16)});
  add_rows(std::vector{task, task, task}, 8, context());
  target.for_each([&](auto b, auto r, auto h, auto e) {
    double expected = before.get(b, r, h, e);
    for (int i = 0; i < 3; ++i) expected = round_to(DType::bfloat16, static_cast<float>(expected + source.get(b, r, h, e)));
    ASSERT_NEAR(target.get(b, r, h, e), expected, 0.01 * std::abs(expected));
  });
}

TEST_P(RowwiseTest, NothingToDo) {
  RowTask empty;
  copy_rows(std::vector{empty}, 4, context());
  copy_rows({}, 4, context());
  sink_gradient(std::vector{empty}, nullptr, nullptr, context());
}

INSTANTIATE_TEST_SUITE_P(ThreadsAndRows, RowwiseTest,
                         ::testing::Combine(::testing::Values(1, 3), ::testing::Values<std::int64_t>(5, 1500)));

}  // namespace
}  // namespace ringspan::kernels::testing
