// From a shape to the tile policy it runs with. Pure.
#pragma once

#include <algorithm>
#include <limits>

#include "cuda/arguments.h"
#include "cuda/attend_warpgroup_tiles.h"
#include "cuda/gradient.h"
#include "cuda/gradient_warpgroup_tiles.h"
#include "cuda/schedule.h"
#include "cuda/tile_policy.h"
#include "kernels/attend.h"
#include "kernels/dropout.h"

namespace ringspan::cuda {

// Calls function(forward policy, backward policy) with those of the shape.
template <typename Function>
auto with_policies(const kernels::AttendShape& shape, Function&& function) {
  const int dim = padded_dim(shape.head_dim, shape.head_dim_v);
  const auto with_dim = [&]<DType kType>() {
    if (dim == 64) return function(TileForward<kType, 64>{}, TileBackward<kType, 64>{});
    if (dim == 128) return function(TileForward<kType, 128>{}, TileBackward<kType, 128>{});
    return function(TileForward<kType, 256>{}, TileBackward<kType, 256>{});
  };
  if (shape.dtype == DType::bfloat16) return with_dim.template operator()<DType::bfloat16>();
  if (shape.dtype == DType::float16) return with_dim.template operator()<DType::float16>();
  return with_dim.template operator()<DType::float32>();
}

inline bool is_supported(const kernels::AttendShape& shape) {
  return shape.head_dim >= 1 && shape.head_dim_v >= 1 && padded_dim(shape.head_dim, shape.head_dim_v) != 0 && shape.group >= 1;
}

// As with_policies(), of shapes that warpgroups_support().
template <DType kType, typename Function>
auto with_warpgroup_policies_of(const kernels::AttendShape& shape, Function&& function) {
  const bool small = padded_dim(shape.head_dim, shape.head_dim_v) == 64;
  const auto with_options = [&]<bool kOptions>() {
    if (small) return function(WarpgroupForward<kType, 64, kOptions>{}, WarpgroupBackward<kType, 64, kOptions>{});
    return function(WarpgroupForward<kType, 128, kOptions>{}, WarpgroupBackward<kType, 128, kOptions>{});
  };
  if (shape.softcap || shape.alibi || shape.dropout) return with_options.template operator()<true>();
  return with_options.template operator()<false>();
}
template <typename Function>
auto with_warpgroup_policies(const kernels::AttendShape& shape, Function&& function) {
  if (shape.dtype == DType::bfloat16) return with_warpgroup_policies_of<DType::bfloat16>(shape, function);
  return with_warpgroup_policies_of<DType::float16>(shape, function);
}

// What a shape runs with where `named` is asked for: another shape than warpgroups have goes to mma.
inline TileKernel tile_kernel(TileKernel named, const kernels::AttendShape& shape) {
  return named == TileKernel::wgmma && warpgroups_support(shape) ? TileKernel::wgmma : TileKernel::mma;
}

inline void set_params(AttendArguments& arguments, const kernels::AttendParams& params) {
  arguments.params = params;
  if (params.shape.dropout) {
    arguments.dropout_threshold = kernels::dropout_threshold(params.dropout);
    arguments.keep = 1.0F / (1.0F - params.dropout);
  }
  constexpr float kMost = std::numeric_limits<float>::max();  // inf times a score of 0 would be NaN
  if (params.shape.softcap) arguments.softcap_scale = std::clamp(params.scale / params.softcap, -kMost, kMost);
  const bool options = params.shape.softcap || params.shape.alibi || params.shape.dropout;
  if (!options && params.scale > 0x1p-40F && params.scale <= 1.0F) arguments.score_unit = params.scale;
  arguments.inverse_score_unit = 1.0F / arguments.score_unit;
  arguments.exponent_unit = arguments.score_unit * kLog2E;
}

// What the host has to know of the policies: rows of a block, its shared memory in bytes, whether dk and dv come from one pass.
struct TileSizesOfBlock {
  int forward_rows, backward_rows, forward_bytes, backward_bytes;
  bool fuses_key_gradients;
  int rows(Owner owner) const { return owner == Owner::state ? forward_rows : backward_rows; }
};
inline TileSizesOfBlock tile_sizes(TileKernel kernel, const kernels::AttendShape& shape) {
  if (kernel == TileKernel::wgmma) {
    return with_warpgroup_policies(shape, [](auto forward, auto backward) {
      return TileSizesOfBlock{forward.kBlockRows, backward.kBlockRows, AttendTiles<decltype(forward)>::kBytes,
                              GradientTiles<decltype(backward)>::kBytes, true};
    });
  }
  return with_policies(shape, [](auto forward, auto backward) {
    return TileSizesOfBlock{forward.kBlockRows, backward.kBlockRows, forward.kBytes, backward.kBytes,
                            backward.kFuseKeyGradients};
  });
}

}  // namespace ringspan::cuda
