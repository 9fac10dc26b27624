// From a shape to the tile policy it runs with. Pure.
#pragma once

#include "cuda/arguments.h"
#include "cuda/gradient.h"
#include "cuda/tile_policy.h"
#include "kernels/attend.h"

namespace ringspan::cuda {

// Calls function(TilePolicy<...>{}) with the policy of the shape.
template <typename Function>
auto with_policy(const kernels::AttendShape& shape, Function&& function) {
  const int dim = padded_dim(shape.head_dim, shape.head_dim_v);
  const auto with_dim = [&]<DType kType>() {
    if (dim == 64) return function(TilePolicy<kType, 64>{});
    if (dim == 128) return function(TilePolicy<kType, 128>{});
    return function(TilePolicy<kType, 256>{});
  };
  if (shape.dtype == DType::bfloat16) return with_dim.template operator()<DType::bfloat16>();
  if (shape.dtype == DType::float16) return with_dim.template operator()<DType::float16>();
  return with_dim.template operator()<DType::float32>();
}

inline bool is_supported(const kernels::AttendShape& shape) {
  return shape.head_dim >= 1 && shape.head_dim_v >= 1 && padded_dim(shape.head_dim, shape.head_dim_v) != 0 && shape.group >= 1;
}

// As with_policy(), of shapes that warpgroups_support().
template <typename Function>
auto with_warpgroup_policy(const kernels::AttendShape& shape, Function&& function) {
  const bool small = padded_dim(shape.head_dim, shape.head_dim_v) == 64;
  const auto with_dim = [&]<DType kType>() {
    return small ? function(WarpgroupPolicy<kType, 64>{}) : function(WarpgroupPolicy<kType, 128>{});
  };
  if (shape.dtype == DType::bfloat16) return with_dim.template operator()<DType::bfloat16>();
  return with_dim.template operator()<DType::float16>();
}

// What a shape runs with where `named` is asked for: another shape than warpgroups have goes to mma.
inline TileKernel forward_kernel(TileKernel named, const kernels::AttendShape& shape) {
  return named == TileKernel::wgmma && warpgroups_support(shape) ? TileKernel::wgmma : TileKernel::mma;
}

// Rows of a block and its shared memory in bytes, and whether dk and dv come from one pass.
inline int tile_rows(TileKernel kernel, const kernels::AttendShape& shape) {
  const auto rows = [](auto policy) { return decltype(policy)::kRows; };
  return kernel == TileKernel::wgmma ? with_warpgroup_policy(shape, rows) : with_policy(shape, rows);
}
inline int forward_bytes(TileKernel kernel, const kernels::AttendShape& shape) {
  const auto bytes = [](auto policy) { return decltype(policy)::kForwardBytes; };
  return kernel == TileKernel::wgmma ? with_warpgroup_policy(shape, bytes) : with_policy(shape, bytes);
}
inline int backward_bytes(const kernels::AttendShape& shape) {
  return with_policy(shape, [](auto policy) { return decltype(policy)::kBackwardBytes; });
}
inline bool fuses_key_gradients(const kernels::AttendShape& shape) {
  return with_policy(shape, [](auto policy) { return decltype(policy)::kFuseKeyGradients; });
}

}  // namespace ringspan::cuda
