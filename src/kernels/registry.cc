// The lists of kernels and the choice among them.
#include <string>

#include "kernels/attend.h"
#include "kernels/reference.h"
#include "ringspan/error.h"

namespace ringspan::kernels {
namespace {

template <DType kType>
bool supports_reference(const AttendShape& shape) {
  return reference_supports(shape, kType);
}

constexpr AttendKernel kAttendKernels[] = {
#define RINGSPAN_KERNEL(dtype, short_name, implementation)                                                  \
  {"attend_" #short_name "_" #implementation, supports_##implementation<DType::dtype>, implementation##_scratch_bytes, \
   attend_##implementation<DType::dtype>},
#include "kernels/kernels.inc"
#undef RINGSPAN_KERNEL
};

constexpr AttendKernel kAttendBackwardKernels[] = {
#define RINGSPAN_KERNEL(dtype, short_name, implementation)                                                           \
  {"attend_backward_" #short_name "_" #implementation, supports_##implementation<DType::dtype>,                     \
   implementation##_scratch_bytes, attend_backward_##implementation<DType::dtype>},
#include "kernels/kernels.inc"
#undef RINGSPAN_KERNEL
};

std::string describe(const AttendShape& shape) {
  std::string text = std::string(to_string(shape.dtype)) + ", head_dim " + std::to_string(shape.head_dim) + ", head_dim_v " +
                     std::to_string(shape.head_dim_v) + ", group " + std::to_string(shape.group) + ", threads " +
                     std::to_string(shape.threads);
  if (shape.softcap) text += ", softcap";
  if (shape.alibi) text += ", alibi";
  if (shape.dropout) text += ", dropout";
  return text;
}

bool is_named(std::string_view kernel, std::string_view name) {
  if (kernel == name) return true;
  return kernel.size() > name.size() && kernel.ends_with(name) && kernel[kernel.size() - name.size() - 1] == '_';
}

const AttendKernel& select(std::span<const AttendKernel> kernels, const AttendShape& shape, std::string_view name) {
  bool known = name.empty();
  std::string names;
  for (const AttendKernel& kernel : kernels) {
    names += (names.empty() ? "" : ", ") + std::string(kernel.name);
    if (!name.empty() && !is_named(kernel.name, name)) continue;
    known = true;
    if (kernel.supports(shape)) return kernel;
  }
  if (!known) throw InvalidArgument("unknown kernel '" + std::string(name) + "': expected one of " + names);
  const std::string which = name.empty() ? "no kernel supports " : "kernel '" + std::string(name) + "' does not support ";
  throw Unsupported(which + describe(shape) + " on this machine");
}

}  // namespace

std::span<const AttendKernel> attend_kernels() { return kAttendKernels; }
std::span<const AttendKernel> attend_backward_kernels() { return kAttendBackwardKernels; }

const AttendKernel& select_attend(const AttendShape& shape, std::string_view name) { return select(kAttendKernels, shape, name); }

const AttendKernel& select_attend_backward(const AttendShape& shape, std::string_view name) {
  return select(kAttendBackwardKernels, shape, name);
}

}  // namespace ringspan::kernels
