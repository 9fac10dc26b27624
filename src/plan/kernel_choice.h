// Which kernel a pass runs, and with which tile. Depends on this machine's instruction set and this rank's options only. Pure.
#pragma once

#include <cstdint>
#include <string_view>

#include "ringspan/plan.h"

namespace ringspan::internal {

// Names that a kernel may be given on a device (PlanOptions::attend_kernel): of our own, of a fused attention that the program
// brings, of any library's.
inline bool is_own_kernel(std::string_view name) { return name == "own" || name == "mma" || name == "wgmma"; }
inline bool is_provided_kernel(std::string_view name) { return name == "flash_attn" || name == "flash_attn_3"; }
inline bool is_fused_kernel(std::string_view name) { return name == "cudnn" || is_provided_kernel(name); }

// The kernel that the options name, or the best for the shape, with the tile that they give, or the tuned one, or its own.
// Throws what select_attend() throws: an unknown name, a shape or a tile that the kernel does not take. On a device the
// name that is given, or one per pass, and no tile: a library's fused attention is chosen when the device is there.
KernelChoice choose_kernel(const Problem& problem, const PlanOptions& options, Pass pass);

// Keys of a task up to which that kernel of the forward pass needs no state of its rows, any number on a device; no more than
// every rank takes where ranks agreed on it.
std::int64_t keys_without_state(const Problem& problem, const PlanOptions& options);

// Whether kernels of the backward pass can write whole gradients: on a device, but where tensors lie on the host, or where
// ranks agreed that not all can.
inline bool writes_gradients(const PlanOptions& options) {
  return options.device != DeviceKind::cpu && !options.host_tensors && !options.most_overhead.gradient_sums;
}

// Whether kernels take tasks over the same rows together: ours on a device, but where ranks agreed that not all do.
inline bool groups_tasks(const PlanOptions& options) {
  return writes_gradients(options) && options.partials != Partials::storage && !options.most_overhead.ungrouped_tasks;
}

// What that kernel needs with that tile; nothing on a device.
std::int64_t kernel_scratch_bytes(const Problem& problem, const PlanOptions& options, Pass pass);

}  // namespace ringspan::internal
