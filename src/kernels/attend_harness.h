// For tests: runs a kernel of the list on a world with poisoned, guarded scratch, and draws random cases.
#pragma once

#include <gtest/gtest.h>

#include <cstddef>
#include <cstdint>
#include <cstring>
#include <ostream>
#include <random>
#include <string>
#include <vector>

#include "kernels/attend_dense.h"
#include "kernels/attend_world.h"

// The lists that attend_test.cc, attend_results_test.cc and attend_gradient_test.cc test: a program that includes these files
// may name others before.
#if !defined(RINGSPAN_TEST_ATTEND_KERNELS)
#define RINGSPAN_TEST_ATTEND_KERNELS attend_kernels()
#endif
#if !defined(RINGSPAN_TEST_ATTEND_BACKWARD_KERNELS)
#define RINGSPAN_TEST_ATTEND_BACKWARD_KERNELS attend_backward_kernels()
#endif

namespace ringspan::kernels::testing {

inline DType dtype_of(const AttendKernel& kernel) {
  if (kernel.name.find("_bf16_") != std::string_view::npos) return DType::bfloat16;
  return kernel.name.find("_f16_") != std::string_view::npos ? DType::float16 : DType::float32;
}

// Scratch of exactly the size a kernel asked for, aligned to 64, full of NaN, between two guards.
class Scratch {
 public:
  explicit Scratch(std::int64_t bytes)
      : bytes_(static_cast<std::size_t>(bytes)), memory_(bytes_ + 2 * kGuard + 64, std::byte{0xff}) {
    auto address = reinterpret_cast<std::uintptr_t>(memory_.data()) + kGuard;
    data_ = reinterpret_cast<std::byte*>((address + 63) / 64 * 64);
    std::memset(data_ - kGuard, 0xa5, kGuard);
    std::memset(data_ + bytes_, 0xa5, kGuard);
  }
  std::byte* data() { return data_; }
  bool intact() const {
    for (std::size_t i = 1; i <= kGuard; ++i) {
      if (*(data_ - i) != std::byte{0xa5} || data_[bytes_ + i - 1] != std::byte{0xa5}) return false;
    }
    return true;
  }

 private:
  static constexpr std::size_t kGuard = 256;
  std::size_t bytes_;
  std::vector<std::byte> memory_;
  std::byte* data_ = nullptr;
};

inline void run_kernel(
    const AttendKernel& kernel, World& world, const std::vector<Part>& parts, int threads = 1,
    FunctionRef<void(AttendTask&)> change = [](AttendTask&) {}) {
  const AttendParams params = world.params(threads);
  ASSERT_TRUE(kernel.supports(params.shape)) << kernel.name;
  ThreadPool pool(threads);
  Scratch scratch(kernel.scratch_bytes(params.shape));
  const auto progress = [] {};
  std::vector<AttendTask> tasks = world.tasks(parts);
  for (AttendTask& task : tasks) change(task);
  kernel.run(params, tasks, Context{pool, scratch.data(), progress});
  EXPECT_TRUE(scratch.intact()) << kernel.name << " wrote outside its scratch";
  EXPECT_TRUE(world.output_gaps_intact()) << kernel.name << " wrote between rows";
}

inline void set_final_rows(World& world, const DenseResult& truth) {
  world.lse.for_each([&](auto b, auto r, auto h, auto e) {
    world.lse.set(b, r, h, e, truth.lse(b, r, h, e));
    world.delta.set(b, r, h, e, truth.delta(b, r, h, e));
  });
}

inline void expect_forward(const World& world, const std::vector<Part>& parts, const std::string& what) {
  const DenseResult truth = exact_attention(world, parts, false);
  const DenseResult naive = naive_attention(world, parts, false);
  const auto o = [&](auto b, auto r, auto h, auto e) {
    const bool nothing = world.m.get(b, r, h, 0) == -kInfinity;
    return nothing ? 0.0 : world.acc.get(b, r, h, e) / world.l.get(b, r, h, 0) * world.spec.output_scale;
  };
  const auto lse = [&](auto b, auto r, auto h, auto) {
    const double m = world.m.get(b, r, h, 0);
    return m == -kInfinity ? m : m + std::log(world.l.get(b, r, h, 0));
  };
  Values lse_size = truth.lse;
  for (double& value : lse_size.data) value = 1.0;
  EXPECT_LE(excess_error(truth.o, naive.o, truth.o_size, truth.largest_score, world.spec.batch, o), 0.0) << what << ": o";
  EXPECT_LE(excess_error(truth.lse, naive.lse, lse_size, truth.largest_score, world.spec.batch, lse), 0.0) << what << ": lse";
}

inline void expect_backward(const World& world, const std::vector<Part>& parts, const std::string& what) {
  const DenseResult truth = exact_attention(world, parts);
  const DenseResult naive = naive_attention(world, parts);
  const auto check = [&](const Tensor& got, const Values& t, const Values& n, const Values& size, const char* name) {
    const auto get = [&](auto b, auto r, auto h, auto e) { return got.get(b, r, h, e); };
    EXPECT_LE(excess_error(t, n, size, truth.largest_score, world.spec.batch, get), 0.0) << what << ": " << name;
  };
  check(world.dq, truth.dq, naive.dq, truth.dq_size, "dq");
  check(world.dk, truth.dk, naive.dk, truth.dk_size, "dk");
  check(world.dv, truth.dv, naive.dv, truth.dv_size, "dv");
}

// Random cases: sizes around tiles, primes, everything that a task can express.
class CaseGenerator {
 public:
  explicit CaseGenerator(std::uint64_t seed) : random_(seed) {}

  template <typename T>
  T pick(std::initializer_list<T> values) {
    return *(values.begin() + static_cast<std::ptrdiff_t>(random_() % values.size()));
  }
  std::int64_t below(std::int64_t bound) { return static_cast<std::int64_t>(random_() % static_cast<std::uint64_t>(bound)); }

  Spec spec(DType dtype) {
    Spec s;
    s.dtype = dtype;
    s.batch = pick<std::int64_t>({1, 1, 2});
    s.kv_heads = pick<std::int64_t>({1, 1, 2, 3});
    s.group = pick<std::int64_t>({1, 1, 2, 3});
    s.n_q = pick<std::int64_t>({0, 1, 2, 5, 6, 7, 13, 31, 64, 95, 96, 97, 101, 129, 193});
    s.n_k = pick<std::int64_t>({0, 1, 3, 15, 16, 17, 31, 63, 64, 65, 127, 128, 129, 191, 255, 256, 257, 263});
    s.head_dim = pick({1, 2, 7, 8, 15, 16, 17, 24, 32, 40, 64, 64, 72, 96, 128});
    s.head_dim_v = pick({0, 0, 1, 5, 16, 33, 64, 80});
    if (s.head_dim_v == 0) s.head_dim_v = s.head_dim;
    s.q_step = pick<std::int64_t>({1, 1, 1, 2, 3, 8});
    s.k_step = pick<std::int64_t>({1, 1, 1, 2, 3, 8});
    s.q_first = pick<std::int64_t>({0, 0, 5, 100, std::int64_t{1} << 33});
    s.k_first = s.q_first == 0 || s.q_first > 1000 ? s.q_first + below(9) : below(200);
    s.rows_inner = below(2) == 0;
    s.gap = pick<std::int64_t>({1, 3, 16});
    s.magnitude = pick({0.1, 1.0, 1.0, 3.0});
    if (below(6) == 0) s.softcap = pick({1.5F, 20.0F});
    if (below(6) == 0) s.alibi_slope = pick({0.05F, 0.5F});
    if (below(6) == 0) s.dropout = pick({0.1F, 0.7F});
    if (below(6) == 0) s.output_scale = 0.25F;
    if (below(8) == 0) s.scale = -0.3F;
    s.diagonal = below(7) - 3;
    s.state = static_cast<int>(below(3));
    s.seed = random_();
    return s;
  }

  // One to four parts. Their q rows, k rows and heads are sub-progressions of the world's.
  std::vector<Part> parts(const Spec& s) {
    std::vector<Part> list(static_cast<std::size_t>(1 + below(4)));
    for (Part& part : list) {
      part.batch_first = below(s.batch);
      part.batch_count = 1 + below(s.batch - part.batch_first);
      part.head_step = pick<std::int64_t>({1, 1, 2});
      part.head_first = below(s.heads());
      part.head_count = 1 + below((s.heads() - 1 - part.head_first) / part.head_step + 1);
      if (below(2) == 0) part.head_first = 0, part.head_step = 1, part.head_count = s.heads();
      rows(s.n_q, part.q_row, part.q_stride, part.q_count);
      rows(s.n_k, part.k_row, part.k_stride, part.k_count);
      band(s, part);
    }
    return list;
  }

 private:
  void rows(std::int64_t n, std::int64_t& first, std::int64_t& stride, std::int64_t& count) {
    first = 0, stride = 1, count = n;
    if (n == 0 || below(2) == 0) return;
    first = below(n);
    stride = pick<std::int64_t>({1, 1, 2, 3, 4});
    count = (n - 1 - first) / stride + 1;
    if (below(3) == 0) count = below(count + 1);
  }
  void band(const Spec& s, Part& part) {
    const std::int64_t shift = s.k_first - s.q_first;
    const std::int64_t reach = std::max<std::int64_t>(1, std::max(s.n_q * s.q_step, s.n_k * s.k_step));
    switch (below(7)) {
      case 0:
        return;
      case 1:
        part.hi = shift;
        return;
      case 2:
        part.lo = shift;
        return;
      case 3:
        part.hi = shift + below(2 * reach) - reach;
        return;
      case 4:
        part.lo = shift + below(2 * reach) - reach, part.hi = part.lo + below(12);
        return;
      case 5:
        part.lo = part.hi = shift;
        return;
      default:
        part.lo = 5, part.hi = 3;
        return;  // empty
    }
  }
  std::mt19937_64 random_;
};

// Random cases per kernel; fewer where every access is instrumented.
#if defined(__SANITIZE_THREAD__) || defined(__SANITIZE_ADDRESS__)
inline constexpr std::uint64_t kRandomCases = 12;
#else
inline constexpr std::uint64_t kRandomCases = 60;
#endif

// Kernels of a list that run on this machine, for INSTANTIATE_TEST_SUITE_P.
inline std::vector<AttendKernel> runnable(std::span<const AttendKernel> kernels) {
  std::vector<AttendKernel> list;
  for (const AttendKernel& kernel : kernels) {
    AttendShape shape;
    shape.dtype = dtype_of(kernel), shape.head_dim = shape.head_dim_v = 64;
    if (kernel.supports(shape)) list.push_back(kernel);
  }
  return list;
}
inline std::string kernel_name(const ::testing::TestParamInfo<AttendKernel>& info) { return std::string(info.param.name); }

// Of each kernel of such a list.
class KernelTest : public ::testing::TestWithParam<AttendKernel> {
 protected:
  const AttendKernel& kernel() const { return GetParam(); }
  DType dtype() const { return dtype_of(GetParam()); }
  Spec spec(std::int64_t n_q, std::int64_t n_k, int head_dim = 64) const {
    Spec s;
    s.dtype = dtype(), s.n_q = n_q, s.n_k = n_k, s.head_dim = s.head_dim_v = head_dim;
    return s;
  }
};

}  // namespace ringspan::kernels::testing

namespace ringspan::kernels {
inline void PrintTo(const AttendKernel& kernel, std::ostream* out) { *out << kernel.name; }
}  // namespace ringspan::kernels
