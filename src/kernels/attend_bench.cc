// Kernel by kernel: GFLOP/s of visible pairs on one thread, for the structures that tasks have. `bench/cpu/compare` measures
// whole calls against others.
#include <benchmark/benchmark.h>

#include <cmath>
#include <cstdint>
#include <random>
#include <string>
#include <vector>

#include "base/float16.h"
#include "kernels/attend.h"
#include "kernels/task_view.h"

namespace ringspan::kernels {
namespace {

constexpr std::int64_t kHeads = 4;

// A dense (tokens, heads, dim) problem of one batch item and the lists of tasks over it.
class Fixture {
 public:
  Fixture(DType dtype, std::int64_t tokens, int dim) : dtype_(dtype), tokens_(tokens), dim_(dim) {
    const std::int64_t elements = tokens * kHeads * dim;
    std::mt19937 random(1);
    std::normal_distribution<float> normal;
    for (auto* operand : {&q_, &k_, &v_, &d_out_}) {
      operand->resize(static_cast<std::size_t>(elements * size_of(dtype)));
      for (std::int64_t i = 0; i < elements; ++i) put(operand->data(), i, normal(random));
    }
    for (auto* result : {&acc_, &dq_, &dk_, &dv_}) result->assign(static_cast<std::size_t>(elements), 0.0F);
    for (auto* result : {&m_, &l_, &lse_, &delta_}) result->assign(static_cast<std::size_t>(tokens * kHeads), 0.0F);
    reset();
    for (float& value : lse_) value = std::log(static_cast<float>(tokens)) + 1.0F;
  }

  void reset() {
    for (float& value : m_) value = -INFINITY;
    for (float& value : l_) value = 0.0F;
    for (float& value : acc_) value = 0.0F;
  }

  // Queries and keys first, first + step, ... (count of each).
  AttendTask task(std::int64_t q_first, std::int64_t k_first, std::int64_t step, std::int64_t q_count, std::int64_t k_count,
                  std::int64_t lo, std::int64_t hi) {
    AttendTask t;
    t.head_count = kHeads;
    t.q_first = q_first, t.k_first = k_first, t.q_step = t.k_step = step, t.q_count = q_count, t.k_count = k_count, t.lo = lo,
    t.hi = hi;
    const auto wide = [&](auto& store, std::int64_t first) {
      const std::int64_t unit = static_cast<std::int64_t>(store.size()) / (tokens_ * kHeads);
      return Rows{store.data() + first * kHeads * unit, 0, step * kHeads * dim_, dim_};
    };
    const auto narrow = [&](std::vector<float>& store) { return Rows{store.data() + q_first * kHeads, 0, step * kHeads, 1}; };
    const auto keys = [](Rows rows) { return KeyRows{rows.data, rows.batch_stride, rows.row_stride, rows.head_stride}; };
    t.q = wide(q_, q_first), t.k = keys(wide(k_, k_first)), t.v = keys(wide(v_, k_first)), t.d_out = wide(d_out_, q_first);
    t.m = narrow(m_), t.l = narrow(l_), t.lse = narrow(lse_), t.delta = narrow(delta_);
    t.acc = wide(acc_, q_first), t.dq = wide(dq_, q_first), t.dk = keys(wide(dk_, k_first)), t.dv = keys(wide(dv_, k_first));
    return t;
  }

  std::vector<AttendTask> tasks(const std::string& structure) {
    const std::int64_t far = std::int64_t{1} << 60;
    if (structure == "full") return {task(0, 0, 1, tokens_, tokens_, -far, far)};
    if (structure == "causal") return {task(0, 0, 1, tokens_, tokens_, -far, 0)};
    if (structure == "window511") return {task(0, 0, 1, tokens_, tokens_, -511, 0)};
    if (structure == "decode") return {task(tokens_ - 1, 0, 1, 1, tokens_, -far, far)};
    std::vector<AttendTask> list;
    if (structure == "buckets256") {  // what a ring brings: a call for each
      for (std::int64_t k = 0; k < tokens_; k += 256) list.push_back(task(0, k, 1, tokens_, 256, -far, far));
    } else if (structure == "dilated4") {
      for (std::int64_t r = 0; r < 4; ++r) list.push_back(task(r, r, 4, tokens_ / 4, tokens_ / 4, -far, far));
    } else {  // documents of 16 to 256 tokens
      for (std::int64_t first = 0, length = 16; first < tokens_; first += length, length = length * 5 % 241 + 16) {
        const std::int64_t count = std::min(length, tokens_ - first);
        list.push_back(task(first, first, 1, count, count, -far, 0));
      }
    }
    return list;
  }

  double flops(const std::vector<AttendTask>& list, bool backward) const {
    double pairs = 0;
    for (const AttendTask& t : list) {
      for (std::int64_t row = 0; row < t.q_count; ++row) pairs += static_cast<double>(keys_of_row(t, row).size());
    }
    return pairs * kHeads * dim_ * 2 * (backward ? 5 : 2);
  }

 private:
  void put(std::byte* store, std::int64_t i, float value) {
    if (dtype_ == DType::float32) {
      reinterpret_cast<float*>(store)[i] = value;
    } else {
      reinterpret_cast<std::uint16_t*>(store)[i] =
          dtype_ == DType::bfloat16 ? float_to_bfloat16(value) : float_to_float16(value);
    }
  }
  DType dtype_;
  std::int64_t tokens_;
  int dim_;
  std::vector<std::byte> q_, k_, v_, d_out_;
  std::vector<float> acc_, dq_, dk_, dv_, m_, l_, lse_, delta_;
};

void run(benchmark::State& state, const AttendKernel& kernel, DType dtype, const std::string& structure, std::int64_t tokens,
         int dim, bool backward) {
  Fixture fixture(dtype, tokens, dim);
  const std::vector<AttendTask> list = fixture.tasks(structure);
  AttendParams params;
  params.shape = {dtype, dim, dim, 1, false, false, false, 1};
  params.scale = 1.0F / std::sqrt(static_cast<float>(dim));
  ThreadPool pool(1);
  std::vector<std::byte> memory(static_cast<std::size_t>(kernel.scratch_bytes(params.shape)) + 64);
  auto* scratch = reinterpret_cast<std::byte*>((reinterpret_cast<std::uintptr_t>(memory.data()) + 63) / 64 * 64);
  const auto progress = [] {};
  for (auto _ : state) {
    if (!backward) fixture.reset();
    const std::size_t at_once = structure == "buckets256" ? 1 : list.size();
    for (std::size_t i = 0; i < list.size(); i += at_once)
      kernel.run(params, {&list[i], at_once}, Context{pool, scratch, progress});
  }
  state.counters["GFLOP/s"] =
      benchmark::Counter(fixture.flops(list, backward) / 1e9, benchmark::Counter::kIsIterationInvariantRate);
  state.counters["tasks"] = static_cast<double>(list.size());
}

void add(std::span<const AttendKernel> kernels, bool backward) {
  unsigned seen = 0;
  for (const AttendKernel& kernel : kernels) {
    const DType dtype = kernel.name.find("bf16") != std::string_view::npos   ? DType::bfloat16
                        : kernel.name.find("_f16") != std::string_view::npos ? DType::float16
                                                                             : DType::float32;
    if (!kernel.supports({dtype, 64, 64, 1, false, false, false, 1})) continue;
    // The best of its dtype on this machine; the others briefly.
    const bool best = kernel.is_default() && (seen & 1U << static_cast<int>(dtype)) == 0;
    if (best) seen |= 1U << static_cast<int>(dtype);
    for (const int dim : {64, 128}) {
      for (const char* structure : {"full", "causal", "window511", "documents", "dilated4", "buckets256", "decode"}) {
        if (!best && (dim != 64 || structure != std::string("causal"))) continue;
        const std::int64_t tokens = best ? 2048 : 256;
        const std::string name =
            std::string(kernel.name) + "/" + structure + "/n" + std::to_string(tokens) + "/d" + std::to_string(dim);
        benchmark::RegisterBenchmark(name.c_str(), [=, &kernel](benchmark::State& state) {
          run(state, kernel, dtype, structure, tokens, dim, backward);
        })->Unit(benchmark::kMillisecond);
      }
    }
  }
}

#if defined(__x86_64__)
// What the machine can do: multiply-adds of AVX-512 in twelve chains, which hide the latency.
__attribute__((target("avx512f"), noinline)) void multiply_adds(std::int64_t steps) {
  using Vector = float __attribute__((vector_size(64)));
  Vector x{}, y{}, sum[12] = {};
  x = x + 1.0001F, y = y + 0.5F;
  for (std::int64_t i = 0; i < steps; ++i) {
#pragma GCC unroll 12
    for (Vector& a : sum) __asm__ volatile("vfmadd213ps %2, %1, %0" : "+v"(a) : "v"(x), "v"(y));  // a = a x + y
  }
}

void peak(benchmark::State& state) {
  constexpr std::int64_t kSteps = 1'000'000;
  for (auto _ : state) multiply_adds(kSteps);
  state.counters["GFLOP/s"] = benchmark::Counter(24.0 * 16 * kSteps / 1e9, benchmark::Counter::kIsIterationInvariantRate);
}
#endif

const bool kRegistered = [] {
#if defined(__x86_64__)
  if (__builtin_cpu_supports("avx512f")) benchmark::RegisterBenchmark("peak_f32_avx512", peak)->Unit(benchmark::kMillisecond);
#endif
  add(attend_kernels(), false);
  add(attend_backward_kernels(), true);
  return true;
}();

}  // namespace
}  // namespace ringspan::kernels
