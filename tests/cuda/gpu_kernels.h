// The kernels of a GPU as a list like that of the CPU, for tests: a call runs on cuda:0 and returns when it is done.
#pragma once

#include <cuda_runtime_api.h>

#include <span>
#include <vector>

#include "cuda/gpu_device.h"
#include "cuda/select.h"
#include "kernels/attend.h"
#include "kernels/reference.h"
#include "ringspan/error.h"

namespace ringspan::testing {

// One device for the whole program.
inline cuda::GpuDevice& gpu() {
  static cuda::GpuDevice device = [] { return cuda::GpuDevice(cuda::make_cuda_runtime(0, nullptr)); }();
  return device;
}

// Whether it has kernels named wgmma.
inline bool has_warpgroups() {
  try {
    gpu().name_kernels("wgmma", "wgmma");
  } catch (const Unsupported&) {
    return false;
  }
  return true;
}

inline bool has_gpu() {
  int count = 0;
  return cudaGetDeviceCount(&count) == cudaSuccess && count > 0;
}

template <bool kBackward, bool kWarpgroups>
void run_on_gpu(const kernels::AttendParams& params, std::span<const kernels::AttendTask> tasks,
                const kernels::Context& context) {
  static std::size_t reserved = 0;
  if (tasks.size() > reserved || reserved == 0) {
    reserved = tasks.size() + 64;
    gpu().wait(gpu().record(), [] {});
    gpu().reserve(internal::task_list_bytes(1, 3 * static_cast<std::int64_t>(reserved), 64));
  }
  gpu().name_kernels(kWarpgroups ? "wgmma" : "mma", kWarpgroups ? "wgmma" : "mma");
  gpu().begin_pass();
  const auto given = [&] { return tasks; };
  const auto has = [&](auto operand) { return !tasks.empty() && (tasks.front().*operand).data != nullptr; };
  const internal::AttendCall call{nullptr, nullptr, has(&kernels::AttendTask::dq), has(&kernels::AttendTask::dk), given};
  kBackward ? gpu().attend_backward(params, call) : gpu().attend(params, call);
  gpu().wait(gpu().record(), context.progress);
  context.progress();
}

template <DType kType>
bool runs_on_gpu(const kernels::AttendShape& shape) {
  return shape.dtype == kType && cuda::is_supported(shape);
}

// Empty where there is no GPU.
template <bool kBackward>
std::vector<kernels::AttendKernel> gpu_kernels() {
  if (!has_gpu()) return {};
  std::vector<kernels::AttendKernel> list;
  const auto add = [&](std::string_view name, auto supports, auto run) {
    list.push_back(
        {name, supports, kernels::reference_scratch_bytes, run, kernels::no_tile_sizes, kernels::any_keys, kBackward});
  };
  add("attend_f32_gpu", runs_on_gpu<DType::float32>, run_on_gpu<kBackward, false>);
  add("attend_bf16_gpu", runs_on_gpu<DType::bfloat16>, run_on_gpu<kBackward, false>);
  add("attend_f16_gpu", runs_on_gpu<DType::float16>, run_on_gpu<kBackward, false>);
  if (!has_warpgroups()) return list;  // shapes that they do not have run with mma
  add("attend_bf16_wgmma_gpu", runs_on_gpu<DType::bfloat16>, run_on_gpu<kBackward, true>);
  add("attend_f16_wgmma_gpu", runs_on_gpu<DType::float16>, run_on_gpu<kBackward, true>);
  return list;
}

}  // namespace ringspan::testing
