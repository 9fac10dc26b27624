// From a shape to the tile policy it runs with. Pure.
#pragma once

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

// Rows of a block, and whether dk and dv come from one pass.
inline int tile_rows(const kernels::AttendShape& shape) {
  return with_policy(shape, [](auto policy) { return decltype(policy)::kRows; });
}
inline bool fuses_key_gradients(const kernels::AttendShape& shape) {
  return with_policy(shape, [](auto policy) { return decltype(policy)::kFuseKeyGradients; });
}

}  // namespace ringspan::cuda
