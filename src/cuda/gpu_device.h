// GpuDevice: the executor's Device over a Runtime: selects tile policies, makes schedules, brings tasks to the device.
#pragma once

#include <array>
#include <map>
#include <memory>
#include <string>
#include <string_view>

#include "cuda/runtime.h"
#include "cuda/select.h"
#include "cuda/task_lists.h"
#include "exec/device.h"

namespace ringspan::cuda {

class GpuDevice final : public internal::Device {
 public:
  explicit GpuDevice(std::unique_ptr<Runtime> runtime);

  std::string name() const override { return runtime_->name(); }
  bool holds(const void* data) const override { return runtime_->holds(data); }
  std::byte* allocate(std::int64_t bytes) override { return runtime_->allocate(bytes); }
  void release(std::byte* data) noexcept override { runtime_->release(data); }
  std::byte* allocate_host(std::int64_t bytes) override { return runtime_->allocate_host(bytes); }
  void release_host(std::byte* data) noexcept override { runtime_->release_host(data); }
  void copy(void* to, const void* from, std::int64_t bytes) override { runtime_->copy(to, from, bytes); }

  bool holds_pinned(const void* data) const override { return runtime_->holds_pinned(data); }
  void begin_copies() override { runtime_->copies_wait(); }
  void copy_rows(std::span<const kernels::RowTask> tasks, int width) override;
  void end_copies() override { runtime_->wait_for_copies(); }

  void name_kernels(std::string_view attend, std::string_view attend_backward) override;
  std::string_view own_kernel(const kernels::AttendShape& shape) const override {
    return runtime_->prefers_warpgroups() && tile_kernel(TileKernel::wgmma, shape) == TileKernel::wgmma ? "wgmma" : "mma";
  }
  void check_supported(const kernels::AttendShape& shape, bool backward, std::int64_t most_rows) const override;
  void reserve(std::int64_t task_list_bytes) override { lists_.reserve(task_list_bytes); }
  void begin_pass() override { lists_.begin_pass(); }

  internal::FusedAnswer ask_fused(const kernels::AttendParams& params, std::span<const internal::FusedTask> tasks,
                                  internal::FusedMode mode) override;
  void attend_fused(const kernels::AttendParams& params, std::span<const internal::FusedTask> tasks, internal::FusedMode mode,
                    std::byte* workspace) override;

  void attend(const kernels::AttendParams& params, const internal::AttendCall& call) override;
  void attend_backward(const kernels::AttendParams& params, const internal::AttendCall& call) override;
  void rows(const internal::Launch& launch, std::span<const kernels::RowTask> tasks, const float* sinks) override;
  void sink_gradient(std::span<const kernels::RowTask> tasks, const float* sinks, double* gradient, int heads) override;
  void sum_sinks(const double* gradients, int heads, int ranks, float* total) override;

  Event record() override { return runtime_->record(); }
  bool is_complete(Event event) override { return runtime_->is_complete(event); }
  void wait(Event event, FunctionRef<void()> progress) override { runtime_->wait(event, progress); }
  void* stream() override { return runtime_->stream(); }
  void finish() noexcept override { runtime_->finish(); }

 private:
  void for_waves(TileKernel named, const kernels::AttendParams& params, const internal::AttendCall& call, Owner owner,
                 FunctionRef<void(const AttendArguments&, std::int64_t)> launch);
  FusedAttention& fused(std::string_view library);
  void copy_lse(const FusedCall& call, std::byte* to);

  std::unique_ptr<Runtime> runtime_;
  TileKernel attend_ = TileKernel::mma, attend_backward_ = TileKernel::mma;  // of shapes that it has, others go to mma
  std::array<bool, 2> names_warpgroups_{};                                   // forward, backward
  TaskLists lists_;
  // By name, made when they are first asked; they go before the runtime.
  std::map<std::string, std::unique_ptr<FusedAttention>, std::less<>> fused_;
};

}  // namespace ringspan::cuda
