#include "cuda/warpgroup_probe.h"

#include "cuda/device_launch_blocks.h"
#include "cuda/device_warpgroup.h"
#include "cuda/tile_policy.h"
#include "cuda/warpgroup_tile.h"

namespace ringspan::testing {
namespace {

using namespace cuda;

template <typename P>
struct ProbeTiles {
  static constexpr int kBytes = P::kRowTileBytes + 2 * P::kColTileBytes + 16 + kSwizzleBytes;
};

template <typename M>
__device__ void dump(M& m, const unsigned char* tile, unsigned char* to, int bytes) {
  m.each([&](int thread) {
    for (int i = thread; i < bytes; i += M::kThreads) to[i] = tile[i];
  });
}

template <typename M, int kCount>
__device__ void put(M& m, typename M::template Registers<float, kCount>& c, float* to) {
  m.each([&](int thread) {
    const Lane lane = lane_of(thread);
    for (int i = 0; i < kCount; ++i) {
      to[(lane.row + i / 2 % 2 * 8) * (kCount * 2) + i / 4 * 8 + lane.column + i % 2] = c[thread][i];
    }
  });
}

template <typename P>
__global__ void __launch_bounds__(P::kThreads)
    probe(ProbeData data, const __grid_constant__ TileMaps maps, const __grid_constant__ TensorMaps tensor_maps) {
#if RINGSPAN_WARPGROUPS
  extern __shared__ __align__(16) unsigned char shared[];
  using M = HopperMachine<P::kThreads>;
  M m(&tensor_maps);
  unsigned char* const rows = shared + (0U - m.shared_address(shared)) % kSwizzleBytes;
  unsigned char* const others = rows + P::kRowTileBytes;
  unsigned char* const mapped = others + P::kColTileBytes;
  const std::uint32_t barrier = m.shared_address(mapped + P::kColTileBytes);
  if (threadIdx.x == 0) {
    M::init_barrier(barrier, P::kThreads);
    M::fence_barriers();
  }
  __syncthreads();

  copy_swizzled<P::kRows, P::kDim, std::uint16_t>(m, rows, {{data.rows, P::kDim}, 0, P::kRows, P::kDim});
  copy_swizzled<P::kCols, P::kDim, std::uint16_t>(m, others, {{data.others, P::kDim}, 0, P::kCols, P::kDim});
  m.arrive_when_copied(barrier);
  m.wait(barrier, 0);
  m.fence_async();
  m.sync();
  copy_mapped_tile<P::kCols, P::kDim>(m, mapped, maps, 0, {0, 0, 0, 0}, barrier);
  m.arrive_threads(barrier);
  m.wait(barrier, 1);
  dump(m, others, data.copied, P::kColTileBytes);
  dump(m, mapped, data.mapped, P::kColTileBytes);

  typename M::template Registers<float, P::kCols / 2> scores;
  m.fence_registers(scores);
  product_rows<P>(m, scores, m.shared_address(rows), m.shared_address(others));
  m.commit_products();
  m.template wait_products<0>(scores);
  put<M, P::kCols / 2>(m, scores, data.scores);

  typename M::template Registers<float, P::kDim / 2> sums;
  typename M::template Registers<std::uint32_t, P::kCols / 4> weights;
  m.each([&](int thread) {
    const Lane lane = lane_of(thread);
    RINGSPAN_UNROLL
    for (int i = 0; i < P::kDim / 2; ++i) sums[thread][i] = 1.0F;
    RINGSPAN_UNROLL
    for (int i = 0; i < P::kCols / 4; ++i) {
      const int row = lane.row + i % 2 * 8;
      const int column = i / 4 * 16 + i / 2 % 2 * 8 + lane.column;
      const std::uint16_t* pair = data.weights + row * P::kCols + column;
      weights[thread][i] = pair[0] | static_cast<std::uint32_t>(pair[1]) << 16;
    }
  });
  m.fence_registers(sums, weights);
  product_weights<P>(m, sums, weights, m.shared_address(others));
  m.commit_products();
  m.template wait_products<0>(sums, weights);
  put<M, P::kDim / 2>(m, sums, data.sums);
#endif
}

template <typename P>
cudaError_t launch(const ProbeData& data, TileMaps maps) {
  const TensorMaps tensor_maps = encode_tensor_maps(maps, P::kCols);
  if (maps.count != 1) return cudaErrorNotSupported;
  return launch_blocks(&probe<P>, 1, P::kThreads, ProbeTiles<P>::kBytes, nullptr, data, maps, tensor_maps);
}

template <DType kType, int kColumns>
cudaError_t launch_of(int dim, const ProbeData& data, const TileMaps& maps) {
  if (dim == 64) return launch<WarpgroupPolicy<kType, 64, kColumns, false>>(data, maps);
  return launch<WarpgroupPolicy<kType, 128, kColumns, false>>(data, maps);
}

}  // namespace

cudaError_t launch_probe(const ProbeShape& shape, const ProbeData& data, TileMaps others_map) {
  if (shape.dtype == DType::bfloat16) {
    return shape.columns == 64 ? launch_of<DType::bfloat16, 64>(shape.dim, data, others_map)
                               : launch_of<DType::bfloat16, 128>(shape.dim, data, others_map);
  }
  return shape.columns == 64 ? launch_of<DType::float16, 64>(shape.dim, data, others_map)
                             : launch_of<DType::float16, 128>(shape.dim, data, others_map);
}

}  // namespace ringspan::testing
