// Tile policy: the sizes of tiles, as data. Pure.
//
// A block holds kBlockRows rows of one side (queries, or keys for dk and dv) and walks over the other side kCols at a time. The
// rows are kParts tiles of kRows, one below the other, of each of which a warp has 16. kDim is the head dimension padded with
// zeros: 64, 128 or 256, for both head_dim and head_dim_v. Rows of shared memory are padded by 16 bytes, which spreads eight
// consecutive ones over all banks. To add a faster policy, add its row here; nothing else knows a size.
#pragma once

#include "kernels/attend.h"
#include "kernels/storage.h"
#include "ringspan/dtype.h"

namespace ringspan::cuda {

template <DType kDType, int kPaddedDim, bool kForward>
struct TilePolicy {
  using Storage = kernels::Storage<kDType>;
  using Element = typename Storage::Type;
  static constexpr DType kType = kDType;
  static constexpr bool kHalf = kDType != DType::float32;
  static constexpr int kDim = kPaddedDim;
  static constexpr int kWarps = !kHalf && kDim == 256 ? 2 : 4;
  static constexpr int kThreads = 32 * kWarps;
  static constexpr int kRows = 16 * kWarps;
  // Two parts read each fragment of the other side from shared memory once, whose bandwidth is the limit of one; where their
  // scores and sums fit into the registers.
  static constexpr int kParts = kForward && kHalf && kDim <= 128 ? 2 : 1;
  static constexpr int kBlockRows = kParts * kRows;
  static constexpr int kCols = kDim == 64 || (kHalf && kDim == 128) ? 64 : 32;
  static constexpr int kLead = kDim + (kHalf ? 8 : 4);  // elements from a row of a tile in shared memory to the next
  static constexpr int kStageLead = kCols + 4;          // floats from a row of staged weights to the next
  // One pass for both dk and dv where their sums fit into the registers.
  static constexpr bool kFuseKeyGradients = kDim <= 128;

  static constexpr int kRowTileBytes = kBlockRows * kLead * static_cast<int>(sizeof(Element));
  static constexpr int kColTileBytes = kCols * kLead * static_cast<int>(sizeof(Element));
  // Weights on their way to a product (float32), or a byte per pair of a part (non_finite.h).
  static constexpr int kStageBytes = kHalf ? kRows * kCols : kRows * kStageLead * 4;
  static constexpr int kBytes = kForward ? kRowTileBytes + 2 * kColTileBytes + kStageBytes
                                         : 2 * (kRowTileBytes + kColTileBytes) + kStageBytes + 2 * kCols * 4;
};
template <DType kDType, int kPaddedDim>
using TileForward = TilePolicy<kDType, kPaddedDim, true>;
template <DType kDType, int kPaddedDim>
using TileBackward = TilePolicy<kDType, kPaddedDim, false>;

// For warpgroups (sm_90a, warpgroup.h): two of them multiply, with 64 rows each; half of a third one copies, the other half
// finds out what there is to do. Tiles of the other side have kCols rows. kDim is 64 or 128. kOptions: with softcap, ALiBi and
// dropout, whichever the shape has, in kernels of their own.
template <DType kDType, int kPaddedDim, int kColumns, bool kHasOptions>
struct WarpgroupPolicy {
  using Storage = kernels::Storage<kDType>;
  using Element = typename Storage::Type;
  static constexpr DType kType = kDType;
  static constexpr bool kOptions = kHasOptions;
  static constexpr int kDim = kPaddedDim;
  static constexpr int kThreads = 256;  // that multiply
  static constexpr int kCopiers = 64;
  static constexpr int kFinders = 64;
  static constexpr int kRows = 128;
  static constexpr int kBlockRows = kRows;
  static constexpr int kCols = kColumns;

  static constexpr int kRowTileBytes = kRows * kDim * 2;
  static constexpr int kColTileBytes = kCols * kDim * 2;
};
inline constexpr int kMostSharedBytes = 227 * 1024;  // of a block, sm_90
// Registers of a thread, of those that copy and those that multiply, of the 168 x 384 that a block begins with. Scores, sums
// and packed weights have to fit into them: kCols is what does.
inline constexpr int kProducerRegisters = 40;
inline constexpr int kConsumerRegisters = 232;
static_assert(128 * kProducerRegisters + 256 * kConsumerRegisters <= 168 * 384);
template <DType kDType, int kPaddedDim, bool kOptions>
using WarpgroupForward = WarpgroupPolicy<kDType, kPaddedDim, 128, kOptions>;
template <DType kDType, int kPaddedDim, bool kOptions>
using WarpgroupBackward = WarpgroupPolicy<kDType, kPaddedDim, 64, kOptions>;

// The padded head dimension; 0 where there is none.
constexpr int padded_dim(int head_dim, int head_dim_v) {
  const int dim = head_dim > head_dim_v ? head_dim : head_dim_v;
  return dim <= 64 ? 64 : dim <= 128 ? 128 : dim <= 256 ? 256 : 0;
}

// The shapes of WarpgroupPolicy.
constexpr bool warpgroups_support(const kernels::AttendShape& shape) {
  const int dim = padded_dim(shape.head_dim, shape.head_dim_v);
  return shape.dtype != DType::float32 && (dim == 64 || dim == 128);
}

}  // namespace ringspan::cuda
