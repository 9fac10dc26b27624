#include "exec/choose_fused.h"

#include <fmt/format.h>

#include <algorithm>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "exec/resolve.h"
#include "plan/fuse.h"
#include "plan/kernel_choice.h"
#include "ringspan/error.h"

namespace ringspan::internal {
namespace {

// Dense tensors at an address that is as aligned as memory of a device; nothing is there.
Bindings stand_ins(const PlanData& data) {
  Bindings bindings;
  for (int index = 0; index < kCallerTensors; ++index) {
    const TensorShape shape = shape_of(data, static_cast<TensorKind>(index));
    const bool statistic = shape.width == 1 && shape.dtype == DType::float32;
    Binding& binding = bindings[static_cast<TensorKind>(index)];
    binding.data = reinterpret_cast<std::byte*>(std::uintptr_t{1} << 32);
    binding.batch_stride = shape.rows * shape.heads * shape.width;
    binding.row_stride = statistic ? 1 : shape.heads * shape.width;
    binding.head_stride = statistic ? shape.rows : shape.width;
  }
  return bindings;
}

bool keeps_anything(const Program& program) {
  return std::any_of(program.regions.begin(), program.regions.end(),
                     [](const Region& region) { return region.component == Component::saved && region.bytes > 0; });
}

class Chooser {
 public:
  Chooser(const PlanData& data, Device& device, bool deterministic, std::int64_t arena_bytes)
      : data_(data), device_(device), deterministic_(deterministic), arena_bytes_(arena_bytes) {}

  PlanData choose() {
    if (data_.options.partials == Partials::storage && !asks(Pass::forward) && !(data_.has_backward && asks(Pass::backward))) {
      throw Unsupported(
          "partials 'storage' are those of a library's fused attention, but none may compute: name one as attend_kernel or "
          "attend_backward_kernel, such as 'cudnn', or set deterministic = false");
    }
    if (data_.has_backward) choose(Pass::backward);
    choose(Pass::forward);
    // What forward kept for a backward pass of our own.
    if (data_.has_backward && is_fused(data_.forward) && !keeps_anything(data_.forward))
      std::erase_if(data_.backward.regions, is_saved);
    if (data_.has_backward && is_fused(data_.backward)) set_fused_workspace(&data_.backward, workspace_);
    return std::move(data_);
  }

 private:
  static bool is_saved(const Region& region) { return region.component == Component::saved; }
  Program& program(Pass pass) { return pass == Pass::forward ? data_.forward : data_.backward; }
  const std::string& name(Pass pass) const {
    return pass == Pass::forward ? data_.options.attend_kernel : data_.options.attend_backward_kernel;
  }
  // Whether a library may compute the pass if it can.
  bool asks(Pass pass) const { return name(pass).empty() ? !deterministic_ : !is_own_kernel(name(pass)); }

  void choose(Pass pass) {
    const bool forward = pass == Pass::forward;
    const std::string& name = this->name(pass);
    const char* const option = forward ? "attend_kernel" : "attend_backward_kernel";
    KernelChoice& choice = forward ? data_.attend : data_.attend_backward;
    const bool before = is_fused(program(pass));  // the plan of another attention
    std::string refusal;
    if (is_own_kernel(name)) {
      refusal = fmt::format("{} is '{}'", option, name);
    } else if (name.empty() && deterministic_) {
      refusal = "deterministic is true, so that every kernel is our own";
    } else {
      refusal = try_to(pass);
      if (refusal.empty()) return;
      if (!name.empty()) throw Unsupported(fmt::format("{} '{}' cannot compute this: {}", option, name, refusal));
    }
    if (before) throw Unsupported(fmt::format("the plan was made for {}, which is not taken here: {}", choice.name, refusal));
    choice.reason = "no fused attention of a library: " + refusal;
  }

  // Empty, and the program is the fused one; or why not.
  std::string try_to(Pass pass) {
    const bool forward = pass == Pass::forward;
    PlanData fused = data_;
    Program& target = forward ? fused.forward : fused.backward;
    if (!is_fused(target)) {
      FusedProgram result = fuse_whole(pass);
      if (!result.refusal.empty() && data_.options.partials == Partials::storage) result = fuse_partials(data_, pass);
      if (!result.refusal.empty()) return result.refusal;
      target = std::move(result.program);
    }
    const FusedAnswer answer = ask_fused(fused, pass, device_, deterministic_, nullptr);
    if (!answer.refusal.empty()) return answer.refusal;
    set_fused_workspace(&target, answer.workspace_bytes);
    const std::int64_t budget = data_.options.memory_budget;
    if (budget > 0 && answer.takes_own_memory)
      return fmt::format("it takes memory that is in no plan, so that nobody can keep it below memory_budget ({})", budget);
    const std::int64_t needed = Plan(std::make_shared<const PlanData>(fused)).memory_bytes(pass);
    if (budget > 0 && needed > budget) {
      return fmt::format("with its workspace of {} bytes the pass needs {}, more than memory_budget ({})",
                         answer.workspace_bytes, needed, budget);
    }
    if (arena_bytes_ > 0 && target.arena_bytes > arena_bytes_) {
      return fmt::format("with its workspace of {} bytes the pass needs an arena of {}, but one of {} is given",
                         answer.workspace_bytes, target.arena_bytes, arena_bytes_);
    }
    if (!forward) workspace_ = answer.workspace_bytes;
    data_ = std::move(fused);
    KernelChoice& choice = forward ? data_.attend : data_.attend_backward;
    choice = KernelChoice{};
    choice.name = (forward ? "attend_" : "attend_backward_") + answer.kernel;
    return {};
  }

  // One call gives each row's final results.
  FusedProgram fuse_whole(Pass pass) const {
    FusedProgram result = fuse(data_, pass);
    if (!result.refusal.empty()) return result;
    if (pass == Pass::backward) {
      copy_saved(data_.backward, result.program);
    } else if (keeps_anything(data_.forward) && !is_fused(data_.backward)) {
      result.refusal = "keep_o_float32 keeps o in float32 for a backward pass of our own, but it gives o in 16 bits";
    }
    return result;
  }

  static void copy_saved(const Program& from, Program& to) {
    std::copy_if(from.regions.begin(), from.regions.end(), std::back_inserter(to.regions), is_saved);
  }

  PlanData data_;
  Device& device_;
  bool deterministic_;
  std::int64_t arena_bytes_;
  std::int64_t workspace_ = 0;  // of the backward pass
};

}  // namespace

PlanData choose_fused(const PlanData& data, Device& device, bool deterministic, std::int64_t arena_bytes) {
  PlanData chosen = Chooser(data, device, deterministic, arena_bytes).choose();
  chosen.has_own_arena |=
      chosen.forward.arena_bytes != data.forward.arena_bytes || chosen.backward.arena_bytes != data.backward.arena_bytes;
  const std::string_view own = device.own_kernel(attend_params(chosen).shape);
  for (KernelChoice* choice : {&chosen.attend, &chosen.attend_backward}) {
    constexpr std::string_view kAny = "_cuda";  // as planned, whatever the device has
    if (choice->name.ends_with(kAny)) choice->name.replace(choice->name.size() - kAny.size() + 1, kAny.size() - 1, own);
  }
  return chosen;
}

kernels::AttendParams attend_params(const PlanData& plan) {
  const Problem& problem = plan.problem;
  kernels::AttendParams params;
  params.shape.dtype = problem.dtype;
  params.shape.head_dim = problem.head_dim;
  params.shape.head_dim_v = problem.head_dim_v;
  params.shape.group = problem.group();
  params.shape.softcap = problem.softcap != 0.0F;
  params.shape.alibi = problem.alibi;
  params.shape.dropout = problem.dropout != 0.0F;
  params.shape.threads = plan.options.threads;
  params.scale = problem.effective_scale();
  params.softcap = problem.softcap;
  params.dropout = problem.dropout;
  params.seed = problem.seed;
  params.output_scale = problem.pattern.output_scale();
  return params;
}

FusedMode fused_mode(const PlanData& plan, Pass pass, bool deterministic) {
  const bool backward = pass == Pass::backward;
  return {backward, deterministic, backward ? plan.options.attend_backward_kernel : plan.options.attend_kernel};
}

FusedAnswer ask_fused(const PlanData& data, Pass pass, Device& device, bool deterministic, const Bindings* bindings) {
  const Program& program = pass == Pass::forward ? data.forward : data.backward;
  const Bindings dense = bindings == nullptr ? stand_ins(data) : Bindings{};
  const Memory memory{&program, nullptr, bindings == nullptr ? &dense : bindings, data.problem.group()};
  const LaunchKind kind = pass == Pass::forward ? LaunchKind::fused : LaunchKind::fused_backward;
  std::vector<FusedTask> tasks;
  for (const AttendItem& item : program.attend_items) tasks.push_back(resolve_fused(memory, kind, item));
  return device.ask_fused(attend_params(data), tasks, fused_mode(data, pass, deterministic));
}

}  // namespace ringspan::internal
