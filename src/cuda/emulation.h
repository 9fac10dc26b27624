// The kernels of this folder on a CPU: the same block programs, run by EmulatedMachine. For tests and for the emulated device;
// some hundred times slower than the kernels of src/kernels. Allocates.
#pragma once

#include "base/thread_pool.h"
#include "cuda/arguments.h"
#include "cuda/gradient.h"
#include "kernels/attend.h"

namespace ringspan::cuda {

inline constexpr std::int64_t kEmulatedResidents = 4;  // as many as a small device has multiprocessors

void emulate_attend(const AttendArguments& arguments, std::int64_t blocks, ThreadPool& pool, FunctionRef<void()> progress);
void emulate_gradient(Gradient gradient, const AttendArguments& arguments, std::int64_t blocks, ThreadPool& pool,
                      FunctionRef<void()> progress);

void emulate_rows(const RowArguments& arguments, std::int64_t blocks);
void emulate_sink_gradient(const SinkArguments& arguments);
void emulate_sum_sinks(const SinkArguments& arguments);

// As AttendKernels of the contract, named attend_bf16_cuda and so on: schedule, then every wave.
std::span<const kernels::AttendKernel> emulated_attend_kernels();
std::span<const kernels::AttendKernel> emulated_attend_backward_kernels();

}  // namespace ringspan::cuda
